"""The coordinator's optimiser: its state is kept next to the method's, and is never broadcast."""

from collections.abc import Iterable, Mapping

import torch

from fedssl.aggregation import fedadam_step, fedavgm_step, is_batch_norm_buffer
from fedssl.artifacts.tensors import Tensors
from fedssl.methods import BoundMethod
from fedssl.methods.api import Context, ServerState
from fedssl.protocol.aggregation import ServerOptimizerConfig

PREFIX = "server_optimizer."
_FIRST, _SECOND = f"{PREFIX}first.", f"{PREFIX}second."


def first_optimizer_state(bound: BoundMethod, state: ServerState, ctx: Context) -> Tensors:
    """Return the optimiser's state before the first round, or nothing if the spec has no optimiser."""
    config = ctx.spec.aggregation.server_optimizer
    if config is None:
        return {}
    return {
        f"{prefix}{name}": torch.full_like(state[name], value)
        for prefix, value in _first_values(config).items()
        for name in _moved(bound)
    }


def server_step(
    bound: BoundMethod, before: ServerState, after: ServerState, kept: Mapping[str, torch.Tensor], ctx: Context
) -> tuple[Tensors, Tensors]:
    """Return the next state of the method, and the optimiser's.

    `before` and `after`: the state that the round began with, and the one with the clients' means. `kept`: has
    what this function or `first_optimizer_state` returned before.
    """
    config = ctx.spec.aggregation.server_optimizer
    if config is None:
        return dict(after), {}
    moved, state = dict(after), {name: tensor for name, tensor in kept.items() if name.startswith(PREFIX)}
    for name in _moved(bound):
        first = kept[f"{_FIRST}{name}"]
        if config.name == "fedavgm":
            moved[name], state[f"{_FIRST}{name}"] = fedavgm_step(
                before[name], after[name], first, learning_rate=config.learning_rate, beta=config.beta_1
            )
        else:
            moved[name], state[f"{_FIRST}{name}"], state[f"{_SECOND}{name}"] = fedadam_step(
                before[name],
                after[name],
                first,
                kept[f"{_SECOND}{name}"],
                learning_rate=config.learning_rate,
                beta_1=config.beta_1,
                beta_2=config.beta_2,
                tau=config.tau,
            )
    return moved, state


def _first_values(config: ServerOptimizerConfig) -> dict[str, float]:
    return {_FIRST: 0.0} if config.name == "fedavgm" else {_FIRST: 0.0, _SECOND: config.tau**2}


def _moved(bound: BoundMethod) -> Iterable[str]:
    """Return the names of the weights that clients send, without BatchNorm's statistics."""
    broadcast = {tensor.name for tensor in bound.plan.broadcast}
    return [
        tensor.name
        for tensor in bound.plan.update
        if tensor.kind == "weights"
        and tensor.dtype.startswith(("F", "BF"))
        and tensor.name in broadcast
        and not is_batch_norm_buffer(tensor.name)
    ]
