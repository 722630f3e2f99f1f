"""Optimisers and their steps, for clients and for the coordinator."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from fedssl import optimizers
from fedssl.errors import MethodError
from fedssl.methods.api import Context, Losses
from fedssl.protocol.training import OptimizerConfig

_FACTOR = "learning_rate_factor"
_EQUAL: Mapping[str, float] = MappingProxyType({})


def optimizer_for(
    modules: nn.ModuleDict, config: OptimizerConfig, learning_rate: float, factors: Mapping[str, float] = _EQUAL
) -> torch.optim.Optimizer:
    """Return a fresh optimiser of all trained parameters. `factors`: of the learning rate of modules, by their names.

    On a GPU, a step is one kernel for many parameters and can be captured. On a CPU, torch's plain loop is as fast.
    """
    groups = _groups(modules, learning_rate, factors)
    fused = True if any(parameter.is_cuda for group in groups for parameter in group["params"]) else None
    if config.name == "sgd":
        return optimizers.SGD(
            groups, lr=learning_rate, momentum=config.momentum, weight_decay=config.weight_decay, fused=fused
        )
    kind = optimizers.Adam if config.name == "adam" else optimizers.AdamW
    return kind(groups, lr=learning_rate, weight_decay=config.weight_decay, fused=fused, capturable=fused is not None)


def _groups(modules: nn.ModuleDict, learning_rate: float, factors: Mapping[str, float]) -> list[dict[str, Any]]:
    """Return one group of trained parameters per factor, in the order of the modules. Each keeps its factor."""
    by_factor: dict[float, list[nn.Parameter]] = {}
    seen: set[int] = set()  # modules may share parameters
    for name, module in modules.items():
        for parameter in module.parameters():
            if parameter.requires_grad and id(parameter) not in seen:
                seen.add(id(parameter))
                by_factor.setdefault(factors.get(name, 1.0), []).append(parameter)
    return [
        {"params": parameters, "lr": factor * learning_rate, _FACTOR: factor}
        for factor, parameters in by_factor.items()
    ]


def restart(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Reset the optimiser in place to what `optimizer_for` returns: its state starts from zeros."""
    for group in optimizer.param_groups:
        group["lr"] = group[_FACTOR] * learning_rate
    for state in optimizer.state.values():
        for value in state.values():
            if torch.is_tensor(value):
                value.zero_()


def autocast(ctx: Context) -> AbstractContextManager[object]:
    """Return a context in which networks run in the spec's precision."""
    if ctx.spec.training.precision == "fp32":
        return nullcontext()
    return torch.autocast(ctx.device.type, dtype=torch.bfloat16)


def total_loss(losses: Losses) -> torch.Tensor:
    """Return the sum of the terms, in fp32. Raises MethodError if one has no gradient."""
    if constant := [name for name, term in losses.items() if not term.requires_grad]:
        raise MethodError(f"the loss {constant[0]!r} has no gradient: return it among the measurements")
    return torch.stack([term.float() for term in losses.values()]).sum()


def take_step(optimizer: torch.optim.Optimizer, total: torch.Tensor) -> None:
    """Take one optimiser step on `total`."""
    optimizer.zero_grad(set_to_none=True)
    total.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
