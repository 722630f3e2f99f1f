"""Full disks of the store and of a worker."""

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from fault import audit, specs
from fault.disks import filled_disk, small_disk, unable_to_write
from fault.federation import FaultFederation
from fault.injected import Injected
from fault.points import Round, aggregator_waits, until_open

FAULT_CLASS = "full disks"

WORKER = "client-0"


class Disks:
    """The disks of the store and of one worker. They are small if such disks can be mounted."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        federation = folder / "federation"
        self._store, self._state = federation / "store", federation / "state" / WORKER
        self._are_mounted = all(stack.enter_context(small_disk(path)) for path in (self._store, self._state))

    @contextmanager
    def store_full(self, federation: FaultFederation) -> Iterator[None]:
        with self._without_space(federation, self._store, "api", "aggregator", "distiller"):
            yield

    @contextmanager
    def worker_full(self, federation: FaultFederation) -> Iterator[None]:
        with self._without_space(federation, self._state, WORKER):
            yield

    @contextmanager
    def _without_space(self, federation: FaultFederation, folder: Path, *names: str) -> Iterator[None]:
        federation.injected.note("full disk", names[0], "for seconds")
        with ExitStack() as stack:
            if self._are_mounted:
                stack.enter_context(filled_disk(folder))
            else:
                for name in names:
                    stack.enter_context(unable_to_write(federation.pid(name), federation.folder / f"{name}.log"))
            yield


@pytest.fixture(scope="module")
def disks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Disks, Path]]:
    with ExitStack() as stack:
        folder = tmp_path_factory.mktemp("disks")
        yield Disks(folder, stack), folder


@pytest.fixture(scope="module")
def federation(injected: Injected, disks: tuple[Disks, Path]) -> Iterator[FaultFederation]:
    with FaultFederation(disks[1], injected) as running:
        yield running


def test_an_update_is_sent_again_after_the_store_was_full(
    federation: FaultFederation, disks: tuple[Disks, Path], rng: random.Random
) -> None:
    """The coordinator asks for the update again later, and the worker still has it."""
    spec = specs.spec(rng.choice(["fedbyol", "scaffold"]), num_rounds=2)
    run_id = federation.begin(spec)
    for number in range(1, spec.num_rounds + 1):
        until_open(federation, Round(run_id, number))
        with disks[0].store_full(federation):
            federation.until(lambda: _says(federation, "api", "store.failed"), "an upload without room")
    audit.completed(federation, run_id, spec)


def test_an_aggregation_is_retried_after_the_store_was_full(
    federation: FaultFederation, disks: tuple[Disks, Path]
) -> None:
    """The aggregation is retried, and an event reports the reason."""
    spec = specs.spec("scaffold", num_rounds=2)
    run_id = federation.begin(spec)
    until_open(federation, Round(run_id, 1))
    with ExitStack() as stack:
        with aggregator_waits(federation, Round(run_id, 1)):
            stack.enter_context(disks[0].store_full(federation))
        stalled = "SELECT 1 FROM events WHERE run_id = %s AND kind = 'run.stalled'"
        federation.until(lambda: federation.query(stalled, run_id), "an aggregation without room")
    audit.completed(federation, run_id, spec)


def test_a_run_completes_after_a_workers_disk_was_full(
    federation: FaultFederation, disks: tuple[Disks, Path], rng: random.Random
) -> None:
    """If the disk is full, the worker waits for space. If its own limit is reached instead, it declines its
    assignment.

    A declined assignment is offered again after a tenth of the round's time.
    """
    cohort = {**specs.COHORT, "deadline_seconds": 200}
    spec = specs.spec(rng.choice(["fedbyol", "scaffold"]), num_rounds=2, cohort=cohort)
    run_id = federation.begin(spec)
    for number in range(1, spec.num_rounds + 1):
        until_open(federation, Round(run_id, number))
        with disks[0].worker_full(federation):
            federation.until(lambda: _says(federation, WORKER, "disk.full", "File too large"), "a worker without room")
    audit.completed(federation, run_id, spec)


def _says(federation: FaultFederation, name: str, *words: str) -> bool:
    """Return whether one of these words is in the log of a process, and empty the log if so."""
    log = federation.folder / f"{name}.log"
    text = log.read_text(encoding="utf-8", errors="replace")
    found = any(word in text for word in words)
    if found:
        log.write_bytes(b"")
    return found
