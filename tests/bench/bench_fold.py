"""The speed of adding an update to the mean, as a share of the memory bandwidth, and what is left to a round's close.

    make bench ARGS="-k fold -s"

Adding a float32 update to a float64 mean reads 12 bytes per number and writes 8. The floor is the time of a copy that
moves as many bytes. Times are processor times, because other work shifts the others.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from fedssl.aggregation.mean import RunningMean
from fedssl.aggregation.prefix_mean import PrefixMean
from fedssl.artifacts.store import digest_of
from fedssl.artifacts.tensors import read_tensors, save_tensors
from fedssl.engine import begin_aggregation, run_aggregation, start_run
from fedssl.methods import METHODS
from fedssl.methods.api import Context, Update
from fedssl.protocol.runs import RunSpec

REPEATS, NUM_CLIENTS = 5, 8
LEAST_SHARE = 0.5
MOST_LEFT = 0.8
"""The largest share of a whole close's processor time. It was up to 0.7 on a busy machine, with the measurements."""


def _seconds(act: Callable[[], object], repeats: int = REPEATS) -> float:
    times = []
    for _ in range(repeats):
        started = time.process_time()
        act()
        times.append(time.process_time() - started)
    return min(times)  # the slower ones shared the processor's cache with other work


def test_adding_an_update_takes_at_most_twice_as_long_as_moving_its_bytes() -> None:
    torch.set_num_threads(1)
    size = 25_000_000
    update, mean = {"w": torch.randn(size)}, RunningMean()
    mean.add(update, 3)
    add = _seconds(lambda: mean.add(update, 3))
    source, target = torch.ones(size * 10 // 8, dtype=torch.float64), torch.zeros(size * 10 // 8, dtype=torch.float64)
    copy = _seconds(lambda: target.copy_(source))
    share = copy / add
    print(f"100 MB added in {1000 * add:.0f} ms, floor {1000 * copy:.0f} ms: {share:.2f} of the floor")  # noqa: T201
    assert share >= LEAST_SHARE


@dataclass(frozen=True)
class _Read:
    path: Path
    digest: str

    def __call__(self) -> Mapping[str, torch.Tensor]:
        return read_tensors(self.path, self.digest)


def test_closing_a_round_is_faster_if_all_updates_but_one_were_added_before(tmp_path: Path) -> None:
    """All updates of a ResNet-18 were added before the close, except the last client's."""
    torch.set_num_threads(1)
    spec = RunSpec.model_validate({"method": {"name": "fedsimclr"}, "model": {"encoder": {"name": "resnet18"}}})
    method, plain = METHODS["fedsimclr"], Context(spec=spec, round_number=1)
    first = start_run(method, plain)
    updates = []
    for index in range(NUM_CLIENTS):
        path = tmp_path / str(index)
        save_tensors({n: t + 0.01 * index if t.is_floating_point() else t for n, t in first.broadcast.items()}, path)
        updates.append(Update(f"c{index}", 100 + index, _Read(path, digest_of(path))))
    whole = _seconds(lambda: run_aggregation(method, first.state, updates, plain), 1)
    begun = Context(spec=spec, round_number=1, prefix_mean=PrefixMean())
    begin_aggregation(method, updates[:-1], begun)
    left = _seconds(lambda: run_aggregation(method, first.state, updates, begun), 1)
    print(f"close {whole:.2f} s of processor time, after {NUM_CLIENTS - 1} were added {left:.2f} s")  # noqa: T201
    assert left / whole < MOST_LEFT
