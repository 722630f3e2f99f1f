"""Gradient checkpointing changes which activations are kept, but not a bit of the training."""

from collections.abc import Callable

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from fedssl.models import Encoder, build_encoder, initialised
from fedssl.models.convnext import ConvNeXt
from fedssl.protocol.model import EncoderConfig
from fedssl.protocol.training import TrainingConfig
from support.methods import method_spec, methods_of_this_run
from support.rounds import local_round, start

BUILDS: dict[str, Callable[[], Encoder]] = {
    "convnet": lambda: build_encoder(EncoderConfig(widths=(4, 8)), 1),
    "resnet18": lambda: build_encoder(EncoderConfig(name="resnet18"), 1),
    "convnext": lambda: ConvNeXt(1, (4, 8), (1, 2)),
    "vit-tiny": lambda: build_encoder(EncoderConfig(name="vit-tiny", patch_size=4), 1, 8),
}


def _trained(encoder: Encoder, *, recomputes: bool) -> tuple[dict[str, torch.Tensor], int]:
    """Return the gradients and buffers after two views have passed one after another, and the bytes kept for them."""
    encoder.recomputes, kept = recomputes, 0

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        kept += 0 if isinstance(tensor, nn.Parameter) else tensor.numel() * tensor.element_size()
        return tensor

    views = torch.rand(2, 6, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        (encoder(views[0]) * encoder(views[1])).sum().backward()
    found = {name: parameter.grad for name, parameter in encoder.named_parameters() if parameter.grad is not None}
    return {**found, **dict(encoder.named_buffers())}, kept


@pytest.mark.parametrize("name", BUILDS)
def test_checkpointing_keeps_the_bits_of_gradients_and_statistics_and_saves_memory(name: str) -> None:
    plain, kept = _trained(initialised(BUILDS[name], 1).train(), recomputes=False)
    found, fewer = _trained(initialised(BUILDS[name], 1).train(), recomputes=True)
    assert found.keys() == plain.keys()
    assert [key for key in plain if not torch.equal(plain[key], found[key])] == []
    assert fewer < kept / 2  # the rest is kept outside blocks


@pytest.mark.parametrize("name", methods_of_this_run(["fedbyol", "fedsimsiam", "scaffold", "fedmae", "fedu2"]))
def test_a_round_with_checkpointing_has_the_same_bits(name: str) -> None:
    spec = method_spec(name)
    again = spec.model_copy(
        update={"training": spec.training.model_copy(update={"gradient_checkpointing": True, "num_micro_batches": 1})}
    )
    first = start(spec)
    plain, found = (local_round(each, first.broadcast) for each in (spec, again))
    for one, other in ((plain.update, found.update), (plain.state, found.state)):
        assert one.keys() == other.keys()
        assert [key for key in one if not torch.equal(one[key], other[key])] == []
    assert plain.metrics == found.metrics


def test_gradient_checkpointing_is_omitted_from_older_specs_and_cannot_be_compiled() -> None:
    assert "gradient_checkpointing" not in TrainingConfig().model_dump()
    with pytest.raises(ValidationError, match="set gpu_steps to recorded or eager"):
        TrainingConfig(gradient_checkpointing=True, gpu_steps="compiled")
