"""The settings for this machine's computations."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from fedssl.cli.machine import prepare, require_evaluation_images
from fedssl.cores import num_usable_cores
from fedssl.errors import DataError
from fedssl.protocol.evaluation import EvaluationConfig

NUM_CORES = num_usable_cores()


@pytest.mark.parametrize(
    ("jobs", "threads", "expected"), [("3", 1, 3), ("auto", 1, NUM_CORES), ("auto", NUM_CORES + 1, 1)]
)
def test_auto_starts_as_many_processes_as_there_are_cores_for_their_threads(
    jobs: str, threads: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = torch.get_num_threads()
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, "1")  # restored after the test

    try:
        assert prepare("cpu", threads, None, set(), jobs).jobs == expected
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_data_sets_are_fetched_before_anything_starts_unless_a_folder_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[str] = []
    monkeypatch.setattr("fedssl.cli.machine.ensure", lambda name, note: fetched.append(name))
    threads = torch.get_num_threads()
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, "1")  # restored after the test
    assert prepare("cpu", threads, tmp_path, {"a"}).data_root == tmp_path
    assert fetched == []
    prepare("cpu", threads, None, {"b", "a"})
    assert fetched == ["a", "b"]


@pytest.mark.parametrize(
    ("folders", "message"),
    [
        (["a", "b"], "images has no test images: give it two sub-folders, train and test"),
        (["train", "test"], "images have no labels: give it one sub-folder per class in train and test"),
        (["train/a", "test/a"], None),
    ],
)
def test_a_folder_to_evaluate_on_needs_labelled_test_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folders: list[str], message: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in folders:
        (tmp_path / "images" / folder).mkdir(parents=True)
        (tmp_path / "images" / folder / "0.png").write_bytes(b"not decoded")
    outcome = nullcontext() if message is None else pytest.raises(DataError, match=f"evaluation.dataset.*{message}$")
    with outcome:
        require_evaluation_images(EvaluationConfig(dataset="images"), None)
