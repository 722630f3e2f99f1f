"""A killed simulation resumes, and ends with the bits of an uninterrupted one."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fedssl.artifacts.store import digest_of
from fedssl.errors import Cancelled, Paused, ResultsError
from fedssl.experiments import checkpoints, runs
from fedssl.experiments.checkpoints import FolderCheckpoint
from fedssl.experiments.runs import Calls, FinishedRun, run_in_folder
from fedssl.protocol.runs import RunSpec
from fedssl.run_files import ENCODER, MODEL
from fedssl.simulation import RoundRecord, simulate
from support.methods import method_spec, shards

pytestmark = pytest.mark.full


JUDGED = {"dataset": "digits", "every": 2, "max_train": 200, "measures": ["knn"]}
STATEFUL = ["fedbyol", "scaffold", "orchestra", "flesd", "single"]


def spec_of(name: str, **changes: Any) -> RunSpec:
    return method_spec(name, num_rounds=4, evaluation=JUDGED, cohort={"fraction": 0.67}, **changes)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed(work: Callable[[], object]) -> None:
    """Do the work in a separate process, which must end by SIGKILL."""
    child = os.fork()
    if child == 0:
        work()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), "the work ended before it was killed"
    assert os.WTERMSIG(status) == signal.SIGKILL


def outcome(folder: Path, finished: FinishedRun) -> tuple[object, ...]:
    """Return everything that must be equal: the weights' bits, the losses, the measures and counts, not the times."""
    files = [folder / MODEL, *runs.encoders(folder)]
    digests = [digest_of(path) for path in files if path.exists()]
    return digests, finished.losses, finished.evaluations, finished.num_images, finished.bytes_up


@pytest.mark.parametrize("name", STATEFUL)
def test_a_run_killed_in_the_middle_of_a_round_resumes_with_the_same_result(name: str, tmp_path: Path) -> None:
    spec = spec_of(name)
    undisturbed = run_in_folder(spec, tmp_path / "whole")

    def in_round_three(number: int, client: str, progress: object) -> None:
        if number == 3:
            die()

    calls = Calls(on_progress=in_round_three)
    killed(lambda: run_in_folder(spec, tmp_path / "killed", calls=calls))
    resumed: list[int] = []
    finished = run_in_folder(spec, tmp_path / "killed", calls=Calls(on_resume=resumed.append))

    assert resumed == [2]
    assert outcome(tmp_path / "killed", finished) == outcome(tmp_path / "whole", undisturbed)
    assert sorted(finished.evaluations) == [0, 2, 4]
    assert not (tmp_path / "killed" / "checkpoint").exists()


@pytest.mark.parametrize("at", ["write_durably", "write_atomically", "FolderCheckpoint._remove_others"])
def test_a_run_killed_while_a_checkpoint_is_written_resumes_with_the_same_result(
    at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the manifest of round three is written, the state is that of two rounds, and afterwards of three."""
    spec = spec_of("fedbyol")
    undisturbed = run_in_folder(spec, tmp_path / "whole")
    owner, name = (FolderCheckpoint, at.partition(".")[2]) if "." in at else (checkpoints, at)
    original = getattr(owner, name)

    def dying(*arguments: Any) -> Any:
        result = original(*arguments)
        if any("model.3" in path.name for path in (tmp_path / "killed" / "checkpoint").iterdir()):
            die()
        return result

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, dying)
        killed(lambda: run_in_folder(spec, tmp_path / "killed"))
    resumed: list[int] = []
    finished = run_in_folder(spec, tmp_path / "killed", calls=Calls(on_resume=resumed.append))

    assert resumed == [2 if at == "write_durably" else 3]
    assert outcome(tmp_path / "killed", finished) == outcome(tmp_path / "whole", undisturbed)


def test_a_run_killed_during_an_evaluation_repeats_only_the_evaluation(tmp_path: Path) -> None:
    """The round is not trained again, and its measures are taken once."""
    spec = spec_of("fedsimclr")
    undisturbed = run_in_folder(spec, tmp_path / "whole")

    def die_in_second_evaluation(number: int, what: str, share: float | None) -> None:
        if number == 2:
            die()

    calls = Calls(on_judging=die_in_second_evaluation)
    killed(lambda: run_in_folder(spec, tmp_path / "killed", calls=calls))
    trained: list[int] = []
    finished = run_in_folder(
        spec, tmp_path / "killed", calls=Calls(on_round=lambda record: trained.append(record.round_number))
    )

    assert trained == [3, 4]
    assert finished.evaluations == undisturbed.evaluations


def test_a_run_resumes_with_the_same_result_after_all_client_states_were_lost(tmp_path: Path) -> None:
    spec, lost = spec_of("scaffold"), {2: ["client-0", "client-1", "client-2"]}
    clients = shards(spec)
    whole = simulate(spec, clients, lost_states=lost)

    def after_round_two(record: RoundRecord) -> None:
        if record.round_number == 2:
            raise Cancelled("interrupted")

    with pytest.raises(Cancelled):
        simulate(spec, clients, lost_states=lost, checkpoint=FolderCheckpoint(tmp_path), on_round=after_round_two)
    resumed = simulate(spec, clients, lost_states=lost, checkpoint=FolderCheckpoint(tmp_path))
    assert all(torch.equal(resumed.model[name], value) for name, value in whole.model.items())
    assert resumed.client_states.keys() == whole.client_states.keys()


def test_the_folder_of_another_spec_is_refused(tmp_path: Path) -> None:
    spec = spec_of("fedbyol")
    killed(lambda: run_in_folder(spec, tmp_path, calls=Calls(on_round=lambda record: die())))

    other = spec_of("fedbyol", seed=12)
    with pytest.raises(ResultsError, match="checkpoint of another spec"):
        run_in_folder(other, tmp_path)
    assert runs.is_of(spec, tmp_path)
    assert not runs.is_of(other, tmp_path)
    runs.clear(tmp_path)
    assert run_in_folder(other, tmp_path).num_rounds == 4
    with pytest.raises(ResultsError, match="results of another spec"):
        run_in_folder(spec, tmp_path)


def test_a_paused_run_resumes_with_other_thresholds(tmp_path: Path) -> None:
    watched = {"min_effective_rank": 1000.0, "first_round": 1, "action": "pause"}
    with pytest.raises(Paused, match=r"after round 1: client-[0-2]: effective_rank"):
        run_in_folder(spec_of("fedsimclr", watch=watched), tmp_path)

    finished = run_in_folder(spec_of("fedsimclr", watch={"num_images": 0}), tmp_path)

    assert finished.num_rounds == 4
    assert (tmp_path / ENCODER).exists()
