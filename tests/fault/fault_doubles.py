"""Two coordinators behind one address, two beats and two aggregators. Either of them may die."""

import random
import time
from collections.abc import Iterator

import pytest

from fault import audit, specs
from fault.arena import Arena
from fault.injected import Injected

FAULT_CLASS = "two of every process"

SECONDS = ("beat-2", "aggregator-2", "distiller-2")
DOUBLED = ("api", "api-2", "beat", "aggregator", "distiller", *SECONDS)


@pytest.fixture(scope="module")
def arena(injected: Injected, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    with Arena(tmp_path_factory.mktemp("doubles"), injected, num_apis=2) as running:
        for name in SECONDS:
            running.start(name)
        yield running


@pytest.mark.parametrize("method", ["fedbyol", "flesd"])
def test_doubled_processes_do_not_interfere_with_each_other(method: str, arena: Arena) -> None:
    """With two of each process and no other fault, every step of the run is taken once."""
    arena.injected.note("doubled", "beat, aggregator, distiller, api", "a whole run")
    before = dict(arena.proxy.served)
    spec = specs.spec(method, num_rounds=2)
    audit.completed(arena, arena.begin(spec), spec)
    assert [port for port in arena.proxy.ports if arena.proxy.served.get(port, 0) <= before.get(port, 0)] == []


@pytest.mark.parametrize("method", specs.METHODS)
def test_a_run_completes_although_doubled_processes_die(method: str, arena: Arena, rng: random.Random) -> None:
    spec = specs.spec(method, num_rounds=2)
    run_id = arena.begin(spec)
    for name in rng.sample(DOUBLED, k=5):
        time.sleep(rng.uniform(0.0, 0.5))
        arena.crash_and_revive(name, "one of two", away_seconds=rng.uniform(0.0, 0.5))
    audit.completed(arena, run_id, spec)
