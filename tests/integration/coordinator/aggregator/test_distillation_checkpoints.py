"""Checkpoints of distillations: an interrupted job resumes to the same bits, and no checkpoint is left at the end."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fedssl.artifacts.store import FileStore
from fedssl.errors import StoreUnavailable
from fedssl.protocol.states import JobState, Outcome
from fedssl_coordinator.core.store import store
from fedssl_coordinator.storage.artifacts.removal import release
from support.coordinator import Coordinator
from support.distillation_scenario import DistillationScenario
from support.methods import simulation_of
from support.tables import Tables


class Killed(BaseException):
    """Stands for the end of the process: no handler gets to run."""


@pytest.fixture
def every_epoch(monkeypatch: pytest.MonkeyPatch, change_settings: Callable[..., None]) -> None:
    """Make jobs save a checkpoint and write their progress after every epoch."""
    from fedssl_coordinator.aggregator import distillation_checkpoints

    monkeypatch.setattr(distillation_checkpoints, "PROGRESS_SECONDS", 0)
    change_settings(CHECKPOINT_SECONDS="0")


@pytest.fixture
def scenario(coordinator: Coordinator, tables: Tables, tmp_path: Path, every_epoch: None) -> DistillationScenario:
    return DistillationScenario(coordinator, tables, tmp_path)


def _dies_at(monkeypatch: pytest.MonkeyPatch, target: str, call: int, *, after: bool) -> None:
    """Make the function `target` raise Killed at its call with this number: before it runs, or after it has run."""
    module, _, name = target.rpartition(".")
    owner: Any = __import__(module, fromlist=[name]) if not module.endswith("Training") else None
    if owner is None:
        from fedssl_coordinator.aggregator.distillation_checkpoints import Training as owner  # noqa: N813
    work, calls = getattr(owner, name), [0]

    def fatal(*arguments: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == call and not after:
            raise Killed
        result = work(*arguments, **options)
        if calls[0] == call:
            raise Killed
        return result

    monkeypatch.setattr(owner, name, fatal)


def _finish(scenario: DistillationScenario) -> None:
    scenario.end_pause()
    scenario.distil()
    scenario.coordinator.advance(scenario.id)
    run = scenario.run
    assert run.outcome == Outcome.COMPLETED, run.reason
    assert run.model is not None
    deployed, simulated = scenario.coordinator.tensors(run.model), simulation_of(scenario.spec).model
    assert [name for name in simulated if not torch.equal(deployed[name], simulated[name])] == []


_TRAINING = "fedssl_coordinator.aggregator.distillation_checkpoints"

# The function and the call where the process dies, and whether it dies after the call; the epoch after which the job
# resumes; the number of files that are left over.
DEATHS: dict[str, tuple[str, int, bool, int, int]] = {
    "before the first epoch is saved": (f"{_TRAINING}.put", 1, False, 0, 0),
    "when the file lies in the store, and no row says so": (f"{_TRAINING}.put", 3, True, 2, 1),
    "when the row is written, and the one before is not yet removed": (f"{_TRAINING}.release", 2, False, 3, 0),
    "when the one before is removed": (f"{_TRAINING}.release", 2, True, 3, 0),
    "after the last epoch": (f"{_TRAINING}.Training.on_epoch", 6, True, 6, 0),
    "when the weights lie in the store": ("fedssl_coordinator.aggregator.distillation._publish", 1, False, 6, 0),
    "when all but the commit is done": ("fedssl_coordinator.federation.distillation.service.complete", 1, True, 6, 0),
}


@pytest.mark.full(but=1)
@pytest.mark.parametrize("where", DEATHS)
def test_a_job_that_dies_anywhere_resumes_to_the_same_bits(
    scenario: DistillationScenario, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    target, call, after, epoch, num_left_over = DEATHS[where]
    with monkeypatch.context() as patch:
        _dies_at(patch, target, call, after=after)
        with pytest.raises(Killed):
            scenario.distil()
    assert scenario.job.state == JobState.RUNNING
    assert scenario.run.rounds_closed == 0
    _finish(scenario)
    [resumed] = scenario.events("distillation.resumed")
    assert resumed.data["epoch"] == epoch
    message = f"continues after epoch {epoch} of 6" if epoch else "starts again: nothing was saved"
    assert resumed.message == message
    assert [event.message[:31] for event in scenario.events("distillation.stalled")] == [
        "try 1: the aggregator ended whi"
    ]
    assert len(scenario.orphaned_files()) == num_left_over
    # Garbage collection removes a row that nothing refers to, and also a file without a row.
    assert len(scenario.checkpoints()) <= ("is not yet removed" in where)
    assert scenario.job.checkpoint is None


def test_each_checkpoint_replaces_the_one_before(
    scenario: DistillationScenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedssl_coordinator.aggregator.distillation_checkpoints import Training

    told, seen = Training.on_epoch, []

    def on_epoch(self: Training, progress: Any) -> None:
        told(self, progress)
        seen.append((scenario.job.checkpoint, scenario.checkpoints(), scenario.orphaned_files()))

    monkeypatch.setattr(Training, "on_epoch", on_epoch)
    scenario.distil()
    assert len({digest for digest, *_ in seen}) == 6
    assert all(rows == [digest] and left == set() for digest, rows, left in seen)


def test_two_tries_never_store_the_same_checkpoint_file(
    scenario: DistillationScenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a try that removes its own file would also remove the other's."""
    from fedssl_coordinator.aggregator import distillation_checkpoints

    digests, put = [], distillation_checkpoints.put

    def note(tensors: Any) -> Any:
        stored = put(tensors)
        digests.append(stored.digest)
        return stored

    monkeypatch.setattr(distillation_checkpoints, "put", note)
    for _ in range(2):
        with monkeypatch.context() as patch:
            _dies_at(patch, f"{_TRAINING}.put", 2, after=False)
            with pytest.raises(Killed):
                scenario.distil()
        scenario.coordinator.client.cancel_distillation(scenario.job.id)
        scenario.coordinator.client.resume(scenario.id)
        scenario.coordinator.advance(scenario.id)
    assert len(digests) == len(set(digests)) == 2  # both of the first epoch, with the same bits otherwise


def test_epochs_are_saved_only_at_intervals(
    coordinator: Coordinator, tables: Tables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default at most one epoch in thirty seconds is saved."""
    scenario = DistillationScenario(coordinator, tables, tmp_path)
    before = scenario.files()
    with monkeypatch.context() as patch:
        _dies_at(patch, f"{_TRAINING}.Training.on_epoch", 4, after=True)
        with pytest.raises(Killed):
            scenario.distil()
    assert scenario.files() == before
    _finish(scenario)
    assert scenario.events("distillation.resumed")[0].data["epoch"] == 0


def test_a_process_that_is_asked_to_end_saves_a_checkpoint(
    coordinator: Coordinator, tables: Tables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next process resumes there at once, whatever the interval between checkpoints, and no failure is counted."""
    from fedssl_coordinator.aggregator.distillation_checkpoints import Training
    from fedssl_coordinator.core.celery_app import is_stopping

    scenario = DistillationScenario(coordinator, tables, tmp_path)
    told = Training.on_epoch

    def on_epoch(self: Training, progress: Any) -> None:
        if progress.epoch == 2:
            is_stopping.set()
        told(self, progress)

    with monkeypatch.context() as patch:
        patch.setattr(Training, "on_epoch", on_epoch)
        scenario.distil()
    is_stopping.clear()
    job = scenario.job
    assert (job.state, job.epoch, job.num_tries, job.checkpoint is not None) == (JobState.RUNNING, 3, 0, True)
    scenario.distil()
    scenario.coordinator.advance(scenario.id)
    assert scenario.kinds("distillation.") == [
        "distillation.queued",
        "distillation.started",
        "distillation.resumed",
        "distillation.completed",
    ]
    assert scenario.events("distillation.resumed")[0].data["epoch"] == 3
    assert scenario.checkpoints() == []


@pytest.mark.full(but=1)
@pytest.mark.parametrize("damage", ["gone", "cut"])
def test_a_job_with_an_unreadable_checkpoint_starts_from_scratch(
    scenario: DistillationScenario, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    with monkeypatch.context() as patch:
        _dies_at(patch, f"{_TRAINING}.Training.on_epoch", 4, after=True)
        with pytest.raises(Killed):
            scenario.distil()
    path = store().path(str(scenario.job.checkpoint))
    path.unlink() if damage == "gone" else path.write_bytes(path.read_bytes()[:1000])
    _finish(scenario)
    assert scenario.events("distillation.resumed")[0].data["epoch"] == 0


def test_a_checkpoint_of_another_version_is_discarded(
    scenario: DistillationScenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new version of the coordinator, installed during a distillation, must not end a run of several weeks."""
    from fedssl_coordinator.aggregator import distillation_checkpoints

    put = distillation_checkpoints.put
    with monkeypatch.context() as patch:
        patch.setattr(
            distillation_checkpoints, "put", lambda tensors: put({f"old.{name}": t for name, t in tensors.items()})
        )
        _dies_at(patch, f"{_TRAINING}.Training.on_epoch", 2, after=True)
        with pytest.raises(Killed):
            scenario.distil()
    scenario.end_pause()
    scenario.distil()
    assert scenario.job.checkpoint is None
    assert "not a checkpoint of a distillation" in str(scenario.job.reason)
    assert scenario.checkpoints() == []
    _finish(scenario)


def test_training_continues_without_checkpoints_on_a_full_disk(
    scenario: DistillationScenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(tensors: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(f"{_TRAINING}.put", full)
    _finish(scenario)
    assert scenario.kinds("distillation.") == ["distillation.queued", "distillation.started", "distillation.completed"]


def test_training_continues_without_checkpoints_if_the_store_is_unreachable(
    scenario: DistillationScenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(store: FileStore, digest: str) -> None:
        raise StoreUnavailable("the object store answered 503")

    monkeypatch.setattr(FileStore, "delete", away)  # each checkpoint replaces the one before
    _finish(scenario)
    assert scenario.kinds("distillation.") == ["distillation.queued", "distillation.started", "distillation.completed"]


# Which of many failures are reported


def test_deaths_with_progress_in_between_are_both_reported(
    scenario: DistillationScenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deaths without progress are reported only when their number doubles."""
    for call in (2, 2, 2):  # each time two more epochs
        with monkeypatch.context() as patch:
            _dies_at(patch, f"{_TRAINING}.Training.on_epoch", call, after=True)
            with pytest.raises(Killed):
                scenario.distil()
        scenario.end_pause()
    assert [event.data["epoch"] for event in scenario.events("distillation.resumed")] == [2, 4]
    assert len(scenario.events("distillation.stalled")) == 2
    for _ in range(4):
        with monkeypatch.context() as patch:
            _dies_at(patch, "fedssl_coordinator.aggregator.distillation._publish", 1, after=False)
            with pytest.raises(Killed):
                scenario.distil()
        scenario.end_pause()
    assert [event.data["epoch"] for event in scenario.events("distillation.resumed")] == [2, 4, 6, 6, 6]
    _finish(scenario)


# Releasing artifacts


def test_an_artifact_that_something_refers_to_stays(scenario: DistillationScenario, tables: Tables) -> None:
    digests = {str(scenario.run.model), *(str(part.update) for part in scenario.round.assignments)}
    before = scenario.files()
    for digest in digests:
        release(digest)
    assert scenario.files() == before
    assert tables.one("SELECT count(*) FROM artifacts WHERE digest = ANY(%s)", sorted(digests)) == len(digests)


def test_a_file_without_a_row_is_not_released(scenario: DistillationScenario) -> None:
    """Another process may be about to write its row."""
    with store().writer() as writer:
        writer.write(b"in its way")
        digest = writer.commit()
    release(digest)
    assert digest in store()
