"""FedU2's flexible uniform regulariser (FUR) as an add-on: embeddings spread evenly over the sphere.

Liao et al. 2024, Rethinking the Representation in Federated Unsupervised Learning with Non-IID Data. Adds
0.01 (FUR(z1) + FUR(z2)), with 0.01 `weight` and

    FUR(Z) = 1/6 sum_{j=1..B} mean_{p<=6,i} ( sort_i <Log_tj(S), w_p> - sort_i <Log_tj(Z), w_p> )^2

for points S and t_j uniform on the sphere and directions w_p ~ N(0, I), drawn in every step; the two sixes are
`divisor` and `num_projections`.

Deviation: the paper describes an unbalanced transport to a spherical Gaussian; this is the distance of its code.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from fedssl.artifacts.tensors import Tensors
from fedssl.losses import flexible_uniform_regularizer
from fedssl.methods.api import Batch, ClientData, Context, Terms
from fedssl.methods.composition.part import Online, Part
from fedssl.protocol.methods.add_ons import FURConfig

_SAMPLER = "fur_sampler"


class _Sampler(nn.Module):
    """The round's source of randomness, which advances from step to step."""

    generator: torch.Generator | None = None

    def start(self, seed: int, device: torch.device) -> None:
        """Begin a round. The generator object stays the same, because captured steps draw from it."""
        if self.generator is None:
            self.generator = torch.Generator(device)
        self.generator.manual_seed(seed)


@dataclass(frozen=True)
class FlexibleUniform(Part):
    """The distance from uniformly distributed embeddings, summed over the views."""

    config: FURConfig

    compiles: ClassVar[bool] = False  # the compiler does not support drawing from a generator

    def heads(self, modules: nn.ModuleDict, ctx: Context) -> dict[str, nn.Module]:
        return {_SAMPLER: _Sampler()}

    def begin(self, modules: nn.ModuleDict, broadcast: Tensors, data: ClientData, ctx: Context) -> None:
        _sampler(modules).start(ctx.seed("fur"), ctx.device)

    def terms(self, online: Online, modules: nn.ModuleDict, batch: Batch, ctx: Context) -> Terms:
        generator, config = _sampler(modules).generator, self.config
        assert generator is not None, "`begin` has set it"
        losses = [flexible_uniform_regularizer(z, generator, config.num_projections, config.divisor) for z in online.z]
        return {"fur": config.weight * torch.stack(losses).sum()}, {}


def _sampler(modules: nn.ModuleDict) -> _Sampler:
    sampler = modules[_SAMPLER]
    assert isinstance(sampler, _Sampler)
    return sampler
