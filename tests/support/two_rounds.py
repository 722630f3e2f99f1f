"""Two rounds of a method, trained by two clients in turn, on any device."""

import dataclasses
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

from fedssl.engine import LocalResult, run_local_round
from fedssl.engine.cuda_graphs import on_own_stream
from fedssl.engine.trainer import borrow_trainer
from fedssl.methods import METHODS
from fedssl.methods.api import ClientData
from fedssl.protocol.runs import RunSpec
from support.combinations import COMBINATIONS, FEATURES, combined_spec
from support.methods import context
from support.rounds import aggregate, client_data, start

CLIENTS = ("client-0", "client-1")


LEARNING_RATE = 0.005
"""Small enough that rounding errors stay small: with ten times as much, some methods amplify them."""


def two_rounds_spec(
    combination: str, /, *, gpu_steps: str = "auto", local_epochs: int = 1, **optimizer: Any
) -> RunSpec:
    """Return the spec of a method, combination or feature, with several whole batches per round and an incomplete one.

    The spec keeps its own settings of the training, except for those given here.
    """
    own = {**COMBINATIONS, **FEATURES}.get(combination, {}).get("training", {})
    training = {
        **own,
        "batch_size": 16,
        "local_epochs": local_epochs,
        "drop_last": False,
        "gpu_steps": gpu_steps,
        "optimizer": {"name": "sgd", "learning_rate": LEARNING_RATE, **own.get("optimizer", {}), **optimizer},
    }
    return combined_spec(combination, training=training)


def two_rounds(spec: RunSpec, device: str = "cpu", like: Sequence[LocalResult] | None = None) -> list[LocalResult]:
    """Return the result of one client in the first round and of another in the second.

    If `like` is given, the second round begins with the first update of `like`, so that the aggregate does not add
    differences of its own.
    """
    now, results = start(spec), []
    for number, client in enumerate(CLIENTS, 1):
        ctx, data = on_device(device, context(spec, number, client)), moved(client_data(spec, client), device)
        result = run_local_round(METHODS[spec.method.name], now.received, None, data, ctx)
        kept = result if like is None else like[number - 1]
        now = aggregate(spec, now.state, [(kept.num_examples, kept.update)], number)
        results.append(result)
    return results


def assert_equal_up_to_rounding(expected: Sequence[LocalResult], found: Sequence[LocalResult]) -> None:
    """Assert that two ways to take the same steps differ only in rounding.

    Tensors are compared as a whole: Adam turns the rounding of a gradient that is almost zero into a step.
    """
    for one, two in zip(expected, found, strict=True):
        assert (two.metrics.keys(), two.update.keys()) == (one.metrics.keys(), one.update.keys())
        for name, value in one.metrics.items():
            assert two.metrics[name] == pytest.approx(value, rel=1e-2, abs=1e-3), f"{name}: {two.metrics} {one.metrics}"
        for name, tensor in one.update.items():
            apart, size = (two.update[name].float() - tensor.float()).norm(), tensor.float().norm()
            assert apart <= 2e-3 * size + 2e-4 * tensor.numel() ** 0.5, f"{name}: {apart} apart, of {size}"


def two_epochs(spec: RunSpec, device: str, around_second: AbstractContextManager[Any]) -> torch.Tensor:
    """Take a round's two epochs step by step, and return the sum of the second one's terms."""
    assert spec.training.local_epochs == 2
    method, ctx = METHODS[spec.method.name], on_device(device, context(spec, 2, CLIENTS[0]))
    data, broadcast = moved(client_data(spec, CLIENTS[0]), device), start(spec).received
    with borrow_trainer(method, ctx) as trainer, on_own_stream(ctx.device):
        algorithm, modules = trainer.algorithm, trainer.modules
        algorithm.merge(modules, broadcast, None, data, ctx)
        step = trainer.start_round(algorithm.schedule(len(data), ctx), ctx)
        for epoch, around in enumerate((nullcontext(), around_second)):
            algorithm.begin_epoch(modules, data, epoch, ctx)
            sums = torch.zeros((), device=device)
            with around:
                for batch in algorithm.batches(data, epoch, ctx):
                    sums = sums + step(batch).values
    return sums


def on_device(device: str, ctx: Any) -> Any:
    public = None if ctx.public is None else moved(ctx.public, device)
    return dataclasses.replace(ctx, device=torch.device(device), public=public)


def moved(data: ClientData, device: str) -> ClientData:
    others = (None if each is None else each.to(device) for each in (data.labels, data.held_out))
    return ClientData(data.images.to(device), *others)
