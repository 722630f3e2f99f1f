"""Low-rank adapters of linear layers (LoRA, Hu et al. 2022)."""

import fnmatch
import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedssl.artifacts.tensors import Tensors
from fedssl.artifacts.weight_names import is_adapter
from fedssl.errors import SpecError
from fedssl.models.encoders import Encoder
from fedssl.protocol.model import LoRAConfig

_A, _B, _SCALE = "lora_a", "lora_b", "lora_scale"
_NAMES_SHOWN = 3


class LoRALinear(nn.Module):
    """A frozen linear layer with a trained low-rank change: y = W x + b + s B A x.

    A (r, in) starts like a linear layer's weights, and B (out, r) from 0, so that the layer at first computes what it
    did. s is the frozen number `lora_scale`, so that a file of weights is complete without its spec.

    Reference: LoRA (Hu et al. 2022), Section 4.1, and the authors' code for how A starts. Their dropout is left out.
    """

    def __init__(self, linear: nn.Linear, rank: int, scale: float) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.lora_a = nn.Parameter(torch.empty(rank, linear.in_features))
        self.lora_b = nn.Parameter(torch.zeros(linear.out_features, rank))
        self.lora_scale = nn.Parameter(torch.tensor(scale), requires_grad=False)
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) + self.lora_scale * F.linear(F.linear(x, self.lora_a), self.lora_b)


def add_adapters(encoder: nn.Module, config: LoRAConfig) -> None:
    """Replace the linear layers whose names match one of the config's patterns by layers with an adapter.

    Raises SpecError if a pattern matches no linear layer, or one whose adapter would have no effect, or the rank is
    above that of a layer.
    """
    layers = {name: module for name, module in encoder.named_modules() if isinstance(module, nn.Linear)}
    for pattern in config.layers:
        if not fnmatch.filter(layers, pattern):
            raise SpecError(
                f"model.lora.layers names {pattern}, which matches no linear layer of the encoder: it has, for "
                f"example, {', '.join(list(layers)[:_NAMES_SHOWN]) or 'none'}"
            )
    for name, layer in layers.items():
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in config.layers):
            continue
        if isinstance(encoder, Encoder) and name in encoder.bypassed:
            raise SpecError(
                f"model.lora.layers names {name}, whose weights the network uses without calling the layer: an adapter "
                "would never be trained; name other layers"
            )
        if config.rank > (largest := min(layer.in_features, layer.out_features)):
            raise SpecError(
                f"model.lora.rank is {config.rank}, and {name} maps {layer.in_features} numbers to "
                f"{layer.out_features}: no change of it has a rank above {largest}; lower model.lora.rank"
            )
        parent, _, leaf = name.rpartition(".")
        setattr(encoder.get_submodule(parent), leaf, LoRALinear(layer, config.rank, config.scale))


def merged(tensors: Mapping[str, Tensor]) -> Tensors:
    """Return the tensors with each adapter added to its layer's weights, W + s B A, and without the adapters.

    The sum is computed in float64 and rounded once. Raises SpecError if an adapter is incomplete or does not fit.
    """
    weights = {name: tensor for name, tensor in tensors.items() if not is_adapter(name)}
    for layer in sorted({name.rpartition(".")[0] for name in tensors if is_adapter(name)}):
        try:
            a, b, scale = (tensors[f"{layer}.{part}"].double() for part in (_A, _B, _SCALE))
            weight = weights[f"{layer}.weight"]
            weights[f"{layer}.weight"] = (weight.double() + scale * (b @ a)).to(weight.dtype)
        except (KeyError, RuntimeError) as error:
            raise SpecError(f"the adapter of {layer} is not complete, or does not fit it: {error}") from None
    return weights
