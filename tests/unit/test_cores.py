"""The number of usable processor cores, with and without a way to restrict a process to some of them."""

import os

import pytest

from fedssl.cores import num_usable_cores


def test_a_restricted_process_counts_only_its_own_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    own = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(own)})
        assert num_usable_cores() == 1
    finally:
        os.sched_setaffinity(0, own)
    monkeypatch.delattr(os, "sched_getaffinity")  # as on macOS
    assert num_usable_cores() == os.cpu_count()
