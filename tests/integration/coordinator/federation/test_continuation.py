"""Completed runs that are continued for more rounds, by real workers in this process."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedssl.client import Conflict, NotFound
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.states import Outcome, RunState
from fedssl.simulation import simulate
from support import traces
from support.agents import LOST, Workers
from support.coordinator import Coordinator
from support.methods import method_spec, shards
from support.scenario import Scenario
from support.tables import Tables

pytestmark = pytest.mark.integration


@pytest.fixture
def scenario(coordinator: Coordinator, tables: Tables, tmp_path: Path) -> Scenario:
    return Scenario(coordinator, tables, tmp_path, num_rounds=2)


def _spec(method: str, num_rounds: int, **changes: Any) -> RunSpec:
    return method_spec(method, num_rounds=num_rounds, cohort={"min_clients": 3}, **changes)


def _completed(workers: Workers) -> None:
    for _ in range(workers.spec.num_rounds):
        workers.train()
    assert workers.coordinator.client.run(workers.id).outcome == Outcome.COMPLETED


def _continue(workers: Workers, num_rounds: int) -> None:
    run = workers.coordinator.client.continue_run(workers.id, num_rounds)
    assert (run.state, run.num_rounds, run.spec.num_rounds) == (RunState.RUNNING, num_rounds, num_rounds)
    workers.coordinator.advance(workers.id)
    for _ in range(num_rounds - workers.spec.num_rounds):
        workers.train()


@pytest.mark.parametrize(
    "method", ["scaffold", *(pytest.param(name, marks=pytest.mark.full) for name in ("fedbyol", "fedmoco"))]
)
def test_a_continued_run_has_the_bits_of_one_with_all_rounds(
    coordinator: Coordinator, tables: Tables, tmp_path: Path, method: str
) -> None:
    """The target of BYOL is part of the client's state, and SCAFFOLD has control variates on both sides."""
    workers = Workers(coordinator, tmp_path, _spec(method, 2))
    _completed(workers)
    _continue(workers, 4)
    assert workers.events("client.state_lost") == []
    [event] = workers.events("run.resumed")
    assert event.message == "continued after its 2 rounds, until it has 4"
    whole = _spec(method, 4)
    workers.assert_simulated(simulate(whole, shards(whole)))
    traces.check(tables, workers.id)


@pytest.mark.full
def test_a_run_can_be_continued_twice(coordinator: Coordinator, tables: Tables, tmp_path: Path) -> None:
    workers = Workers(coordinator, tmp_path, _spec("fedbyol", 1))
    _completed(workers)
    for num_rounds in (2, 3):
        coordinator.client.continue_run(workers.id, num_rounds)
        coordinator.advance(workers.id)
        workers.train()
    whole = _spec("fedbyol", 3)
    workers.assert_simulated(simulate(whole, shards(whole)))
    traces.check(tables, workers.id)


def test_a_client_that_has_removed_its_state_starts_cold_and_is_reported(
    coordinator: Coordinator, tables: Tables, tmp_path: Path
) -> None:
    workers = Workers(coordinator, tmp_path, _spec("fedbyol", 2))
    _completed(workers)
    shutil.rmtree(tmp_path / LOST / "runs" / str(workers.id))
    _continue(workers, 3)
    [event] = workers.events("client.state_lost")
    assert event.message == f"{LOST}: its client state of round 2 is missing; it starts cold, from the broadcast"
    whole = _spec("fedbyol", 3)
    workers.assert_simulated(simulate(whole, shards(whole), lost_states={3: [LOST]}))


def test_repeating_a_continuation_changes_nothing(scenario: Scenario) -> None:
    _finish(scenario)
    for _ in range(2):
        assert scenario.coordinator.client.continue_run(scenario.id, 3).state == RunState.RUNNING
    scenario.advance()
    scenario.work("a", "b")
    scenario.advance()
    assert scenario.coordinator.client.continue_run(scenario.id, 3).outcome == Outcome.COMPLETED
    assert len(scenario.events("run.resumed")) == 1


def test_the_idempotency_key_of_a_continued_run_returns_it(
    coordinator: Coordinator, tables: Tables, tmp_path: Path
) -> None:
    workers = Workers(coordinator, tmp_path, spec := _spec("fedbyol", 1))
    again = coordinator.client.create_run(spec, idempotency_key="once")
    coordinator.client.stop(workers.id)
    coordinator.advance(again.id)
    workers.id = again.id
    workers.train()
    coordinator.client.continue_run(again.id, 2)
    assert coordinator.client.create_run(spec, idempotency_key="once").id == again.id
    with pytest.raises(Conflict, match="has another spec"):
        coordinator.client.create_run(_spec("fedbyol", 2), idempotency_key="once")


def _finish(scenario: Scenario) -> None:
    for _ in range(scenario.run.num_rounds):
        scenario.work("a", "b")
        scenario.advance()
    assert scenario.run.outcome == Outcome.COMPLETED


def _lose_the_weights(scenario: Scenario) -> None:
    _finish(scenario)
    digest = scenario.run.model
    assert digest is not None
    (scenario.coordinator.store / digest[:2] / digest[2:4] / digest).unlink()


REFUSED: dict[str, tuple[Callable[[Scenario], object], int, str]] = {
    "a run that trains": (lambda scenario: None, 9, "it is running, and has closed 0 of 2 rounds: wait until it ends"),
    "a stopped run": (
        lambda scenario: scenario.coordinator.client.stop(scenario.id),
        9,
        "an operator stopped it after 0 rounds: start a new run from its weights instead, with model.initial.run",
    ),
    "fewer rounds": (_finish, 1, "the run has 2 rounds already: give more than that in total"),
    "weights that are lost": (_lose_the_weights, 9, "is no longer in the store; restore it from a backup"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_continuing_a_run_is_refused_with_the_reason_if_it_is_impossible(scenario: Scenario, case: str) -> None:
    prepare, num_rounds, message = REFUSED[case]
    prepare(scenario)
    before = scenario.run
    with pytest.raises(Conflict, match=message.replace("(", r"\(")):
        scenario.coordinator.client.continue_run(scenario.id, num_rounds)
    assert scenario.run == before


@pytest.mark.changes_states
def test_a_failed_run_must_be_resumed_instead_of_continued(scenario: Scenario, tables: Tables) -> None:
    _finish(scenario)
    tables.execute("UPDATE runs SET outcome = 'failed' WHERE id = %s", scenario.id)
    with pytest.raises(Conflict, match="it failed after 2 of 2 rounds: resume it first"):
        scenario.coordinator.client.continue_run(scenario.id, 9)


def test_a_deleted_run_is_reported_as_deleted(scenario: Scenario) -> None:
    _finish(scenario)
    scenario.coordinator.client.delete_run(scenario.id)
    with pytest.raises(NotFound, match="was deleted, with its weights and its state: it cannot be continued"):
        scenario.coordinator.client.continue_run(scenario.id, 9)
