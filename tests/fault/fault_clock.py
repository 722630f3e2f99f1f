"""Clocks that jump by a day, forwards and back: each machine's in turn, and the database's."""

import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from fault import audit, specs
from fault.federation import COORDINATOR, POSTGRES, FaultFederation
from fault.injected import Injected
from fault.points import Round, until_open, without_nudges
from fedssl_local import server
from support.clocks import Clocks

FAULT_CLASS = "clocks that jump"


@pytest.fixture(scope="module")
def clocks() -> Iterator[Clocks]:
    with tempfile.TemporaryDirectory() as folder:  # not in pytest's folder, which only its owner may read
        Path(folder).chmod(0o755)
        yield Clocks(Path(folder) / "clocks")


@pytest.fixture(scope="module")
def federation(
    injected: Injected, clocks: Clocks, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FaultFederation]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in clocks.environment(POSTGRES).items():
            patch.setitem(server.SERVER_ENVIRONMENT, name, value)
        with FaultFederation(tmp_path_factory.mktemp("clocks"), injected, environment_of=clocks.environment) as running:
            yield running


@pytest.mark.parametrize("name", [*COORDINATOR, "client-0", POSTGRES])
def test_a_run_completes_although_a_clock_jumps(
    name: str, federation: FaultFederation, clocks: Clocks, rng: random.Random
) -> None:
    """The clock is a day ahead in the first round, a day behind in the second, and right in the third.

    In each round all messages to the aggregator are lost, so that only the sweep can advance the run.
    """
    spec = specs.spec(rng.choice(["fedbyol", "scaffold", "ssd"]), num_rounds=3)
    run_id = federation.begin(spec)
    for number, offset in ((1, "+1d"), (2, "-1d"), (3, "+0")):
        at = Round(run_id, number)
        until_open(federation, at)
        federation.injected.note("clock jumped", name, f"to {offset}")
        clocks.jump(name, offset)
        without_nudges(federation, at)
    audit.completed(federation, run_id, spec)
