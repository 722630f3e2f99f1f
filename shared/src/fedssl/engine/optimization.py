"""Optimisers and their steps, for clients and for the coordinator."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType

import torch
from torch import nn

from fedssl import optimizers
from fedssl.engine.parameter_groups import move_learning_rates, parameter_groups, set_learning_rate
from fedssl.errors import MethodError
from fedssl.methods.api import Context, Losses
from fedssl.protocol.training import OptimizerConfig

_EQUAL: Mapping[str, float] = MappingProxyType({})


def optimizer_for(
    modules: nn.ModuleDict, config: OptimizerConfig, learning_rate: float, factors: Mapping[str, float] = _EQUAL
) -> torch.optim.Optimizer:
    """Return a fresh optimiser of all trained parameters. `factors`: of the learning rate of modules, by their names.

    On a GPU, a step is one kernel for many parameters and can be captured. It reads the learning rate from the GPU's
    memory, except that LARS has it as a number. On a CPU, torch's plain loop is as fast.
    """
    groups = parameter_groups(modules, config, factors)
    device = next((each.device for each in modules.parameters() if each.requires_grad and each.is_cuda), None)
    fused = None if device is None else True
    rate, decay = config.learning_rate, config.weight_decay
    optimizer: torch.optim.Optimizer
    if config.name == "lars":
        optimizer = optimizers.LARS(groups, lr=rate, momentum=config.momentum, weight_decay=decay)
    elif config.name == "sgd":
        optimizer = optimizers.SGD(groups, lr=rate, momentum=config.momentum, weight_decay=decay, fused=fused)
    else:
        kind = optimizers.Adam if config.name == "adam" else optimizers.AdamW
        optimizer = kind(groups, lr=rate, weight_decay=decay, fused=fused, capturable=fused is not None)
    if device is not None and config.name != "lars":
        move_learning_rates(optimizer, device)
    set_learning_rate(optimizer, learning_rate)
    return optimizer


def restart(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Reset the optimiser in place to what `optimizer_for` returns: its state starts from zeros."""
    set_learning_rate(optimizer, learning_rate)
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


def take_step(optimizer: torch.optim.Optimizer, total: torch.Tensor, max_gradient_norm: float | None = None) -> None:
    """Take one optimiser step on `total`, with its gradient limited to a norm."""
    optimizer.zero_grad(set_to_none=True)
    total.backward()  # type: ignore[no-untyped-call]
    move(optimizer, max_gradient_norm)


def move(optimizer: torch.optim.Optimizer, max_gradient_norm: float | None) -> None:
    """Take one optimiser step on the gradients that the parameters have, limited to a norm."""
    if max_gradient_norm is not None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        nn.utils.clip_grad_norm_(parameters, max_gradient_norm)
    optimizer.step()
