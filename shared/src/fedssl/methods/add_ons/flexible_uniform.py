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
from fedssl.methods.composition.modules import module_of
from fedssl.methods.composition.part import Online, Part
from fedssl.methods.composition.sampler import Sampler, generator_of
from fedssl.protocol.methods.add_ons import FURConfig

_SAMPLER = "fur_sampler"


@dataclass(frozen=True)
class FlexibleUniform(Part):
    """The distance from uniformly distributed embeddings, summed over the views."""

    config: FURConfig

    compiles: ClassVar[bool] = False  # the compiler does not support drawing from a generator

    def heads(self, modules: nn.ModuleDict, ctx: Context) -> dict[str, nn.Module]:
        return {_SAMPLER: Sampler()}

    def begin(self, modules: nn.ModuleDict, broadcast: Tensors, data: ClientData, ctx: Context) -> None:
        module_of(modules, _SAMPLER, Sampler).start(ctx.seed("fur"), ctx.device)

    def terms(self, online: Online, modules: nn.ModuleDict, batch: Batch, ctx: Context) -> Terms:
        generator, config = generator_of(modules, _SAMPLER), self.config
        losses = [flexible_uniform_regularizer(z, generator, config.num_projections, config.divisor) for z in online.z]
        return {"fur": config.weight * torch.stack(losses).sum()}, {}
