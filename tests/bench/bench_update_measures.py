"""The cost of measuring every update, which reads each once more, as a ratio within one process."""

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from fedssl.artifacts.tensors import in_name_order, load_tensors, save_tensors
from fedssl.engine import run_aggregation, start_run
from fedssl.methods import METHODS
from fedssl.methods.api import Context, Update
from fedssl.protocol.runs import RunSpec

NUM_CLIENTS, REPEATS = 6, 5
MOST = 4.0
"""The largest ratio to the mean without measurements. It was 1.7 on two idle cores, and 2.6 on busy ones."""


def _seconds(act: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        act()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def test_measuring_costs_about_as_much_as_the_mean(tmp_path: Path) -> None:
    """The model is a ResNet-18 (11 million weights), read from memory-mapped files as the aggregator does."""
    torch.set_num_threads(1)
    spec = RunSpec.model_validate({"method": {"name": "fedsimclr"}, "model": {"encoder": {"name": "resnet18"}}})
    method, ctx = METHODS["fedsimclr"], Context(spec=spec, round_number=1)
    first = start_run(method, ctx)
    updates = []
    for index in range(NUM_CLIENTS):
        path = tmp_path / f"{index}.safetensors"
        save_tensors({n: t + 0.01 * index if t.is_floating_point() else t for n, t in first.broadcast.items()}, path)
        updates.append(Update(f"c{index}", 100 + index, lambda path=path: load_tensors(path)))  # type: ignore[misc]
    bound, state = method.bind(spec), in_name_order(first.state)
    alone = _seconds(lambda: bound.server.aggregate(state, updates, ctx))
    measured = _seconds(lambda: run_aggregation(method, first.state, updates, ctx))
    ratio = measured / alone
    num_bytes = sum(path.stat().st_size for path in tmp_path.iterdir())
    print(  # noqa: T201
        f"mean alone {alone:.2f} s, with measurements {measured:.2f} s: {ratio:.2f} times "
        f"({num_bytes / (measured - alone) / 1e9:.2f} GB/s of updates measured)"
    )
    assert ratio < MOST
