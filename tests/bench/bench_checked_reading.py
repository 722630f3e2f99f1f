"""The cost, in time and in memory, of comparing every update with its digest while it is aggregated.

    python tests/bench/bench_checked_reading.py           updates of 100 MB
    make bench ARGS="-k checked_reading -s"               smaller ones, asserted

Without the check, updates are memory-mapped. The check costs one sha256 of the bytes and one copy of them: the ratio is
the time beyond that of the memory map, divided by the time of hashing. Memory is measured in a separate process,
as what a mean of ten updates needs beyond that of one: nothing, because only one update is in memory at a time.
"""

import hashlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from fedssl.aggregation import weighted_mean
from fedssl.artifacts.store import digest_of
from fedssl.artifacts.tensors import load_tensors, read_tensors, save_tensors

NUM_UPDATES, TURNS, NUM_TENSORS = 4, 5, 40
Open = Callable[[Path, str], Mapping[str, torch.Tensor]]


@contextmanager
def _updates(megabytes: float, count: int) -> Iterator[list[tuple[Path, str]]]:
    size = int(megabytes * 1e6 / 4 / NUM_TENSORS)
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / str(number) for number in range(count)]
        for path in paths:
            save_tensors({f"layer{layer:02}": torch.randn(size) for layer in range(NUM_TENSORS)}, path)
        yield [(path, digest_of(path)) for path in paths]


def _mapped(path: Path, digest: str) -> Mapping[str, torch.Tensor]:
    return load_tensors(path)


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def measure(megabytes: float) -> dict[str, float]:
    """Return the median seconds of a mean with and without the check, of hashing only, and the ratio."""

    def mean(open_update: Open) -> object:
        return weighted_mean((open_update(*each) for each in updates), [1] * len(updates))

    with _updates(megabytes, NUM_UPDATES) as updates:
        contents = [path.read_bytes() for path, _ in updates]
        turns = [
            (
                _seconds(lambda: mean(_mapped)),
                _seconds(lambda: mean(read_tensors)),
                _seconds(lambda: [hashlib.sha256(content).digest() for content in contents]),
            )
            for _ in range(TURNS)
        ]
    mapped, checked, hashed = (statistics.median(values) for values in zip(*turns, strict=True))
    ratio = statistics.median((with_check - without) / hashing for without, with_check, hashing in turns)
    return {"mapped": mapped, "checked": checked, "hashed": hashed, "ratio": ratio}


def peak_bytes(megabytes: float, count: int) -> int:
    """Return the peak memory of a process that computes the mean of `count` updates."""
    with _updates(megabytes, count) as updates:
        command = [sys.executable, __file__, "mean", json.dumps([[str(path), digest] for path, digest in updates])]
        return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def _mean_of(updates: list[tuple[str, str]]) -> int:
    weighted_mean((read_tensors(Path(path), digest) for path, digest in updates), [1] * len(updates))
    status = Path("/proc/self/status").read_text(encoding="ascii")
    # `ru_maxrss` would begin with the memory of the process that started this one.
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def test_the_check_costs_at_most_twice_as_much_as_hashing() -> None:
    found = measure(20)
    print(found)  # noqa: T201
    assert found["ratio"] < 2


def test_one_update_is_in_memory_at_a_time() -> None:
    one, ten = peak_bytes(40, 1), peak_bytes(40, 10)
    print(f"one update {one / 1e6:.0f} MB, ten updates {ten / 1e6:.0f} MB")  # noqa: T201
    assert ten - one < 20e6


@pytest.mark.parametrize("megabytes", [0.05])
def test_small_updates_are_not_slower(megabytes: float) -> None:
    found = measure(megabytes)
    print(found)  # noqa: T201
    assert found["checked"] < 2 * (found["mapped"] + found["hashed"])


if __name__ == "__main__":
    torch.set_num_threads(1)
    if len(sys.argv) > 2:
        sys.stdout.write(str(_mean_of(json.loads(sys.argv[2]))))
    else:
        print(json.dumps(measure(100)))  # noqa: T201
        print(json.dumps({count: peak_bytes(100, count) for count in (1, 2, 10)}))  # noqa: T201
