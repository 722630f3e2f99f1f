"""The worker's loop: register, then claim, train and submit until the process is stopped."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress

import structlog
import torch
from structlog.contextvars import bound_contextvars

from fedssl import tracing
from fedssl.backoff import Backoff
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
    UnknownWork,
    WorkerClient,
)
from fedssl.errors import Cancelled, DataError, FedSSLError, MethodError
from fedssl.files import NO_SPACE
from fedssl.liveness import Health, report
from fedssl.protocol.base import PROTOCOL_VERSION
from fedssl.protocol.states import AssignmentState, Cause
from fedssl.protocol.work import AcceptedUpdate, Progress, Register, Registered, Resources, WorkItem
from fedssl.secure_aggregation import RoundContext
from fedssl_worker.backoff import PROXY_REFUSED, TEMPORARY, Refused, is_refusal, retry_until_answered
from fedssl_worker.causes import CannotTrain, cause_of, reason_of
from fedssl_worker.disclosure.egress import Egress
from fedssl_worker.disclosure.ledger import LedgerError
from fedssl_worker.executor import Executor
from fedssl_worker.lease import Lease
from fedssl_worker.metrics import ASSIGNMENTS, TRAINING_SECONDS, UNANSWERED, UPLOAD_BYTES, StepTimer
from fedssl_worker.resources import measured_resources
from fedssl_worker.secure_rounds import SecureRound
from fedssl_worker.state import StateUnwritable

log = structlog.get_logger()

_REFUSED = (NotAuthenticated, NotAllowed)
_IDLE_SECONDS = 0.5
"""The pause between two claims if the coordinator responds at once instead of waiting for work."""


def register(client: WorkerClient, registration: Register, backoff: Backoff) -> Registered:
    """Register this worker with the coordinator. Raises Refused."""
    registered = retry_until_answered(lambda: client.register(registration), backoff)
    if registered.protocol_version != PROTOCOL_VERSION:
        raise Refused(
            f"the coordinator speaks protocol version {registered.protocol_version}, this worker {PROTOCOL_VERSION}: "
            "install the worker of the coordinator's version"
        )
    return registered


class Agent:
    """The loop that works for one client until an exception: Refused, PolicyError, or the one that a signal raises."""

    def __init__(
        self,
        client: WorkerClient,
        executor: Executor,
        egress: Egress,
        *,
        claim_seconds: float = 25.0,
        backoff: Backoff | None = None,
        reregister: Callable[[], object] = lambda: None,
        on_idle: Callable[[], None] = lambda: None,
        evaluate: Callable[[], None] = lambda: None,
        shown: Callable[[WorkItem], AbstractContextManager[None]] = lambda item: nullcontext(),
        begin_secure: Callable[[WorkItem, RoundContext], SecureRound] | None = None,
    ) -> None:
        """Set up an agent.

        Args:
            claim_seconds: how long one claim waits for work.
            reregister: registers this worker again, which reports a changed policy to the coordinator.
            on_idle: is called while there is no work.
            evaluate: answers an evaluation at this site. It is called while there is one and no work, and before a
            training that replaces the BatchNorm which the evaluation needs.
            shown: shows claimed work to the data owner until it has ended.
            begin_secure: begins this worker's part in a secure round. Without it, such work is declined.
        """
        self._client = client
        self._executor = executor
        self._egress = egress
        self._claim_seconds = claim_seconds
        self._backoff = backoff or Backoff()
        self._reregister = reregister
        self._on_idle = on_idle
        self._evaluate = evaluate
        self._shown = shown
        self._secure = begin_secure

    def run(self) -> None:
        """Claim and work until an exception. Raises Refused, and PolicyError if the policy becomes invalid."""
        while True:
            try:
                self.step()
            except _REFUSED as error:
                if is_refusal(error):
                    raise Refused(str(error)) from error
                UNANSWERED.inc()
                self._retry_later(log.error, "coordinator.answer_invalid", error, todo=PROXY_REFUSED)
            except TEMPORARY as error:
                # A trained update is on the disk: the next claim returns the same work, whose update is then submitted.
                UNANSWERED.inc()
                self._retry_later(log.warning, "coordinator.unreachable", error)
            except ClientError as error:
                self._retry_later(log.error, "coordinator.answer_invalid", error)

    def step(self) -> None:
        """Claim once, and do the work that the claim returns."""
        self._reload_policy()
        asked = time.monotonic()
        try:
            item = self._client.claim(self._claim_seconds)
            report(Health.READY)
        except UnknownWork as error:
            log.warning("work.declined", reason=str(error))
            self._client.decline(error.assignment_id, str(error), Cause.CLIENT_MACHINE)
            self._backoff.wait()
            return
        if item is None:
            self._backoff.reset()
            self._send_anchor()
            self._run_idle_tasks()
            if self._client.has_site_evaluations:
                self._evaluate()
                return
            if self._client.pause_seconds > 0:  # the client was not drawn, and the next round is not expected earlier
                time.sleep(self._client.pause_seconds)
                return
            if time.monotonic() - asked < _IDLE_SECONDS:
                time.sleep(_IDLE_SECONDS)
            return
        self._reload_policy()  # it may have changed while the claim was waiting
        with (
            bound_contextvars(run=str(item.run_id), round=item.round_number),
            tracing.round_span("work", item.run_id, item.round_number, client=item.client_id),
            self._shown(item),
        ):
            self._work_on(item)

    def _reload_policy(self) -> None:
        if self._egress.reload():
            log.info("policy.changed")
            self._reregister()

    def _run_idle_tasks(self) -> None:
        try:
            self._on_idle()
        except OSError as error:  # most likely a full disk; the next idle moment retries
            log.warning("idle_tasks.failed", reason=error.strerror or type(error).__name__)

    def _send_anchor(self) -> None:
        """Send an anchor for ledger entries that no request has anchored yet."""
        with self._egress.anchoring.exchange() as exchange:
            if exchange.anchor is not None:
                exchange.receipt = self._client.heartbeat(anchor=exchange.anchor).receipt

    def _work_on(self, item: WorkItem) -> None:
        """Train and submit, or decline with the reason."""
        log.info("work.claimed", method=item.spec.method.name, assignment=str(item.assignment_id))
        try:
            self._train_and_submit(item)
            self._backoff.reset()
        except (Cancelled, LeaseLost, Gone, DuplicateUpdate) as error:
            log.warning("work.cancelled", reason=str(error))
            ASSIGNMENTS.labels("called off").inc()
            self._backoff.wait()
        except (*_REFUSED, *TEMPORARY):
            raise
        except ClientError as error:
            # Only the coordinator's own refusal of the work ends it. A proxy's 404 or an expired certificate will be
            # repaired, and a trained update is kept until then: the next claim returns the same work.
            if not _is_verdict(error):
                raise
            self._decline(item, str(error), cause_of(error))
        except (LedgerError, StateUnwritable) as error:
            if self._wait_if_disk_is_full(error):
                return
            what = "ledger" if isinstance(error, LedgerError) else "state"
            log.error(f"{what}.unwritable", reason=str(error))
            reason = f"the worker cannot write its {what}, so it sends nothing: see its log"
            self._decline(item, reason, Cause.CLIENT_MACHINE)
        except FedSSLError as error:
            self._decline(item, _reason(item, error), cause_of(error))
        except Exception as error:  # the process loop: an error in one run must not end the worker
            if self._wait_if_disk_is_full(error):
                return
            log.exception("work.failed")
            # The message may quote files of this machine, so the reason has only the error's type.
            has_lost_device = isinstance(error, torch.AcceleratorError)
            what = "lost its GPU, and ends" if has_lost_device else "failed unexpectedly"
            self._decline(item, f"the worker {what} ({type(error).__name__}): see its log", Cause.CLIENT_MACHINE)
            if has_lost_device:
                raise  # this process can no longer use the device; a new one can

    def _train_and_submit(self, item: WorkItem) -> None:
        started = time.monotonic()
        self._egress.require_permitted(item)

        def resources() -> Resources | None:
            return self._egress.permitted_resources(item, measured_resources())

        secure = None
        if item.spec.secure_aggregation is not None:
            secure = self._begin_secure(item, self._executor.secure_context(item))
        with Lease(self._client, item, self._egress.anchoring, resources) as lease:
            if item.spec.model.batch_norm == "local" and item.spec.site_evaluation is not None:
                self._evaluate()  # the last round's evaluation needs a state that the next claim may remove
            step_timer = StepTimer()

            def report(progress: Progress) -> None:
                step_timer.observe(progress)
                lease.report(self._egress.permitted_progress(item, progress))

            agreeing = nullcontext() if secure is None else secure.agreeing()
            with agreeing, tracing.span("train"), TRAINING_SECONDS.time():
                finished = self._executor.execute(item, report)
            log.info("work.trained", seconds=round(time.monotonic() - started, 2), metrics=finished.metrics)
            uploading = Progress(phase="uploading", epoch=0, num_epochs=0, step=0, num_steps=0)
            lease.report(uploading)
            if secure is not None:
                words = self._executor.secure_words(item, finished)
                secure.finish(finished, words, lambda: lease.report(uploading))
                answer = AssignmentState.ACCEPTED
            else:
                answer = self._egress.deliver(item, finished, lambda _: lease.report(uploading)).state
        log.info("update.submitted", state=answer.value, digest=finished.digest)
        UPLOAD_BYTES.inc(finished.update.stat().st_size)
        ASSIGNMENTS.labels(answer.value).inc()
        if answer is AssignmentState.ACCEPTED:
            # Keep both until the next claim names the state to continue from: the older one if the round is skipped, or
            # if the coordinator has lost the update and asks for it again.
            accepted = AcceptedUpdate(round_number=item.round_number, update=finished.digest)
            self._executor.discard(item, resent=accepted)
        elif answer is AssignmentState.REJECTED:
            self._executor.discard(item)

    def _begin_secure(self, item: WorkItem, context: RoundContext) -> SecureRound:
        if self._secure is None:
            raise CannotTrain("this worker has no identity key for secure aggregation")
        return self._secure(item, context)

    def _wait_if_disk_is_full(self, error: Exception) -> bool:
        """Return whether the disk is full, and wait if so.

        Work is not declined for a full disk, because someone will make room: the next claim returns the work again.
        """
        if not any(cause.errno in NO_SPACE for cause in (error, error.__cause__) if isinstance(cause, OSError)):
            return False
        self._retry_later(log.error, "disk.full", error, todo="make room for the worker's state")
        return True

    def _retry_later(self, write: Callable[..., object], event: str, error: Exception, **fields: str) -> None:
        """Log a temporary error, and wait."""
        delay = self._backoff.next_delay()
        write(event, reason=str(error), **fields, retry_in_seconds=delay)
        report(Health.UNREADY, str(error))
        time.sleep(delay)

    def _decline(self, item: WorkItem, reason: str, cause: Cause) -> None:
        log.warning("work.declined", reason=reason, cause=cause.value)
        try:
            self._client.decline(item.assignment_id, reason, cause)
        except (Conflict, Gone, NotFound, Rejected) as error:
            if not error.slug:
                raise
            log.info("assignment.already_ended", reason=str(error))
        ASSIGNMENTS.labels("declined").inc()
        if item.spec.secure_aggregation is None:  # otherwise the vector may be in the sum; the next claim reports it
            with suppress(OSError):  # a disk that cannot be written may be the reason
                self._executor.discard(item)  # the next work removes what is left
        self._backoff.wait()


def _reason(item: WorkItem, error: FedSSLError) -> str:
    """Return the reason that the coordinator receives.

    The reason of a failed training may contain a number of images or a loss, and stays here in a secure round.
    """
    if item.spec.secure_aggregation is None or not isinstance(error, DataError | MethodError):
        return reason_of(error)
    log.error("training.failed", reason=str(error))
    return f"the training failed ({type(error).__name__}): the worker's log has the reason"


def _is_verdict(error: ClientError) -> bool:
    """Return whether the coordinator itself refused the work, or a proxy refused the size of its update (413)."""
    return isinstance(error, Rejected) or (isinstance(error, ApiError) and bool(error.slug))
