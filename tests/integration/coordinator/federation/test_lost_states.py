"""Client states that are lost between two rounds, with real workers: a state has a flipped bit, or is missing."""

import dataclasses
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from fedssl.engine import LocalResult, run_local_round
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.states import RunState
from fedssl.protocol.work import StateLost
from fedssl.simulation import simulate
from fedssl_worker import executor
from support.agents import LOST, Workers
from support.coordinator import Coordinator
from support.methods import method_spec, shards
from support.scenario import Scenario
from support.tables import Tables


def _spec(method: str, **changes: Any) -> RunSpec:
    return method_spec(method, num_rounds=4, cohort={"min_clients": 3, **changes})


@pytest.mark.parametrize("how", ["flipped", pytest.param("gone", marks=pytest.mark.full)])
def test_scaffolds_c_is_again_the_mean_of_the_variates_after_a_state_was_lost(
    coordinator: Coordinator, tables: Tables, tmp_path: Path, how: str
) -> None:
    workers = Workers(coordinator, tmp_path, _spec("scaffold"))
    workers.train()
    workers.damage_state(how=how)
    workers.train()
    [event] = workers.events("client.state_lost")
    assert (event.client_id, event.round_number) == (LOST, 2)
    reason = "damaged" if how == "flipped" else "missing"
    assert event.message == (
        f"{LOST}: its client state of round 1 is {reason}; it starts cold, and in the round that uses its update "
        "the control variates of all clients restart from 0"
    )
    assert {key: event.data[key] for key in ("accepted_round", "reason")} == {"accepted_round": 1, "reason": reason}
    [restarted] = workers.events("run.states_restarted")
    assert (restarted.round_number, restarted.data) == (2, {"clients": [LOST]})
    workers.train()
    workers.train()
    run = coordinator.client.run(workers.id)
    assert run.model is not None
    model = coordinator.tensors(run.model)
    for name in (name.removeprefix("control.") for name in model if name.startswith("control.")):
        own = torch.stack([workers.state(client)[f"scaffold_own.{name}"] for client in workers.agents])
        torch.testing.assert_close(model[f"control.{name}"], own.mean(dim=0), rtol=1e-4, atol=1e-6)
        assert float(own.abs().max()) > 0
    workers.assert_simulated(simulate(workers.spec, shards(workers.spec), lost_states={2: [LOST]}))


@pytest.mark.full
def test_a_lost_target_network_costs_only_its_own_client_a_cold_start(
    coordinator: Coordinator, tables: Tables, tmp_path: Path
) -> None:
    workers = Workers(coordinator, tmp_path, _spec("fedbyol"))
    workers.train()
    workers.train()
    workers.damage_state()
    workers.train()
    workers.train()
    [event] = workers.events("client.state_lost")
    assert event.data["consequence"] == "it starts cold, from the broadcast"
    assert workers.events("run.states_restarted") == []
    workers.assert_simulated(simulate(workers.spec, shards(workers.spec), lost_states={3: [LOST]}))


def _dies(*_: object) -> LocalResult:
    raise KeyboardInterrupt


def _unusable(*arguments: Any) -> LocalResult:
    result = run_local_round(*arguments)
    update = {name: value * 1e20 if value.is_floating_point() else value for name, value in result.update.items()}
    return dataclasses.replace(result, update=update)


@pytest.mark.full(but=1)
@pytest.mark.parametrize(("train", "min_updates"), [(_unusable, 2), (_dies, 2), (_dies, 3)])
def test_a_state_stays_lost_until_an_update_of_its_client_is_used(
    coordinator: Coordinator,
    tables: Tables,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    train: Callable[..., LocalResult],
    min_updates: int,
) -> None:
    """The round in which the client reports the loss closes without its update, or is skipped."""
    cohort = {"min_updates": min_updates, "max_attempts": 1, "without_quorum": "skip"}
    workers = Workers(coordinator, tmp_path, _spec("scaffold", **cohort))
    workers.train()
    workers.damage_state()
    others = sorted(set(workers.agents) - {LOST})
    with monkeypatch.context() as patched, suppress(KeyboardInterrupt):
        patched.setattr(executor, "run_local_round", train)
        workers.agents[LOST].step()
    for name in others:
        workers.agents[name].step()
    tables.execute("UPDATE rounds SET deadline = now() WHERE state = 'open'")
    coordinator.advance(workers.id)
    workers.restart(LOST)
    workers.train()
    workers.train()
    assert len(workers.events("update.rejected")) == (train is _unusable)
    assert [event.round_number for event in workers.events("client.state_lost")] == [2]
    assert [event.round_number for event in workers.events("run.states_restarted")] == [3]
    cohorts = {2: others if min_updates == len(others) else []}
    workers.assert_simulated(simulate(workers.spec, shards(workers.spec), cohorts=cohorts, lost_states={2: [LOST]}))


@pytest.mark.full
def test_a_paused_run_resumes_with_the_restored_state(coordinator: Coordinator, tables: Tables, tmp_path: Path) -> None:
    workers = Workers(coordinator, tmp_path, _spec("scaffold", on_lost_state="pause"))
    workers.train()
    newest = sorted((tmp_path / LOST / "runs" / str(workers.id)).iterdir())[-1] / "state.safetensors"
    whole = newest.read_bytes()
    workers.damage_state()
    workers.train()
    run = coordinator.client.run(workers.id)
    assert run.state == RunState.PAUSED
    assert run.reason is not None
    assert run.reason.startswith(f"{LOST}: its client state of round 1 is damaged; restore it at the client and resume")
    newest.write_bytes(whole)
    coordinator.client.resume(workers.id)
    workers.train(LOST)  # the others had delivered before the pause, or were paused with it
    for _ in range(3):
        workers.train()
    workers.assert_simulated(simulate(workers.spec, shards(workers.spec)))


@pytest.mark.full
def test_a_run_that_is_resumed_without_the_state_accepts_the_loss(
    coordinator: Coordinator, tables: Tables, tmp_path: Path
) -> None:
    workers = Workers(coordinator, tmp_path, _spec("fedbyol", on_lost_state="pause"))
    workers.train()
    workers.damage_state()
    workers.train()
    assert coordinator.client.run(workers.id).state == RunState.PAUSED
    coordinator.client.resume(workers.id)
    for _ in range(4):
        workers.train()
    assert len(workers.events("run.paused")) == 1
    workers.assert_simulated(simulate(workers.spec, shards(workers.spec), lost_states={2: [LOST]}))


def test_losing_a_state_that_a_client_never_had_changes_nothing(
    coordinator: Coordinator, tables: Tables, tmp_path: Path
) -> None:
    scenario = Scenario(coordinator, tables, tmp_path, method={"name": "fedsimclr", "add_ons": [{"name": "scaffold"}]})
    item = scenario.claim("a")
    reply = scenario.workers["a"].heartbeat(item.assignment_id, state_lost=StateLost(round_number=1, reason="missing"))
    assert reply.carry_on
    assert scenario.events("client.state_lost") == []
    assert tables.query("SELECT DISTINCT lost_round FROM assignments") == [(None,)]
