"""Measures the first rounds of a real run, with which a budget is planned after a first estimate."""

import contextlib
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fedssl.data import ImageData
from fedssl.data.image_cache.build import CachedData
from fedssl.errors import Cancelled
from fedssl.experiments.checkpoints import FolderCheckpoint
from fedssl.experiments.runs import ComputeSettings
from fedssl.protocol.runs import RunSpec
from fedssl.simulation import RoundRecord, simulate

NUM_ROUNDS = 2  # the first one also prepares what later ones use


@dataclass(frozen=True, slots=True)
class Pilot:
    """Seconds of a run: before its first round, of one evaluation, and of one round with its checkpoint."""

    loading: float
    judging: float
    round: float


class _Watch:
    """Measures the times of a simulation, and ends it after some rounds."""

    def __init__(self, num_rounds: int, longest_seconds: float) -> None:
        self._num_rounds, self._longest_seconds = num_rounds, longest_seconds
        self._started = self._since = time.monotonic()
        self._judging_since: float | None = None
        self._loading: float | None = None
        self._judging: list[float] = []
        self._rounds: list[float] = []

    def on_judging(self, number: int, what: str, share: float | None) -> None:
        if self._judging_since is None:
            self._judging_since = time.monotonic()
            if self._loading is None:
                self._loading = self._judging_since - self._started

    def on_evaluation(self, number: int, measures: dict[str, float]) -> None:
        self._since = time.monotonic()
        if self._judging_since is not None:
            self._judging.append(self._since - self._judging_since)
            self._judging_since = None

    def on_round(self, record: RoundRecord) -> None:
        now = time.monotonic()
        self._rounds.append(now - self._since)
        self._since = now
        if len(self._rounds) >= self._num_rounds or now - self._started > self._longest_seconds:
            raise Cancelled("measured")

    def pilot(self) -> Pilot:
        preparing = max(0.0, self._rounds[0] - self._rounds[-1])
        return Pilot((self._loading or 0.0) + preparing, min(self._judging, default=0.0), self._rounds[-1])


def run_pilot(
    spec: RunSpec,
    machine: ComputeSettings,
    longest_seconds: float,
    clients: Mapping[str, ImageData | CachedData] | None = None,
    public: ImageData | None = None,
) -> Pilot:
    """Train the first rounds of a run on its own images, and return their times. No result is kept.

    Ends after two rounds, or after the first round that ends later than `longest_seconds`.
    """
    watch = _Watch(min(NUM_ROUNDS, spec.num_rounds), longest_seconds)
    with tempfile.TemporaryDirectory(prefix="fedssl-pilot-") as folder, contextlib.suppress(Cancelled):
        simulate(
            spec,
            clients,
            public=public,
            data_root=machine.data_root,
            device=machine.device,
            jobs=machine.jobs,
            checkpoint=FolderCheckpoint(Path(folder)),
            on_round=watch.on_round,
            on_judging=watch.on_judging,
            on_evaluation=watch.on_evaluation,
        )
    return watch.pilot()
