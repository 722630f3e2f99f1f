"""Uploads as bfloat16 differences from the broadcast, with the rounding error kept at the client.

In each round a client sends q = bfloat16(x' - x + e), where x are the weights that it received, x' those that it has
trained and e is what earlier roundings have left out, 0 at first. It keeps e <- x' - x + e - q in its state, and the
coordinator takes x + q as the client's weights. Over the rounds, the sum of all q differs from that of the exact
differences by no more than the last e.

Reference: Karimireddy et al. 2019, Error Feedback Fixes SignSGD and other Gradient Compression Schemes, Algorithm 2,
whose compressor is here the rounding, applied to a round's difference in place of a step's gradient.
"""

from collections.abc import Mapping, Sequence

import torch

from fedssl.aggregation import is_batch_norm_buffer
from fedssl.artifacts.tensors import Tensors
from fedssl.errors import SpecError
from fedssl.protocol.plan import ArtifactPlan

_PREFIX = "upload_error."


def rounded_names(plan: ArtifactPlan) -> list[str]:
    """Return the names of the tensors that are rounded: weights in float32 that are received and sent.

    BatchNorm's statistics are not among them: a rounded difference could make a variance negative.
    """
    received = {(each.name, each.dtype, each.shape) for each in plan.broadcast}
    return [
        each.name
        for each in plan.update
        if each.kind == "weights"
        and each.dtype == "F32"
        and (each.name, each.dtype, each.shape) in received
        and not is_batch_norm_buffer(each.name)
    ]


def rounded_plan(plan: ArtifactPlan, method: str) -> ArtifactPlan:
    """Return the plan with rounded weights. Raises SpecError if the method sends none."""
    if not (names := set(rounded_names(plan))):
        raise SpecError(f"upload.dtype applies to weights that are sent, and {method} sends none: leave it out")
    update = tuple(each.model_copy(update={"dtype": "BF16"}) if each.name in names else each for each in plan.update)
    return plan.model_copy(update={"update": update})


def rounded_update(
    update: Tensors, received: Tensors, state: Mapping[str, torch.Tensor], names: Sequence[str]
) -> tuple[Tensors, Tensors]:
    """Return what a client sends, and the errors to keep in its state.

    `state`: the client's state of the round before; without errors in it, they are 0.
    """
    sent, errors = dict(update), {}
    for name in names:
        difference = update[name].detach().to("cpu") - received[name]
        if (error := state.get(f"{_PREFIX}{name}")) is not None:
            difference = difference + error
        sent[name] = difference.to(torch.bfloat16)
        errors[f"{_PREFIX}{name}"] = difference - sent[name].float()
    return sent, errors


def error_length(state: Mapping[str, torch.Tensor], modules: Sequence[str]) -> torch.Tensor:
    """Return || e ||_2 over these modules' errors in a client's state, as one vector; 0 if there are none."""
    starts = tuple(f"{_PREFIX}{name}." for name in modules)
    norms = [torch.linalg.vector_norm(error) for name, error in state.items() if name.startswith(starts)]
    length: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
    return length


def restored_update(
    update: Mapping[str, torch.Tensor], received: Mapping[str, torch.Tensor], names: Sequence[str]
) -> Tensors:
    """Return the weights of a client that has sent rounded differences from what it received."""
    return {**update, **{name: received[name] + update[name].float() for name in names}}
