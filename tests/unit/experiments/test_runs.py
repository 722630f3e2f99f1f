"""The folder of a run: whose it is, what a restart removes, and results that cannot be read."""

import json
import math
from pathlib import Path

import pytest

from fedssl import files
from fedssl.errors import DataError, FolderInUseError, ResultsError
from fedssl.experiments import checkpoints
from fedssl.experiments.checkpoints import MANIFEST, FolderCheckpoint, run_key, sources_digest
from fedssl.experiments.reproduction import RESULTS, read_results
from fedssl.experiments.runs import Calls, clear, encoders, find_finished, is_of, parse_result, run_in_folder
from fedssl.locks import FolderLock
from fedssl.run_files import CHECKPOINT, CLIENTS, DEVICE, ENCODER, HISTORY, INITIAL, LOCK, MEASURES, MODEL, RESULT, SPEC
from fedssl.simulation import RoundRecord
from support.federation import tiny_spec
from support.methods import method_spec


@pytest.mark.parametrize("names_its_sources", [True, False])
def test_a_run_that_another_version_began_is_resumed_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, names_its_sources: bool
) -> None:
    """Between two releases, the version of fedssl stays the same, and its rounds may have other bits."""
    spec, earlier = method_spec("fedsimclr", num_rounds=2), "0123456789abcdef"

    def end(record: RoundRecord) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(checkpoints, "sources_digest", lambda: earlier)
        with pytest.raises(KeyboardInterrupt):
            run_in_folder(spec, tmp_path, calls=Calls(on_round=end))
    if not names_its_sources:
        manifest = tmp_path / CHECKPOINT / MANIFEST
        content = json.loads(manifest.read_text())
        del content["sources"]
        manifest.write_text(json.dumps(content))
    warnings: list[str] = []
    finished = run_in_folder(spec, tmp_path, calls=Calls(on_warning=warnings.append))
    assert warnings == [finished.mixed]
    assert "2 versions of fedssl's code" in warnings[0]
    assert finished.sources == (earlier if names_its_sources else "unknown", sources_digest())
    assert find_finished(spec, tmp_path) == finished


def test_a_run_of_one_version_has_no_warning(tmp_path: Path) -> None:
    spec, warnings = method_spec("fedsimclr", num_rounds=2), list[str]()

    def end(record: RoundRecord) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_in_folder(spec, tmp_path, calls=Calls(on_round=end))
    finished = run_in_folder(spec, tmp_path, calls=Calls(on_warning=warnings.append))
    assert (warnings, finished.mixed, finished.sources) == ([], None, (sources_digest(),))


def test_a_restart_removes_what_a_run_would_continue_from(tmp_path: Path) -> None:
    clear(tmp_path / "nothing")
    for folder in (CHECKPOINT, CLIENTS):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.safetensors").write_bytes(b"")
    for name in (RESULT, MEASURES, DEVICE, MODEL, ENCODER, "encoder-a.safetensors"):
        (tmp_path / name).write_bytes(b"")
    assert [path.name for path in encoders(tmp_path)] == ["encoder-a.safetensors"]
    lock = FolderLock(tmp_path, LOCK)
    lock.acquire()
    with pytest.raises(FolderInUseError):
        clear(tmp_path)
    assert (tmp_path / RESULT).exists()
    lock.release()
    clear(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {MODEL, ENCODER, LOCK}
    assert [path.name for path in encoders(tmp_path)] == [ENCODER]


def test_results_are_on_the_disk_before_the_checkpoint_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power failure, neither the results nor the checkpoint from which to continue would be there otherwise."""
    synced, sync, discard = list[str](), files.sync, FolderCheckpoint.discard

    def record(path: Path) -> None:
        synced.append(path.name)
        sync(path)

    def discarded(checkpoint: FolderCheckpoint) -> None:
        synced.append("discarded")
        discard(checkpoint)

    monkeypatch.setattr(files, "sync", record)
    monkeypatch.setattr(FolderCheckpoint, "discard", discarded)
    run_in_folder(method_spec("fedsimclr", num_rounds=1), tmp_path)

    written = [f".{name}.incoming" for name in (MODEL, INITIAL, ENCODER, SPEC, HISTORY, RESULT)]
    assert [name for name in synced if name in (*written, "discarded")][-7:] == [*written, "discarded"]


def test_a_folder_is_free_or_all_in_it_is_of_one_run(tmp_path: Path) -> None:
    spec, other = tiny_spec(), tiny_spec(seed=7)
    assert is_of(spec, tmp_path)
    (tmp_path / CHECKPOINT).mkdir()
    manifest = tmp_path / CHECKPOINT / "manifest.json"
    for path in (manifest, tmp_path / RESULT):
        path.write_text(json.dumps({"key": run_key(spec)}))
        assert [is_of(each, tmp_path) for each in (spec, other)] == [True, False]
    manifest.write_text(json.dumps({"key": run_key(other)}))
    assert [is_of(each, tmp_path) for each in (spec, other)] == [False, False]


def test_a_finished_run_is_read_and_its_checkpoint_removed(tmp_path: Path) -> None:
    """A process may be killed after it has written the result, before it removes the checkpoint."""
    spec, checkpoint = tiny_spec(), tmp_path / CHECKPOINT
    document = {"num_rounds": 1, "num_images": 10, "bytes_down": 1, "bytes_up": 2, "seconds": 3.0, "losses": [0.5]}
    document |= {"evaluations": {"1": {"probe": None}}, "megabytes_by_round": {"0": 0, "1": 0.1}}
    (tmp_path / RESULT).write_text(json.dumps({"key": run_key(spec), **document}))
    checkpoint.mkdir()
    for name in ("manifest.json", "model.1.safetensors"):
        (checkpoint / name).write_text("{}")

    found = run_in_folder(spec, tmp_path)

    assert (found.num_rounds, found.losses, found.bytes_up) == (1, [0.5], 2)
    assert math.isnan(found.last["probe"])
    assert found.untrained == {}
    assert not checkpoint.exists()
    with pytest.raises(ResultsError, match="holds this run without its clients' models"):
        run_in_folder(spec, tmp_path, keep_clients=True)


def test_a_run_that_never_began_leaves_no_folder(tmp_path: Path) -> None:
    spec = tiny_spec(partition={"dataset": "nowhere", "num_clients": 2})
    with pytest.raises(DataError, match="found no data set"):
        run_in_folder(spec, tmp_path / "new")

    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("document", [{}, {"evaluations": None}, {"evaluations": {"x": {}}}])
def test_a_result_that_lacks_something_is_refused(document: dict[str, object]) -> None:
    with pytest.raises(ResultsError, match=r"result\.json is not a run's result .*: start again with --restart"):
        parse_result(document)


def test_a_damaged_result_of_a_cell_is_named(tmp_path: Path) -> None:
    (tmp_path / RESULTS).mkdir()
    (tmp_path / RESULTS / "cell.json").write_text('{"table": "fedx-1"}')
    with pytest.raises(ResultsError, match=r"cell\.json is not a cell's result .*: remove it"):
        read_results(tmp_path)
