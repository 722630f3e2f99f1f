"""Cohorts larger than a round needs: the first updates count, and later ones are refused with the reason."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from fedssl.client import ApiError, Gone, WorkerClient
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.states import AssignmentState, Outcome, RoundState, Verdict
from fedssl.protocol.training import CohortConfig
from fedssl.protocol.work import Submit
from fedssl.simulation import simulate
from support.coordinator import Coordinator
from support.federation import tensors_for, upload
from support.methods import method_spec, shards
from support.rounds import local_round
from support.scenario import Scenario
from support.tables import Tables

TWO_OF_THREE = {"fraction": 0.67, "over_sampling": 1.5}


@pytest.fixture
def scenario(coordinator: Coordinator, tables: Tables, tmp_path: Path) -> Scenario:
    return Scenario(coordinator, tables, tmp_path, "abc", num_rounds=1, cohort=TWO_OF_THREE)


@pytest.mark.parametrize(
    ("fraction", "over_sampling", "num_clients", "asked"),
    [(0.5, 1, 10, 5), (0.5, 1.2, 10, 6), (0.5, 1.01, 10, 6), (0.5, 5, 10, 10), (1, 2, 3, 3), (0.1, 1.5, 4, 2)],
)
def test_the_number_of_asked_clients_follows_from_fraction_and_over_sampling(
    fraction: float, over_sampling: float, num_clients: int, asked: int
) -> None:
    assert CohortConfig(fraction=fraction, over_sampling=over_sampling).num_asked(num_clients) == asked


def test_a_round_closes_with_the_first_updates(scenario: Scenario) -> None:
    assert scenario.round.num_wanted == 2
    [opened] = scenario.events("round.opened")
    assert opened.message == "round 1 of 1 offered to 3 clients; the first 2 updates count"
    late = scenario.claim("a")
    scenario.work("c", value=1.0)
    scenario.advance()
    assert (scenario.is_complete(), scenario.needs_attention()) == (False, False)
    scenario.work("b", value=3.0)
    assert scenario.is_complete()
    assert scenario.needs_attention()  # in case the message to the aggregator is lost
    scenario.advance()
    assert (scenario.round.verdict, scenario.round.reason) == (Verdict.AGGREGATED, "2 of 3 updates")
    assert scenario.run.outcome == Outcome.COMPLETED
    model = scenario.coordinator.tensors(str(scenario.run.model))
    assert all(torch.all(tensor == 2) for tensor in model.values() if tensor.is_floating_point())
    reply = scenario.workers["a"].heartbeat(late.assignment_id)
    why = "the round closed with the first 2 updates: this client's came too late and is not used"
    assert (reply.carry_on, reply.reason) == (False, why)
    assert scenario.events("round.closed")[0].data["clients"] == {"a": why, "b": "accepted", "c": "accepted"}
    with pytest.raises(Gone, match="came too late and changes nothing"):
        scenario.deliver("a")


def test_an_update_beyond_the_wanted_number_is_refused_before_the_round_closes(
    scenario: Scenario, tmp_path: Path
) -> None:
    items = {name: scenario.claim(name) for name in "abc"}
    updates = {
        name: upload(scenario.workers[name], items[name], tensors_for(items[name].plan.update, 1), tmp_path)
        for name in "abc"
    }

    def submit(name: str) -> str:
        submission = Submit(assignment_id=items[name].assignment_id, update=updates[name], num_examples=1)
        try:
            return scenario.workers[name].submit(submission).state.value
        except Gone as error:
            return str(error)

    with ThreadPoolExecutor(3) as pool:
        answers = sorted(pool.map(submit, "abc"))
    assert answers[:2] == ["accepted"] * 2
    assert "round 1 closes with the first 2 updates, and has them" in answers[2]
    [refused] = scenario.events("assignment.refused")
    scenario.advance()
    ended = {part.client_id: part.state for part in scenario.round.assignments}
    assert ended[str(refused.client_id)] == AssignmentState.EXPIRED


def test_over_sampled_clients_replace_those_that_fail(scenario: Scenario) -> None:
    scenario.work("a")
    scenario.workers["b"].decline(scenario.claim("b").assignment_id, "no memory")
    scenario.advance()
    assert scenario.round.state == RoundState.OPEN
    scenario.work("c")
    scenario.advance()
    assert (scenario.round.verdict, scenario.round.attempt) == (Verdict.AGGREGATED, 1)


def test_a_quorum_closes_a_round_at_its_deadline_with_fewer_than_the_wanted_updates(
    coordinator: Coordinator, tables: Tables, tmp_path: Path
) -> None:
    scenario = Scenario(coordinator, tables, tmp_path, "abc", num_rounds=1, cohort={**TWO_OF_THREE, "min_updates": 1})
    scenario.work("b")
    scenario.pass_deadline()
    scenario.advance()
    assert (scenario.round.verdict, scenario.run.outcome) == (Verdict.PARTIAL, Outcome.COMPLETED)


def test_the_bits_are_those_of_a_simulation_with_the_accepted_clients(
    coordinator: Coordinator, tables: Tables, tmp_path: Path
) -> None:
    """Uses BYOL: a client keeps its state only from rounds in which its update was accepted."""
    spec = method_spec("fedbyol", num_rounds=3, cohort=TWO_OF_THREE)
    names = sorted(shards(spec))
    late = {1: names[0], 2: names[2], 3: names[0]}
    workers = {name: coordinator.worker(name) for name in names}
    run = coordinator.client.create_run(spec)
    states: dict[str, dict[str, torch.Tensor]] = {}
    for number in range(1, 4):
        coordinator.advance(run.id)
        for name in sorted(names, key=lambda name: (name == late[number], name)):
            _train(coordinator, workers[name], spec, name, number, states, tmp_path)
    coordinator.advance(run.id)
    accepted = {
        each.number: [part.client_id for part in each.assignments if part.state == AssignmentState.ACCEPTED]
        for each in coordinator.client.rounds(run.id)
    }
    assert accepted == {number: [name for name in names if name != late[number]] for number in late}
    simulated = simulate(spec, shards(spec), cohorts=accepted)
    deployed = coordinator.tensors(str(coordinator.client.run(run.id).model))
    assert deployed.keys() == simulated.model.keys()
    assert all(torch.equal(deployed[name], simulated.model[name]) for name in deployed)
    without = simulate(spec, shards(spec))
    assert any(not torch.equal(without.model[name], simulated.model[name]) for name in deployed)


def _train(
    coordinator: Coordinator, worker: WorkerClient, spec: RunSpec, name: str, number: int,
    states: dict[str, dict[str, torch.Tensor]], folder: Path,
) -> None:  # fmt: skip
    item = worker.claim(0)
    assert item is not None
    result = local_round(spec, coordinator.tensors(item.broadcast), name, number, states.get(name))
    try:
        update = upload(worker, item, result.update, folder)
        worker.submit(Submit(assignment_id=item.assignment_id, update=update, num_examples=result.num_examples))
    except ApiError as error:
        assert "came too late" in str(error)  # noqa: PT017
    else:
        states[name] = result.state
