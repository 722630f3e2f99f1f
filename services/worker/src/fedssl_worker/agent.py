"""The worker's loop: register, then claim, train, submit, until it is told to leave."""

import errno
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import structlog
import torch
from structlog.contextvars import bound_contextvars

from fedssl import tracing
from fedssl.client import (
    ApiError,
    ClientError,
    Conflict,
    DuplicateUpdate,
    Gone,
    LeaseLost,
    NotAllowed,
    NotAuthenticated,
    NotFound,
    Rejected,
    ServerError,
    TooManyRequests,
    TryAgain,
    UnknownWork,
    Unreachable,
    WorkerClient,
)
from fedssl.errors import Cancelled, FedSSLError
from fedssl.protocol.base import PROTOCOL_VERSION
from fedssl.protocol.states import AssignmentState
from fedssl.protocol.work import AcceptedUpdate, Progress, Register, Registered, WorkItem
from fedssl_worker.disclosure.egress import Egress
from fedssl_worker.disclosure.ledger import LedgerError
from fedssl_worker.executor import Executor
from fedssl_worker.lease import Lease
from fedssl_worker.metrics import ASSIGNMENTS, TRAINING_SECONDS, UNANSWERED, UPLOAD_BYTES, StepTimer
from fedssl_worker.state import ClientStates

log = structlog.get_logger()

T = TypeVar("T")

_TEMPORARY = (Unreachable, ServerError, TooManyRequests, TryAgain)
_REFUSED = (NotAuthenticated, NotAllowed)
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_IDLE_SECONDS = 0.5
_MAX_RETRY_AFTER_SECONDS = 300.0


class Refused(FedSSLError):
    """The coordinator does not want this worker, now or later."""


@dataclass(slots=True)
class Backoff:
    """Waits between failures: each twice the last, from `first` to `most` seconds; a success starts it anew."""

    first: float = 0.5
    most: float = 30.0
    _next: float = field(default=0.0, init=False)

    def wait(self, at_least: float = 0.0) -> None:
        """`at_least`: the seconds that the coordinator has asked for, at most `_MAX_RETRY_AFTER_SECONDS` of them."""
        self._next = min(max(2 * self._next, self.first), self.most)
        time.sleep(max(self._next, min(at_least, _MAX_RETRY_AFTER_SECONDS)))

    def reset(self) -> None:
        self._next = 0.0


def retry_until_answered(ask: Callable[[], T], backoff: Backoff) -> T:
    """The coordinator's answer, for as long as it takes to reach it. Raises Refused."""
    while True:
        try:
            answer = ask()
        except _TEMPORARY as error:
            log.warning("coordinator does not answer, trying on", reason=str(error))
            backoff.wait((error.retry_after or 0.0) if isinstance(error, ApiError) else 0.0)
        except ClientError as error:
            raise Refused(str(error)) from error
        else:
            backoff.reset()
            return answer


def register(client: WorkerClient, registration: Register, backoff: Backoff) -> Registered:
    """Introduce this worker. Raises Refused."""
    registered = retry_until_answered(lambda: client.register(registration), backoff)
    if registered.protocol_version != PROTOCOL_VERSION:
        raise Refused(
            f"the coordinator speaks protocol {registered.protocol_version}, this worker {PROTOCOL_VERSION}: "
            "install the worker of the coordinator's version"
        )
    return registered


class Agent:
    """Works for one client until an exception ends it: Refused, or the one that a signal raises."""

    def __init__(
        self,
        client: WorkerClient,
        executor: Executor,
        egress: Egress,
        states: ClientStates,
        *,
        claim_seconds: float = 25.0,
        backoff: Backoff | None = None,
        reregister: Callable[[], object] = lambda: None,
        on_idle: Callable[[], None] = lambda: None,
    ) -> None:
        """`reregister` registers this worker again: the coordinator is told when the owner's policy has changed.

        `on_idle` is called while there is nothing to do.
        """
        self._client = client
        self._executor = executor
        self._egress = egress
        self._states = states
        self._claim_seconds = claim_seconds
        self._backoff = backoff or Backoff()
        self._reregister = reregister
        self._on_idle = on_idle

    def run(self) -> None:
        """Claim and work for ever. Raises Refused, and PolicyError when the owner's policy can no longer be used."""
        while True:
            try:
                self.step()
            except _REFUSED as error:
                raise Refused(str(error)) from error
            except _TEMPORARY as error:
                # A trained update is on the disk: the next claim brings the same work, which is then handed in.
                log.warning("coordinator does not answer, trying on", reason=str(error))
                UNANSWERED.inc()
                self._backoff.wait()
            except ClientError as error:
                log.error("the coordinator's answer makes no sense here, trying on", reason=str(error))
                self._backoff.wait()

    def step(self) -> None:
        """One claim, and the work that it brings."""
        self._reload_policy()
        asked = time.monotonic()
        try:
            item = self._client.claim(self._claim_seconds)
        except UnknownWork as error:
            log.warning("declining", reason=str(error))
            self._client.decline(error.assignment_id, str(error))
            self._backoff.wait()
            return
        if item is None:
            self._backoff.reset()
            self._send_anchor()
            self._run_idle_tasks()
            if time.monotonic() - asked < _IDLE_SECONDS:  # a coordinator that does not wait must not be asked for ever
                time.sleep(_IDLE_SECONDS)
            return
        self._reload_policy()  # it may have changed while the claim waited
        with (
            bound_contextvars(run=str(item.run_id), round=item.round_number),
            tracing.round_span("work", item.run_id, item.round_number, client=item.client_id),
        ):
            self._work_on(item)

    def _reload_policy(self) -> None:
        if self._egress.reload():
            log.info("the data owner's policy has changed")
            self._reregister()

    def _run_idle_tasks(self) -> None:
        try:
            self._on_idle()
        except OSError as error:  # what is left over stays until there is room
            log.warning("cannot on_idle up, trying on", reason=error.strerror or type(error).__name__)

    def _send_anchor(self) -> None:
        """While there is nothing to do: have the coordinator anchor what the last requests left over."""
        with self._egress.anchoring.exchange() as exchange:
            if exchange.anchor is not None:
                exchange.receipt = self._client.heartbeat(anchor=exchange.anchor).receipt

    def _work_on(self, item: WorkItem) -> None:
        """Train and hand in, or say why not."""
        log.info("claimed", method=item.spec.method.name, assignment=str(item.assignment_id))
        try:
            self._train_and_submit(item)
            self._backoff.reset()
        except (Cancelled, LeaseLost, Gone, DuplicateUpdate) as error:
            log.warning("work called off", reason=str(error))
            ASSIGNMENTS.labels("called off").inc()
            self._backoff.wait()
        except (*_REFUSED, *_TEMPORARY):
            raise
        except ClientError as error:
            # Only what was said of the work ends it. A proxy's 404 or an expired certificate is somebody's to mend, and
            # a trained update stays for that long: the next claim brings the same work, which is then handed in.
            if not _is_verdict(error):
                raise
            self._decline(item, str(error))
        except LedgerError as error:
            if self._waits_for_space(error):
                return
            log.error("nothing leaves", reason=str(error))
            self._decline(item, "the worker cannot write down what leaves, so nothing does: its log says more")
        except FedSSLError as error:
            self._decline(item, str(error))
        except Exception as error:  # the process loop: one run's surprise must not end the worker
            if self._waits_for_space(error):
                return
            log.exception("work failed")
            # The message may quote what is on this machine, so only the kind of error leaves it.
            self._decline(item, f"the worker failed unexpectedly ({type(error).__name__}): its log says more")
            if isinstance(error, torch.AcceleratorError):
                raise  # the device answers nothing from here on; a new process can use it again

    def _train_and_submit(self, item: WorkItem) -> None:
        started = time.monotonic()
        self._egress.require_permitted(item)
        with Lease(self._client, item, self._egress.anchoring) as lease:
            step_timer = StepTimer()

            def report(progress: Progress) -> None:
                step_timer.observe(progress)
                lease.report(self._egress.permitted_progress(item, progress))

            with tracing.span("train"), TRAINING_SECONDS.time():
                finished = self._executor.execute(item, report)
            log.info("trained", seconds=round(time.monotonic() - started, 2), metrics=finished.metrics)
            uploading = Progress(phase="uploading", epoch=0, num_epochs=0, step=0, num_steps=0)
            lease.report(uploading)
            numbers = self._egress.permitted_metrics(item, finished.metrics)
            numbers["num_examples"] = finished.num_examples
            self._egress.send(item, finished.update, finished.digest, numbers, lambda _: lease.report(uploading))
            answer = self._egress.submit(item, finished)
        log.info("submitted", state=answer.state.value, digest=finished.digest)
        UPLOAD_BYTES.inc(finished.update.stat().st_size)
        ASSIGNMENTS.labels(answer.state.value).inc()
        if answer.state is AssignmentState.ACCEPTED:
            # Both stay until the next claim names the one to go on from: the older, where the round is skipped.
            accepted = AcceptedUpdate(round_number=item.round_number, update=finished.digest)
            self._states.discard(item.run_id, accepted, item.last_accepted)
        elif answer.state is AssignmentState.REJECTED:
            self._states.discard(item.run_id, item.last_accepted)

    def _waits_for_space(self, error: Exception) -> bool:
        """A full disk is somebody's to empty, and no reason to give work back: the next claim brings it again."""
        if not any(cause.errno in _NO_SPACE for cause in (error, error.__cause__) if isinstance(cause, OSError)):
            return False
        log.error("the disk is full, the work waits: make room for the worker's state", reason=str(error))
        self._backoff.wait()
        return True

    def _decline(self, item: WorkItem, reason: str) -> None:
        log.warning("declining", reason=reason)
        try:
            self._client.decline(item.assignment_id, reason)
        except (Conflict, Gone, NotFound, Rejected) as error:
            if not error.slug:
                raise
            log.info("nothing left to decline", reason=str(error))  # it is not ours any more
        ASSIGNMENTS.labels("declined").inc()
        self._states.discard(item.run_id, item.last_accepted)
        self._backoff.wait()


def _is_verdict(error: ClientError) -> bool:
    """Whether the coordinator itself has said no, or a proxy before it to these very bytes (413)."""
    return isinstance(error, Rejected) or (isinstance(error, ApiError) and bool(error.slug))
