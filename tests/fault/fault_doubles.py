"""Two coordinators behind one address, two beats and two aggregators. Either of them may die."""

import random
import time
from collections.abc import Iterator

import pytest

from fault import audit, specs
from fault.federation import FaultFederation
from fault.injected import Injected

FAULT_CLASS = "two of every process"

SECONDS = ("beat-2", "aggregator-2", "distiller-2")
DOUBLED = ("api", "api-2", "beat", "aggregator", "distiller", *SECONDS)


@pytest.fixture(scope="module")
def federation(injected: Injected, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultFederation]:
    with FaultFederation(tmp_path_factory.mktemp("doubles"), injected, num_apis=2) as running:
        for name in SECONDS:
            running.start(name)
        yield running


@pytest.mark.parametrize("method", ["fedbyol", "flesd"])
def test_doubled_processes_do_not_interfere_with_each_other(method: str, federation: FaultFederation) -> None:
    """With two of each process and no other fault, every step of the run is taken once."""
    federation.injected.note("doubled", "beat, aggregator, distiller, api", "a whole run")
    before = dict(federation.proxy.served)
    spec = specs.spec(method, num_rounds=2)
    audit.completed(federation, federation.begin(spec), spec)
    assert [
        port for port in federation.proxy.ports if federation.proxy.served.get(port, 0) <= before.get(port, 0)
    ] == []


@pytest.mark.parametrize("method", specs.METHODS)
def test_a_run_completes_although_doubled_processes_die(
    method: str, federation: FaultFederation, rng: random.Random
) -> None:
    spec = specs.spec(method, num_rounds=2)
    run_id = federation.begin(spec)
    for name in rng.sample(DOUBLED, k=5):
        time.sleep(rng.uniform(0.0, 0.5))
        federation.crash_and_revive(name, "one of two", away_seconds=rng.uniform(0.0, 0.5))
    audit.completed(federation, run_id, spec)
