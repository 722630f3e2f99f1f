"""The settings with which this machine computes."""

import os

import pytest
import torch

from fedssl.cli.machine import prepare

NUM_CORES = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("jobs", "threads", "expected"), [("3", 1, 3), ("auto", 1, NUM_CORES), ("auto", NUM_CORES + 1, 1)]
)
def test_auto_is_as_many_processes_as_have_cores_for_their_threads(
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
