"""Workers find out which runs have ended, and remove what they kept for them after a while."""

import os
import time
from pathlib import Path
from uuid import uuid4

import pytest
import torch

from fedssl.engine import LocalResult
from fedssl_worker.secure_rounds import SecureRounds
from fedssl_worker.state import ClientStates
from fedssl_worker.state_gc import StateCollector
from support.coordinator import Coordinator
from support.scenario import Scenario
from support.tables import Tables

DAY = 86_400.0


@pytest.fixture
def scenario(coordinator: Coordinator, tables: Tables, tmp_path: Path) -> Scenario:
    return Scenario(coordinator, tables, tmp_path, num_rounds=1)


def _finish(scenario: Scenario) -> None:
    scenario.work("a", "b")
    scenario.advance()


def test_a_worker_is_sent_only_those_of_its_own_runs_that_have_ended(
    scenario: Scenario, coordinator: Coordinator, tables: Tables
) -> None:
    a, stranger = scenario.workers["a"], coordinator.worker("c")
    asked = [scenario.id, uuid4()]
    assert a.ended_runs(asked) == set()
    coordinator.client.pause(scenario.id)
    assert a.ended_runs(asked) == set()
    coordinator.client.resume(scenario.id)
    _finish(scenario)
    assert a.ended_runs(asked) == {scenario.id}
    assert stranger.ended_runs(asked) == set()
    assert a.ended_runs([]) == set()
    coordinator.client.delete_run(scenario.id)
    assert a.ended_runs(asked) == {scenario.id}


def test_the_states_of_a_run_that_sends_nothing_are_kept_as_its_result(
    scenario: Scenario, coordinator: Coordinator, tables: Tables
) -> None:
    _finish(scenario)
    tables.execute("UPDATE runs SET plan = jsonb_set(plan, '{update}', '[]') WHERE id = %s", scenario.id)
    assert scenario.workers["a"].ended_runs([scenario.id]) == set()
    coordinator.client.delete_run(scenario.id)
    assert scenario.workers["a"].ended_runs([scenario.id]) == set()


def test_states_of_ended_runs_are_removed_after_a_while(
    scenario: Scenario, coordinator: Coordinator, tables: Tables, tmp_path: Path
) -> None:
    other = Scenario(coordinator, tables, tmp_path, num_rounds=2, seed=1)
    worker, root = scenario.workers["a"], tmp_path / "runs"
    states = ClientStates(root)
    item = scenario.claim("a")
    tensors = {"w": torch.zeros(2)}
    states.keep(item, "0" * 64, LocalResult(update=tensors, state=tensors, num_examples=1, metrics={}))
    scenario.deliver("a")
    states.keep(other.claim("a"), "0" * 64, LocalResult(update=tensors, state=tensors, num_examples=1, metrics={}))
    (root / "notes").mkdir()  # not written by fedssl
    assert states.runs() == sorted([scenario.id, other.id])

    secure = SecureRounds(worker, None, states, tmp_path / "secure", None)  # type: ignore[arg-type]
    collector = StateCollector(worker, states, secure, DAY, every_seconds=0)
    collector.collect()
    assert sorted(path.name for path in root.iterdir()) == sorted([str(scenario.id), str(other.id), "notes"])
    scenario.work("b")
    scenario.advance()
    collector.collect()
    note = root / f"{scenario.id}.ended"
    assert note.exists()
    assert scenario.id in states.runs()  # the run may be resumed
    os.utime(note, (time.time() - DAY - 1,) * 2)
    StateCollector(worker, ClientStates(root), secure, DAY).collect()
    assert sorted(path.name for path in root.iterdir()) == sorted([str(other.id), "notes"])


def test_a_run_that_a_restored_coordinator_resumes_keeps_its_states(tmp_path: Path) -> None:
    run_id = uuid4()
    (tmp_path / str(run_id)).mkdir()
    states = ClientStates(tmp_path)
    assert states.remove_ended({run_id}, DAY) == []
    os.utime(tmp_path / f"{run_id}.ended", (time.time() - 2 * DAY,) * 2)
    assert states.remove_ended(set(), DAY) == []  # it is running again
    assert states.remove_ended({run_id}, DAY) == []  # and the time starts again
    assert states.runs() == [run_id]
    assert states.remove_ended({run_id}, 0) == [run_id]
    assert list(tmp_path.iterdir()) == []


def test_only_the_first_error_of_a_long_list_is_reported(coordinator: Coordinator) -> None:
    with coordinator.http(coordinator.worker_token("a")) as http:
        answer = http.post("/v1/work/ended-runs", json={"run_ids": [0] * 20_000})
        assert answer.status_code == 422
        assert [mistake["loc"] for mistake in answer.json()["errors"]] == [["run_ids", "0"]]
        answer = http.post("/v1/work/ended-runs", json={"run_ids": [0] * 200_000})
        assert answer.status_code == 413
