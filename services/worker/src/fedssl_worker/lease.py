"""Renews an assignment's lease from a thread while the worker works on it, and detects its cancellation."""

import contextvars
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

import structlog

from fedssl.client import ClientError, Gone, LeaseLost, NotFound, Retry, WorkerClient
from fedssl.errors import Cancelled
from fedssl.protocol.work import Progress, Resources, WorkItem
from fedssl_worker.backoff import is_refusal
from fedssl_worker.disclosure.anchoring import Anchoring

log = structlog.get_logger()

_HEARTBEATS_PER_LEASE = 3
# People watch the progress, so it is reported more often than the lease needs, but rarely enough not to load a
# coordinator with thousands of clients, which have long leases.
_PROGRESS_SECONDS = 2.0
_REPORTS_PER_LEASE = 30
_JOIN_SECONDS = 0.5


def progress_interval(lease_seconds: float) -> float:
    """Return the seconds between heartbeats while there is new progress to report."""
    return min(lease_seconds / _HEARTBEATS_PER_LEASE, max(_PROGRESS_SECONDS, lease_seconds / _REPORTS_PER_LEASE))


class Lease:
    """A lease that is renewed while the block runs. An unreachable coordinator does not end the work: it may return."""

    def __init__(
        self,
        client: WorkerClient,
        item: WorkItem,
        anchoring: Anchoring,
        resources: Callable[[], Resources | None],
    ) -> None:
        """Prepare the lease.

        `resources` returns what each heartbeat reports about this machine, and is called in a thread.
        """
        self._client = client
        self._resources = resources
        self._item = item
        self._anchoring = anchoring
        self._interval = item.lease_seconds / _HEARTBEATS_PER_LEASE
        self._progress_interval = progress_interval(item.lease_seconds)
        self._progress: Progress | None = None
        self._lost: Exception | None = None
        self._done = threading.Event()
        # A copy of this context, so that the thread's log lines and requests name the same round and trace.
        run = contextvars.copy_context().run
        self._thread = threading.Thread(target=run, args=(self._run,), name="lease", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join(_JOIN_SECONDS)

    def report(self, progress: Progress) -> None:
        """Keep the progress for the next heartbeat.

        Raises Cancelled if the work was cancelled, and NotAuthenticated or NotAllowed if this worker was revoked.
        """
        self._progress = progress
        if self._lost is not None:
            raise self._lost

    def _run(self) -> None:
        reported, sent_at = self._progress, time.monotonic()
        while self._lost is None and not self._done.wait(self._progress_interval):
            newest = self._progress
            if newest is reported and time.monotonic() - sent_at < self._interval:
                continue
            reported, sent_at = newest, time.monotonic()
            try:
                self._send_heartbeat(newest)
            except RuntimeError:  # from httpx: the client was closed in the meantime
                if not self._done.is_set():
                    raise

    def _send_heartbeat(self, progress: Progress | None) -> None:
        try:
            with self._anchoring.exchange() as exchange:
                reply = self._client.heartbeat(
                    self._item.assignment_id,
                    progress,
                    exchange.anchor,
                    resources=self._resources(),
                    timeout=max(self._interval, 1.0),
                    retry=Retry(seconds=self._interval / 2),
                )
                exchange.receipt = reply.receipt
            if not reply.carry_on:
                self._lost = Cancelled(reply.reason or "the coordinator cancelled the work")
        except (LeaseLost, Gone, NotFound) as error:
            if error.slug:
                self._lost = Cancelled(str(error))
            else:  # the response of a proxy, for example while it restarts
                log.warning("heartbeat.failed", reason=str(error))
        except ClientError as error:
            if is_refusal(error):
                self._lost = error
            else:
                log.warning("heartbeat.failed", reason=str(error))
