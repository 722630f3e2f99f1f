"""Faults with a known cause: the coordinator's files, a client's state, or a computation that ends its own process."""

import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from uuid import UUID

import pytest
import torch

from fault import audit, specs
from fault.federation import FaultFederation
from fault.gates import artifacts_held
from fault.points import Round, aggregator_waits, until_open
from fedssl.artifacts.tensors import load_tensors
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.states import Cause, Outcome, RunState
from fedssl.simulation import simulate

FAULT_CLASS = "coordinator-side causes and lost client state"

ONE_ATTEMPT = {**specs.COHORT, "max_attempts": 1}
LOSER = "client-0"
_NO_PAUSE = "UPDATE runs SET retry_at = now() WHERE id = %s AND retry_at IS NOT NULL"


def _flip(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


@contextmanager
def _unusable(federation: FaultFederation, path: Path, fault: str, rng: random.Random) -> Iterator[None]:
    """Delete or damage a file of the store during the block, and restore it afterwards."""
    federation.injected.note(fault, "store", "the broadcast")
    whole = path.read_bytes()
    if fault == "lost file":
        path.unlink()
    else:
        _flip(path, rng)
    try:
        yield
    finally:
        path.write_bytes(whole)


@pytest.mark.parametrize("fault", ["lost file", "bit rot"])
def test_a_run_waits_for_a_missing_or_damaged_broadcast(
    fault: str, federation: FaultFederation, rng: random.Random
) -> None:
    """Both workers decline more often than the round has attempts. The run waits, and ends with the same bits."""
    spec = specs.spec(rng.choice(specs.METHODS), num_rounds=2, cohort=ONE_ATTEMPT, seed=rng.randrange(2**32))
    with ExitStack() as stack:
        with (
            federation.stopped("client-0", "before its download"),
            federation.stopped("client-1", "before its download"),
        ):
            run_id = federation.begin(spec)
            until_open(federation, Round(run_id, 1))
            [(digest,)] = federation.query("SELECT broadcast FROM rounds WHERE run_id = %s", run_id)
            path = federation.store / digest[:2] / digest[2:4] / digest
            stack.enter_context(_unusable(federation, path, fault, rng))
        federation.until(lambda: digest in (federation.client.run(run_id).reason or ""), "the reason")
        declined = "SELECT DISTINCT cause FROM assignments WHERE run_id = %s AND state = 'declined'"
        assert federation.query(declined, run_id) == [(Cause.COORDINATOR,)]
    _without_pauses(federation, run_id)
    audit.completed(federation, run_id, spec)
    assert {number for (number,) in federation.query("SELECT attempt FROM rounds WHERE run_id = %s", run_id)} == {1}


def _without_pauses(federation: FaultFederation, run_id: UUID) -> None:
    with federation.tables() as tables:
        tables.execute(_NO_PAUSE, run_id)


@pytest.mark.parametrize("method", ["fedbyol", "scaffold"])
@pytest.mark.parametrize("fault", ["lost file", "bit rot"])
def test_a_lost_client_state_is_recorded_and_the_client_trains_without_it(
    method: str, fault: str, federation: FaultFederation, rng: random.Random
) -> None:
    """The coordinator records the loss, and the weights are those of a simulation in which the client loses its
    state."""
    spec = specs.spec(method, num_rounds=4)
    run_id = federation.begin(spec)
    number = rng.choice([1, 2])
    until_open(federation, Round(run_id, number))
    with aggregator_waits(federation, Round(run_id, number)):
        [folder] = (federation.state(LOSER) / "runs" / str(run_id)).glob(f"{number:06d}-*")
        federation.injected.note(fault, LOSER, "its client state")
        if fault == "lost file":
            shutil.rmtree(folder)
        else:
            _flip(folder / rng.choice(["state.safetensors", "note.json"]), rng)
    run = federation.finished(run_id)
    assert run.outcome == Outcome.COMPLETED, run.reason
    [event] = federation.client.event_log(run_id, "client.state_lost")
    assert (event.client_id, event.round_number, event.data["accepted_round"]) == (LOSER, number + 1, number)
    _same_as_cold(federation, run_id, spec, number + 1)
    with federation.tables() as tables:
        audit.nothing_lost_or_twice(tables, run_id, spec)
    audit.story(list(federation.client.event_log(run_id)), spec)


def _same_as_cold(federation: FaultFederation, run_id: UUID, spec: RunSpec, number: int) -> None:
    expected = simulate(spec, specs.images(), lost_states={number: [LOSER]}).model
    path = federation.folder / "model.safetensors"
    federation.client.download_model(run_id, path)
    deployed = load_tensors(path)
    assert [name for name in expected if not torch.equal(deployed[name], expected[name])] == []


def test_an_aggregation_that_always_ends_its_process_is_given_up(
    federation: FaultFederation, rng: random.Random
) -> None:
    """The aggregation is given up after five tries, with its cause, and completes after the run is resumed."""
    spec = specs.spec(rng.choice(["fedbyol", "scaffold", "ssd"]), num_rounds=2, seed=rng.randrange(2**32))
    run_id = federation.begin(spec)
    at = Round(run_id, rng.choice([1, 2]))
    until_open(federation, at)
    with ExitStack() as stack:
        with aggregator_waits(federation, at):
            until_blocked = stack.enter_context(artifacts_held(federation))
        _crash(federation, until_blocked)
    for _ in range(4):
        with artifacts_held(federation) as until_blocked:
            federation.revive("aggregator")
            _without_pauses(federation, run_id)
            _crash(federation, until_blocked)
    federation.revive("aggregator")
    _without_pauses(federation, run_id)
    federation.until(lambda: federation.client.run(run_id).state == RunState.PAUSED, "the quarantine")
    assert f"the aggregation of round {at.number} was given up: 5 tries" in (federation.client.run(run_id).reason or "")
    federation.client.resume(run_id)
    audit.completed(federation, run_id, spec)


def _crash(federation: FaultFederation, until_blocked: Callable[[str], None]) -> None:
    until_blocked("the rows of the new weights")
    federation.crash("aggregator", "in every try of an aggregation")
