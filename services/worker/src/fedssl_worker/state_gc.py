"""Forgets client states that no run will ever ask for again."""

import itertools
import time

import structlog

from fedssl.client import NotFound, WorkerClient
from fedssl.protocol.work import MOST_RUNS
from fedssl_worker.state import ClientStates

log = structlog.get_logger()


class StateCollector:
    """Asks the coordinator now and then which of the runs that states are kept for have ended.

    Their states stay for a while: a coordinator that is restored from a backup may go on with such a run.
    """

    def __init__(
        self, client: WorkerClient, states: ClientStates, keep_seconds: float, every_seconds: float = 3600.0
    ) -> None:
        self._client = client
        self._states = states
        self._keep_seconds = keep_seconds
        self._every_seconds = every_seconds
        self._next = float("-inf")

    def collect(self) -> None:
        """Do so where it is due. Raises ClientError."""
        if time.monotonic() < self._next:
            return
        known = iter(self._states.runs())
        ended = set()
        try:
            while some := list(itertools.islice(known, MOST_RUNS)):
                ended |= self._client.ended_runs(some)
        except NotFound:
            log.warning("this coordinator does not say which runs have ended: client states stay")
        else:
            for run_id in self._states.remove_ended(ended, self._keep_seconds):
                log.info("client state of an ended run removed", run=str(run_id))
        self._next = time.monotonic() + self._every_seconds
