"""Lost and damaged files of the store: nothing is computed from them, and work resumes once they are restored."""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fedssl.client import Client, NotFound, Retry
from fedssl.client.errors import ClientError
from fedssl.errors import FedSSLError
from fedssl.protocol.states import AssignmentState, JobState, Outcome, RoundState, RunState, Verdict
from support.coordinator import Coordinator
from support.data_sets import public_bytes, write_file
from support.distillation_scenario import DistillationScenario, distillation_spec
from support.evaluated_runs import evaluated_spec, register_digits
from support.scenario import Scenario
from support.tables import Tables

VALUES = {"a": 0.25, "b": 0.75}
SCAFFOLD = {"method": {"name": "scaffold"}, "num_rounds": 3}


def _flip(content: bytes, at: int) -> bytes:
    at %= len(content)
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


DAMAGES: dict[str, Callable[[bytes], bytes | None]] = {
    "flipped in the header": lambda content: _flip(content, 12),
    "flipped in the data": lambda content: _flip(content, -3),
    "cut": lambda content: content[:-4],
    "appended": lambda content: content + b"\0",
    "gone": lambda content: None,
}


def _path(coordinator: Coordinator, digest: object) -> Path:
    name = str(digest)
    return coordinator.store / name[:2] / name[2:4] / name


def _damage(path: Path, how: str) -> bytes:
    """Damage or remove a file, and return its original content."""
    content = path.read_bytes()
    damaged = DAMAGES[how](content)
    if damaged is None:
        path.unlink()
    else:
        path.write_bytes(damaged)
        os.utime(path, (0, 0))  # a flipped bit on the disk does not change the time
    return content


def _pause_over(tables: Tables) -> None:
    for statement in (
        "UPDATE runs SET retry_at = now() - interval '1 second' WHERE retry_at IS NOT NULL",
        "UPDATE evaluations SET retry_at = now() - interval '1 second' WHERE retry_at IS NOT NULL",
        "UPDATE distillation_jobs SET retry_at = now() - interval '1 second' WHERE retry_at IS NOT NULL",
    ):
        tables.execute(statement)  # type: ignore[arg-type]


def _play(scenario: Scenario, *names: str) -> None:
    """Let the clients, by default `a` and `b`, deliver for one round, and aggregate it."""
    for name in names or ("a", "b"):
        number = scenario.claim(name).round_number
        scenario.deliver(name, VALUES[name] * number, 10)
    scenario.advance()


def _events(coordinator: Coordinator, tables: Tables, kind: str) -> list[dict[str, Any]]:
    return [data for (data,) in tables.query("SELECT data FROM events WHERE kind = %s ORDER BY id", kind)]


@pytest.fixture
def scenario(coordinator: Coordinator, tables: Tables, tmp_path: Path) -> Scenario:
    return Scenario(coordinator, tables, tmp_path, **SCAFFOLD)


@pytest.fixture(scope="module")
def undamaged_results() -> dict[str, str]:
    """Return an empty dictionary for the final weights of undamaged runs, which are computed for the first test."""
    return {}


@pytest.fixture
def twin(coordinator: Coordinator, tables: Tables, tmp_path: Path, undamaged_results: dict[str, str]) -> str:
    """Return the digest of the final weights of the same run without damage."""
    if "twin" in undamaged_results:
        return undamaged_results["twin"]
    undamaged = Scenario(coordinator, tables, tmp_path, "cd", **SCAFFOLD)
    VALUES.update(c=VALUES["a"], d=VALUES["b"])
    for _ in range(3):
        _play(undamaged, "c", "d")
    assert undamaged.run.outcome == Outcome.COMPLETED
    return undamaged_results.setdefault("twin", str(undamaged.run.model))


@pytest.mark.full(but=1)
@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_server_state_stalls_the_run_until_it_is_restored(
    scenario: Scenario, tables: Tables, twin: str, how: str
) -> None:
    _play(scenario)
    digest = scenario.run.server_state
    path = _path(scenario.coordinator, digest)
    backup = _damage(path, how)
    _play(scenario)
    for _ in range(2):
        run = scenario.run
        assert (run.state, run.rounds_closed, run.server_state) == (RunState.RUNNING, 1, digest)
        assert "server state after round 1" in str(run.reason)
        assert str(digest) in str(run.reason)
        assert f"Restore it from a backup as {path}" in str(run.reason)
        _pause_over(tables)
        scenario.advance()  # the file is missing now
    stalled = scenario.events("run.stalled")
    assert str(digest) in stalled[0].message
    assert [event.data["digest"] for event in scenario.events("artifact.damaged")] == [digest] * (how != "gone")
    assert not path.exists()
    assert [part.state for part in scenario.round.assignments] == [AssignmentState.ACCEPTED] * 2
    path.write_bytes(backup)
    _pause_over(tables)
    scenario.advance()
    assert scenario.run.rounds_closed == 2
    assert scenario.run.reason is None
    _play(scenario)
    assert scenario.run.outcome == Outcome.COMPLETED
    assert scenario.run.model == twin


@pytest.mark.full(but=1)
@pytest.mark.parametrize("how", DAMAGES)
def test_a_client_whose_update_is_damaged_is_asked_for_it_again(
    scenario: Scenario, tables: Tables, twin: str, how: str
) -> None:
    _play(scenario)
    before = scenario.claim("a")
    scenario.deliver("a", VALUES["a"] * 2)
    scenario.work("b", value=VALUES["b"] * 2)
    digest = next(str(part.update) for part in scenario.round.assignments if part.client_id == "a")
    _damage(_path(scenario.coordinator, digest), how)
    tables.execute("UPDATE rounds SET deadline = now() - interval '1 second' WHERE state = 'open'")
    scenario.advance()
    why = "its update is missing from the store" if how == "gone" else "its update was damaged in the store"
    assert scenario.states() == [("a", 1, "expired"), ("a", 2, "offered"), ("b", 1, "accepted")]
    assert scenario.round.assignments[0].reason == why
    assert (scenario.round.state, scenario.round.attempt) == (RoundState.OPEN, 1)
    assert scenario.run.reason == f"round 2: asked again: a: {why}"
    assert scenario.run.state == RunState.RUNNING
    [reopened] = scenario.events("round.reopened")
    assert reopened.data["clients"] == {"a": why}
    assert [event.data["digest"] for event in scenario.events("artifact.damaged")] == [digest] * (how != "gone")
    assert [event.message for event in scenario.events("assignment.expired")] == [f"a: {why}; asked again"]
    scenario.advance()  # the round waits, with a new deadline
    assert scenario.round.state == RoundState.OPEN
    again = scenario.claim("a")
    changed = {"assignment_id", "round_deadline"}
    assert again.model_dump(exclude=changed) == before.model_dump(exclude=changed)  # so the worker finds its update
    scenario.deliver("a", VALUES["a"] * 2)
    assert {part.update for part in scenario.round.assignments if part.state == "accepted"} >= {digest}
    scenario.advance()
    assert (scenario.run.rounds_closed, scenario.run.reason, scenario.rounds[1].verdict) == (
        2,
        None,
        Verdict.AGGREGATED,
    )
    assert scenario.events("run.stalled") == []
    _play(scenario)
    assert scenario.run.model == twin


def test_all_damaged_updates_are_asked_for_at_once(coordinator: Coordinator, tables: Tables, tmp_path: Path) -> None:
    """This holds also if two clients sent the same bytes, and if the round has no attempt left."""
    scenario = Scenario(coordinator, tables, tmp_path, "abc", num_rounds=1, cohort={"max_attempts": 1})
    scenario.work("a", "b", value=1.0)
    scenario.work("c", value=2.0)
    first, same, other = (str(part.update) for part in scenario.round.assignments)
    assert first == same
    backup = {digest: _damage(_path(coordinator, digest), "flipped in the data") for digest in (first, other)}
    scenario.advance()
    assert [each for each in scenario.states() if each[1] == 2] == [(name, 2, "offered") for name in "abc"]
    assert len(scenario.events("artifact.damaged")) == 2
    scenario.work("a", "b", value=1.0)
    scenario.work("c", value=2.0)
    scenario.advance()
    assert scenario.run.outcome == Outcome.COMPLETED
    assert {digest: _path(coordinator, digest).read_bytes() for digest in backup} == backup


def test_a_client_that_does_not_send_its_update_again_counts_as_missing(
    coordinator: Coordinator, tables: Tables, tmp_path: Path
) -> None:
    scenario = Scenario(coordinator, tables, tmp_path, num_rounds=1, cohort={"min_updates": 1})
    scenario.work("a", value=1.0)
    scenario.work("b", value=2.0)
    _damage(_path(coordinator, scenario.round.assignments[0].update), "cut")
    scenario.advance()
    scenario.pass_deadline()
    scenario.advance()
    assert (scenario.run.outcome, scenario.round.verdict) == (Outcome.COMPLETED, Verdict.PARTIAL)
    assert scenario.states() == [("a", 1, "expired"), ("a", 2, "expired"), ("b", 1, "accepted")]


def test_an_update_that_cannot_be_read_once_is_read_again(
    scenario: Scenario, tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk or the memory failed but the file itself is intact, so no client is asked again."""
    from fedssl_coordinator.aggregator import stored

    read_tensors, calls = stored.read_tensors, [0]

    def fails_once(path: Path, digest: str) -> Any:
        calls[0] += 1
        return read_tensors(path, "0" * 64 if calls[0] == 2 else digest)

    monkeypatch.setattr(stored, "read_tensors", fails_once)
    _play(scenario)
    assert scenario.run.rounds_closed == 1
    assert scenario.events("artifact.damaged") == []


def test_an_aggregation_of_updates_that_were_asked_for_again_is_not_published(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An aggregator that has lost its lock finishes after another one has found a damaged update."""
    from fedssl_coordinator.aggregator import rounds

    compute, before = rounds.next_weights, scenario.run.server_state

    def slowly(*arguments: Any, **keywords: Any) -> Any:
        found = compute(*arguments, **keywords)
        monkeypatch.setattr(rounds, "next_weights", compute)
        _damage(_path(scenario.coordinator, scenario.round.assignments[0].update), "cut")
        rounds.aggregate(scenario.id)
        assert scenario.round.state == RoundState.OPEN
        _advance_to_aggregating(scenario)
        return found

    scenario.work("a", "b")
    monkeypatch.setattr(rounds, "next_weights", slowly)
    _advance_to_aggregating(scenario)
    rounds.aggregate(scenario.id)
    assert scenario.run.server_state == before
    assert scenario.round.state == RoundState.AGGREGATING
    rounds.aggregate(scenario.id)
    assert scenario.run.rounds_closed == 1


def _advance_to_aggregating(scenario: Scenario) -> None:
    from fedssl_coordinator.core.db import transaction
    from fedssl_coordinator.federation.rounds import service
    from fedssl_coordinator.federation.rounds.steps import Step

    scenario.work(*[name for name, _, state in scenario.states() if state == "offered"])
    with transaction() as session:
        assert service.next_step(session, scenario.id) is Step.CHECK_AGAIN


# Distillations


@pytest.fixture
def distilling(coordinator: Coordinator, tables: Tables, tmp_path: Path) -> DistillationScenario:
    return DistillationScenario(coordinator, tables, tmp_path)


def _finished(scenario: DistillationScenario) -> str:
    scenario.distil()
    scenario.coordinator.advance(scenario.id)
    assert scenario.run.outcome == Outcome.COMPLETED, scenario.run.reason
    return str(scenario.run.model)


@pytest.fixture
def student(coordinator: Coordinator, tables: Tables, tmp_path: Path, undamaged_results: dict[str, str]) -> str:
    """Return the digest of the final weights of the same distillation without damage."""
    if "student" not in undamaged_results:
        undamaged_results["student"] = _finished(DistillationScenario(coordinator, tables, tmp_path))
    return undamaged_results["student"]


@pytest.mark.full(but=1)
@pytest.mark.parametrize("how", ["flipped in the data", "gone"])
def test_a_distillation_asks_for_a_damaged_update_again(
    student: str, distilling: DistillationScenario, tables: Tables, how: str
) -> None:
    assert distilling.round.state == RoundState.DISTILLING
    lost = distilling.round.assignments[1]
    _damage(_path(distilling.coordinator, lost.update), how)
    distilling.distil()
    assert distilling.round.state == RoundState.OPEN
    assert [job.state for job in distilling.jobs] == [JobState.CANCELLED]
    assert [event.data["clients"].keys() for event in distilling.events("round.reopened")] == [{lost.client_id}]
    worker = distilling.workers[lost.client_id]
    item = worker.claim(0)
    assert item is not None
    distilling._submit(lost.client_id, worker, item)
    distilling.coordinator.advance(distilling.id)
    assert distilling.round.state == RoundState.DISTILLING
    assert _finished(distilling) == student
    assert [job.state for job in distilling.jobs] == [JobState.CANCELLED, JobState.COMPLETED]


def test_a_distillation_waits_for_its_server_state(
    student: str, distilling: DistillationScenario, tables: Tables
) -> None:
    digest = distilling.run.server_state
    path = _path(distilling.coordinator, digest)
    backup = _damage(path, "flipped in the data")
    distilling.distil()
    assert str(digest) in str(distilling.job.reason)
    assert distilling.job.state == JobState.RUNNING
    path.write_bytes(backup)
    _pause_over(tables)
    assert _finished(distilling) == student


def test_a_distillation_waits_for_its_public_images(coordinator: Coordinator, tables: Tables, tmp_path: Path) -> None:
    registered = coordinator.client.add_public_dataset("scans", write_file(tmp_path, public_bytes(200)))
    spec = distillation_spec(public_data={"dataset": "scans", "num_images": 64})
    scenario = DistillationScenario(coordinator, tables, tmp_path, spec, train=False)
    path = _path(coordinator, registered.digest)
    backup = _damage(path, "flipped in the data")
    from fedssl_coordinator.aggregator.rounds import _public_images

    config = scenario.run.spec.public_data
    assert config is not None
    with pytest.raises(FedSSLError, match=f"public data set scans is damaged.*Restore it from a backup as {path}"):
        _public_images(config, spec.data)
    [damaged] = scenario.events("artifact.damaged")
    assert damaged.data["digest"] == registered.digest
    path.write_bytes(backup)
    assert len(_public_images(config, spec.data)) == 64


def test_a_damaged_checkpoint_costs_only_time(
    student: str,
    distilling: DistillationScenario,
    tables: Tables,
    monkeypatch: pytest.MonkeyPatch,
    change_settings: Callable[..., None],
) -> None:
    """The file format does not detect a flipped bit: the student would have other weights."""
    from fedssl_coordinator.aggregator.distillation_checkpoints import Training

    on_epoch, calls = Training.on_epoch, [0]

    def dies(self: Training, progress: Any) -> None:
        on_epoch(self, progress)
        calls[0] += 1
        if calls[0] == 3:
            raise KeyboardInterrupt

    change_settings(CHECKPOINT_SECONDS="0")
    with monkeypatch.context() as patch:
        patch.setattr(Training, "on_epoch", dies)
        with pytest.raises(KeyboardInterrupt):
            distilling.distil()
    checkpoint = distilling.job.checkpoint
    assert checkpoint is not None
    _damage(_path(distilling.coordinator, checkpoint), "flipped in the data")
    _pause_over(tables)
    assert _finished(distilling) == student
    assert distilling.events("distillation.resumed")[0].data["epoch"] == 0
    assert [event.data["digest"] for event in distilling.events("artifact.damaged")] == [checkpoint]


# Evaluations


@pytest.mark.full(but=2)
@pytest.mark.parametrize("what", ["model", "dataset_digest"])
@pytest.mark.parametrize("how", ["flipped in the header", "flipped in the data", "gone"])
def test_an_evaluation_waits_for_a_damaged_file(
    coordinator: Coordinator, tables: Tables, tmp_path: Path, what: str, how: str
) -> None:
    register_digits(coordinator.client, tmp_path)
    threads = torch.get_num_threads()
    scenario = DistillationScenario(coordinator, tables, tmp_path, evaluated_spec(), train=False)
    [row] = coordinator.client.evaluations(scenario.id)
    digest = getattr(row, what) if what == "dataset_digest" else scenario.run.model
    path = _path(coordinator, digest)
    backup = _damage(path, how)
    coordinator.evaluate(row.id)
    [row] = coordinator.client.evaluations(scenario.id)
    assert row.state == JobState.RUNNING
    assert str(digest) in str(row.reason)
    assert f"Restore it from a backup as {path}" in str(row.reason)
    assert [data["digest"] for data in _events(coordinator, tables, "artifact.damaged")] == [digest] * (how != "gone")
    assert len(scenario.events("evaluation.stalled")) == 1
    path.write_bytes(backup)
    _pause_over(tables)
    coordinator.evaluate(row.id)
    torch.set_num_threads(threads)
    [row] = coordinator.client.evaluations(scenario.id)
    assert (row.state, row.reason) == (JobState.COMPLETED, None)


# Downloads


@pytest.mark.parametrize("how", ["flipped in the header", "flipped in the data"])
def test_a_damaged_artifact_is_not_sent_as_if_it_were_intact(scenario: Scenario, tmp_path: Path, how: str) -> None:
    digest, client = str(scenario.run.model), scenario.coordinator.client
    path, destination = _path(scenario.coordinator, digest), tmp_path / "model"
    backup = _damage(path, how)
    with pytest.raises(ClientError):  # the connection ends before the last bytes
        client.download_model(scenario.id, destination)
    with pytest.raises(NotFound):
        client.download_model(scenario.id, destination)
    assert not destination.exists()
    [damaged] = scenario.events("artifact.damaged")
    assert damaged.data["digest"] == digest
    path.write_bytes(backup)
    assert client.download_model(scenario.id, destination) == digest
    assert destination.read_bytes() == backup


def test_a_download_that_broke_off_because_of_damage_starts_from_scratch(
    coordinator: Coordinator, tables: Tables, tmp_path: Path
) -> None:
    """Most of a large file was sent before the damage was found. The rest of the restored one must not follow it."""
    registered = coordinator.client.add_public_dataset("large", write_file(tmp_path, public_bytes(1000, size=64)))
    path = _path(coordinator, registered.digest)
    backup = _damage(path, "flipped in the header")

    def restore() -> None:
        while path.exists():
            time.sleep(0.01)
        path.write_bytes(backup)

    restoring = threading.Thread(target=restore)
    restoring.start()
    with Client(coordinator.url, coordinator.admin_token, retry=Retry(seconds=20, first_delay=0.5)) as client:
        client.download_artifact(registered.digest, tmp_path / "fetched")
    restoring.join()
    assert (tmp_path / "fetched").read_bytes() == backup


@pytest.mark.parametrize("how", ["flipped in the header", "cut"])
def test_a_data_set_that_was_damaged_before_its_registration_is_sent_again(
    coordinator: Coordinator, tables: Tables, tmp_path: Path, how: str
) -> None:
    source = write_file(tmp_path, public_bytes())
    digest = coordinator.client.add_public_dataset("scans", source).digest
    _damage(_path(coordinator, digest), how)
    with coordinator.http() as http:
        answer = http.post("/v1/public-datasets", json={"name": "more", "digest": digest, "split": "train"})
    assert (answer.status_code, answer.json()["type"]) == (404, "urn:fedssl:problem:not-found")
    assert coordinator.client.add_public_dataset("more", source).num_images == 12


def test_damage_to_a_file_that_no_run_needs_is_also_an_event(
    coordinator: Coordinator, tables: Tables, tmp_path: Path
) -> None:
    registered = coordinator.client.add_public_dataset("scans", write_file(tmp_path, public_bytes()))
    _damage(_path(coordinator, registered.digest), "cut")
    with pytest.raises(ClientError):
        coordinator.client.download_artifact(registered.digest, tmp_path / "fetched")
    assert [data["digest"] for data in _events(coordinator, tables, "artifact.damaged")] == [registered.digest]
    assert coordinator.client.add_public_dataset("scans", tmp_path / "images.safetensors") == registered
