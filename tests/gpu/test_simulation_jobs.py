"""On a GPU that several processes share: a simulation is that of one process, and of a CPU, up to rounding."""

import pytest

from fedssl.artifacts.tensors import Tensors
from fedssl.simulation import Result, simulate
from support.methods import method_spec, shards

WEIGHTS_TOLERANCE = 0.01
"""The distance of the weights, as a share of the way that they went: float32 numbers are added in another order."""
LOSS_TOLERANCE = 1e-3


def test_processes_that_share_a_gpu_train_as_one_and_as_a_cpu_does() -> None:
    training = {"batch_size": 32, "local_epochs": 3, "gpu_steps": "recorded"}
    spec = method_spec("fedema", training=training)
    expected = simulate(spec, shards(spec))
    for jobs in (1, 2):
        found = simulate(spec, shards(spec), device="cuda", jobs=jobs)
        assert _distance(found.model, expected.model) < WEIGHTS_TOLERANCE * _distance(expected.model, expected.initial)
        assert _losses(found) == pytest.approx(_losses(expected), rel=LOSS_TOLERANCE)


def _distance(one: Tensors, other: Tensors) -> float:
    squares = ((one[name].double() - other[name].double()).square().sum() for name in one)
    return float(sum(squares)) ** 0.5


def _losses(result: Result) -> list[float]:
    return [record.loss for record in result.history if record.loss is not None]
