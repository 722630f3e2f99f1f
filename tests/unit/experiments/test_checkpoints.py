"""The files of a checkpoint, from results that were made by hand."""

from pathlib import Path

import pytest
import torch

from fedssl.errors import ResultsError
from fedssl.experiments import checkpoints
from fedssl.experiments.checkpoints import FolderCheckpoint
from fedssl.simulation import Result, RoundRecord
from support.federation import tiny_spec

SPEC = tiny_spec()


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {"a": torch.full((2,), value)}


def result() -> Result:
    """Return a simulation after its first round, in which only client x trained."""
    return Result(
        spec=SPEC, initial=tensors(0), model=tensors(1), history=[RoundRecord(1, {"x": {"loss": 0.5}}, {"x": 10})],
        client_states={"x": tensors(2), "y": tensors(3), "stateless": {}}, server_state=tensors(1),
        evaluations_by_round={0: {"probe": 0.25}}, images="digest",
    )  # fmt: skip


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_round_writes_only_what_it_changed_and_removes_old_files(tmp_path: Path) -> None:
    checkpoint, made = FolderCheckpoint(tmp_path / "checkpoint"), result()
    checkpoint.save(made)
    first = {"manifest.json", "initial.1.safetensors", "model.1.safetensors"}
    assert names(tmp_path / "checkpoint") == first | {"client.x.1.safetensors", "client.y.1.safetensors"}

    again = FolderCheckpoint(tmp_path / "checkpoint")
    (tmp_path / "checkpoint" / ".model.2.safetensors.incoming").write_text("a killed process left it")
    found = again.load(SPEC)
    assert found is not None
    assert (found.rounds_done, found.images, found.evaluations) == (1, "digest", {"probe": 0.25})
    assert {name: list(state) for name, state in found.client_states.items()} == {
        "x": ["a"],
        "y": ["a"],
        "stateless": [],
    }
    assert torch.equal(found.server_state["a"], made.model["a"]), "it was not stored twice"

    found.history.append(RoundRecord(2, {"y": {}}, {"y": 10}))
    found.model, found.server_state = tensors(4), tensors(5)
    again.save(found)
    assert names(tmp_path / "checkpoint") == {
        "manifest.json", "initial.1.safetensors", "model.2.safetensors", "server.2.safetensors",
        "client.x.1.safetensors", "client.y.2.safetensors",
    }  # fmt: skip
    again.discard()
    assert not (tmp_path / "checkpoint").exists()


def test_a_round_that_cannot_be_written_leaves_the_round_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full, or the process is killed, between the files of a round and its manifest."""
    checkpoint, made = FolderCheckpoint(tmp_path), result()
    checkpoint.save(made)
    made.history.append(RoundRecord(2, {"x": {}}, {"x": 10}))
    made.model = tensors(9)

    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(checkpoints, "write_atomically", full)
        with pytest.raises(OSError, match="No space left"):
            checkpoint.save(made)

    again = FolderCheckpoint(tmp_path)
    found = again.load(SPEC)
    assert found is not None
    assert found.rounds_done == 1
    assert torch.equal(found.model["a"], tensors(1)["a"])
    again.save(made)
    assert "model.1.safetensors" not in names(tmp_path)


def test_another_spec_or_version_and_damage_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FolderCheckpoint(tmp_path).save(result())
    with pytest.raises(ResultsError, match="holds the checkpoint of another spec: take another folder"):
        FolderCheckpoint(tmp_path).load(tiny_spec(seed=7))
    with monkeypatch.context() as patched:
        patched.setattr(checkpoints, "version", lambda name: "99.0")
        with pytest.raises(ResultsError, match=r"other code \(fedssl .*, now 99\.0\)"):
            FolderCheckpoint(tmp_path).load(SPEC)

    (tmp_path / "model.1.safetensors").write_bytes(b"\0" * 20)
    with pytest.raises(ResultsError, match="cannot be read"):
        FolderCheckpoint(tmp_path).load(SPEC)
    for damaged in ("[1]", "{"):
        (tmp_path / "manifest.json").write_text(damaged)
        with pytest.raises(ResultsError, match="cannot be read"):
            FolderCheckpoint(tmp_path).load(SPEC)
