"""Rounds on several devices, and how close their results are to those on one."""

from typing import Any

import pytest
import torch

from fedssl.artifacts.tensors import Tensors
from fedssl.engine import LocalResult
from fedssl.protocol.runs import RunSpec
from support.methods import method_spec


def digits_spec(name: str, num_images: int = 228, **changes: Any) -> RunSpec:
    """Return the spec of a run whose three clients share these digits, by default with an incomplete last batch."""
    partition = {"dataset": "digits", "num_clients": 3, "max_images": num_images}
    return method_spec(name, partition=partition, **changes)


def assert_close(found: LocalResult, expected: LocalResult, received: Tensors) -> None:
    """Assert that two results are equal up to the order in which float32 numbers were added.

    If this changes the sign of one activation before a ReLU, gradients differ by more than rounding. So all weights
    together may differ by 1 % of what the round changed. BatchNorm's statistics have no such jumps.
    """
    assert found.num_examples == expected.num_examples
    assert found.metrics == pytest.approx(expected.metrics, rel=1e-2, abs=1e-4)
    assert (found.update.keys(), found.state.keys()) == (expected.update.keys(), expected.state.keys())
    kept = ((f"kept {name}", tensor, found.state[name]) for name, tensor in expected.state.items())
    for name, wanted, tensor in (*((name, each, found.update[name]) for name, each in expected.update.items()), *kept):
        if _is_statistic(name, wanted):
            torch.testing.assert_close(tensor, wanted, rtol=1e-3, atol=1e-4, msg=lambda text, n=name: f"{n}: {text}")
    differs, moved = distance(found, expected, received)
    assert differs < 0.01 * moved


def distance(found: LocalResult, expected: LocalResult, received: Tensors) -> tuple[float, float]:
    """Return the distance between the two clients' weights, all together, and how far the expected ones moved.

    Tensors that were not received, such as FLESD's similarities and kept queues, count as a whole.
    """
    squares = []
    sides = ((found.update, expected.update, received), (found.state, expected.state, Tensors()))
    for ours, theirs, before in sides:
        for name, wanted in theirs.items():
            if not _is_statistic(name, wanted):
                moved = wanted - before.get(name, torch.zeros_like(wanted))
                apart = ours[name] - wanted
                squares.append(tuple(float(each.double().square().sum()) for each in (apart, moved)))
    differs, moved_by = (sum(column) ** 0.5 for column in zip(*squares, strict=True))
    return differs, moved_by


def _is_statistic(name: str, tensor: torch.Tensor) -> bool:
    return "running_" in name or not tensor.is_floating_point()
