"""Removes client states, and secrets of secure rounds, that no run will need again."""

import itertools
import time

import structlog

from fedssl.client import NotFound, WorkerClient
from fedssl.protocol.work import MOST_RUNS
from fedssl_worker.secure_rounds import SecureRounds
from fedssl_worker.state import ClientStates

log = structlog.get_logger()


class StateCollector:
    """Asks the coordinator from time to time which runs have ended, and removes their client states and secrets.

    The secrets of secure rounds are removed at once. The states stay for `keep_seconds`, because a coordinator that is
    restored from a backup may continue such a run.
    """

    def __init__(
        self,
        client: WorkerClient,
        states: ClientStates,
        secure: SecureRounds,
        keep_seconds: float,
        every_seconds: float = 3600.0,
    ) -> None:
        self._client = client
        self._states = states
        self._secure = secure
        self._keep_seconds = keep_seconds
        self._every_seconds = every_seconds
        self._next = float("-inf")

    def collect(self) -> None:
        """Ask and remove, if the last time was at least `every_seconds` ago. Raises ClientError."""
        if time.monotonic() < self._next:
            return
        unfinished = self._secure.unfinished()
        known = iter(sorted({*self._states.runs(), *unfinished}))
        ended = set()
        try:
            while batch := list(itertools.islice(known, MOST_RUNS)):
                ended |= self._client.ended_runs(batch)
        except NotFound:
            log.warning("ended_runs.unavailable", reason="the coordinator is older", consequence="client states stay")
        else:
            for run_id in ended.intersection(unfinished):
                self._secure.end(run_id)
            for run_id in self._states.remove_ended(ended, self._keep_seconds):
                log.info("client_state.removed", run=str(run_id))
        self._next = time.monotonic() + self._every_seconds
