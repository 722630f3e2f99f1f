"""The moving average of the global encoder: it is kept next to the method's state, and no client receives it."""

from collections.abc import Mapping

import torch

from fedssl.aggregation import moving_average
from fedssl.artifacts.tensors import Tensors
from fedssl.errors import SpecError
from fedssl.methods import BoundMethod
from fedssl.methods.api import Context, ServerState

PREFIX = "encoder_average."
_NUM_ROUNDS = f"{PREFIX}num_rounds"
_ENCODER = "encoder."


def check_average(bound: BoundMethod) -> None:
    """Raise SpecError if the spec averages an encoder that no round changes."""
    if bound.spec.aggregation.encoder_average is not None and not _averaged_names(bound):
        raise SpecError(
            f"aggregation.encoder_average applies to an encoder that is trained, and {bound.spec.method.name} trains "
            "none here: leave it out"
        )


def first_average(bound: BoundMethod, state: ServerState, ctx: Context) -> Tensors:
    """Return the average before the first round, which is the first weights, or nothing if the spec has no average."""
    if ctx.spec.aggregation.encoder_average is None:
        return {}
    averaged = {f"{PREFIX}{name}": state[name] for name in _averaged_names(bound)}
    return {_NUM_ROUNDS: torch.zeros(1, dtype=torch.int64), **averaged}


def next_average(bound: BoundMethod, state: ServerState, kept: Mapping[str, torch.Tensor], ctx: Context) -> Tensors:
    """Return the average after a round whose result is `state`, or nothing if the spec has none.

    The first round's encoder replaces the first weights, as the first model does in torch's `AveragedModel`: otherwise
    random weights would stay in the average. `kept` contains what this function or `first_average` returned before.
    """
    config = ctx.spec.aggregation.encoder_average
    if config is None:
        return {}
    num_rounds = kept[_NUM_ROUNDS]
    found = {_NUM_ROUNDS: num_rounds + 1}
    for name in _averaged_names(bound):
        new, old = state[name], kept[f"{PREFIX}{name}"]
        is_first = not bool(num_rounds.any())
        is_counted = not new.is_floating_point()  # BatchNorm's number of batches
        found[f"{PREFIX}{name}"] = new if is_first or is_counted else moving_average(old, new, decay=config.decay)
    return found


def averaged_encoder(kept: Mapping[str, torch.Tensor]) -> Tensors:
    """Return the averaged tensors under the encoder's own names, or nothing if `kept` has none."""
    prefix = f"{PREFIX}{_ENCODER}"
    return {name.removeprefix(PREFIX): tensor for name, tensor in kept.items() if name.startswith(prefix)}


def _averaged_names(bound: BoundMethod) -> list[str]:
    return [each.name for each in bound.plan.broadcast if each.name.startswith(_ENCODER) and each.reduce != "keep"]
