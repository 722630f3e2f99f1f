"""SSD's separation of clients, soft (DSR) and hard (HSD), as add-ons.

Fang et al. 2025, Soft Separation and Distillation. S_k are the dimensions that belong to client k (`ctx.dimensions`,
disjoint, floor(D / K) of them), d_k is `alpha` on S_k and 1 elsewhere (Eq. 6), gamma is `gamma`.

DSR adds gamma times the mean over the views of a distance between z and a stopped copy stretched along S_k:

    paper      mean_i || z_i - sg(z_i d_k) ||^2                           (Eq. 7)
    reference  || n(Z) - n(sg(n(Z) Q diag(d_k) Q^T)) ||_F / B             (SSD's code)

The default is "reference", because the published numbers come from it. Q is a random orthonormal basis, one per run,
which every client makes from the run's seed. The gradient of "reference" is about 1/60 of the paper's: gamma = 1 is a
weak term with "reference" and may dominate with "paper". For Eq. 7, z is the unit vector, as in Eq. 3 to 5: with raw z,
the stretched copy would grow away from z.

HSD (Section 4.2, without public code) has two readings, by `variant`. "projection", the default: the losses see the
whole z, and gamma times the mean over the views of

    || n(Z) - n(sg(n(Z) Q diag(m_k) Q^T)) ||_F / B

is added, m_k the indicator of S_k: the limit of DSR's "reference" for a large alpha. SSD's code describes its basis as
(D, k), which would be a client's k columns of Q, and that term with it. "mask": every loss of z sees n(z m_k); only the
projector's distillation sees z as the projector returned it. The default is the one whose uniformity and alignment of z
are nearer to Figure 6b (docs/reproductions.md).

Deviations: SSD's code assigns subspaces by the position in the round's sample, so under partial participation a
client's subspace changes every round; here it belongs to the client, as in the paper's Algorithm 1. SSD's code scales
Q's columns by sqrt(alpha) and multiplies with the transpose, which is the same.
"""

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedssl.artifacts.tensors import Tensors
from fedssl.errors import MethodError
from fedssl.losses import dimension_scaled
from fedssl.methods.api import Batch, ClientData, Context, Terms
from fedssl.methods.composition.part import Online, Part
from fedssl.protocol.methods.add_ons import DSRConfig, HSDConfig
from fedssl.unit_vectors import unit

_DSR, _HSD = "dsr", "hsd"


class _Buffers(nn.Module):
    """Tensors that are used in one round, and neither kept nor sent."""

    def __init__(self, **buffers: Tensor) -> None:
        super().__init__()
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)


@dataclass(frozen=True)
class DimensionScaledRegularisation(Part):
    """Stretch embeddings along the client's own dimensions."""

    config: DSRConfig

    def heads(self, modules: nn.ModuleDict, ctx: Context) -> dict[str, nn.Module]:
        width = _width(ctx)
        rotation = {"rotation": torch.zeros(width, width)} if self.config.variant == "reference" else {}
        return {_DSR: _Buffers(scale=torch.ones(width), **rotation)}

    def begin(self, modules: nn.ModuleDict, broadcast: Tensors, data: ClientData, ctx: Context) -> None:
        own = modules[_DSR].get_buffer("scale")
        own.copy_(torch.where(own_dimensions(ctx), self.config.alpha, 1.0))
        if self.config.variant == "reference":
            modules[_DSR].get_buffer("rotation").copy_(_run_rotation(ctx))

    def terms(self, online: Online, modules: nn.ModuleDict, batch: Batch, ctx: Context) -> Terms:
        if self.config.variant == "reference":
            rotation, views = modules[_DSR].get_buffer("rotation"), online.z
        else:
            rotation, views = None, tuple(unit(z.float()) for z in online.z)
        scale = modules[_DSR].get_buffer("scale")
        losses = [dimension_scaled(z, scale, rotation, self.config.variant) for z in views]
        return {"dsr": self.config.gamma * torch.stack(losses).mean()}, {}


@dataclass(frozen=True)
class HardSeparation(Part):
    """Restrict the losses to the client's own dimensions, or pull embeddings into them."""

    config: HSDConfig

    def heads(self, modules: nn.ModuleDict, ctx: Context) -> dict[str, nn.Module]:
        width = _width(ctx)
        rotation = {"rotation": torch.zeros(width, width)} if self.config.variant == "projection" else {}
        return {_HSD: _Buffers(mask=torch.ones(width), **rotation)}

    def begin(self, modules: nn.ModuleDict, broadcast: Tensors, data: ClientData, ctx: Context) -> None:
        modules[_HSD].get_buffer("mask").copy_(own_dimensions(ctx))
        if self.config.variant == "projection":
            modules[_HSD].get_buffer("rotation").copy_(_run_rotation(ctx))

    def terms(self, online: Online, modules: nn.ModuleDict, batch: Batch, ctx: Context) -> Terms:
        if self.config.variant == "mask":
            return {}, {}
        mask, rotation = (modules[_HSD].get_buffer(name) for name in ("mask", "rotation"))
        losses = [dimension_scaled(z, mask, rotation) for z in online.z]
        return {"hsd": self.config.gamma * torch.stack(losses).mean()}, {}

    def transform(self, online: Online, modules: nn.ModuleDict, ctx: Context) -> Online:
        if self.config.variant == "projection":
            return online
        mask = modules[_HSD].get_buffer("mask")

        def masked(z: Tensor) -> Tensor:
            return unit(z.float() * mask)

        return dataclasses.replace(
            online,
            z=tuple(masked(z) for z in online.z),
            extra={name: (h, masked(z)) for name, (h, z) in online.extra.items()},
        )


@functools.lru_cache(maxsize=2)
def random_rotation(width: int, seed: int) -> Tensor:
    """Return Q: orthonormal, uniformly distributed, float64 (D, D), a function of the seed. Do not change it in
    place."""
    generator = torch.Generator().manual_seed(seed)
    gaussian = torch.randn(width, width, dtype=torch.float64, generator=generator)
    q, r = torch.linalg.qr(gaussian)
    # Q R is unique, and Q uniform, once the diagonal of R is positive (Mezzadri 2007).
    signs = 1.0 - 2.0 * (r.diagonal() < 0).double()
    return torch.mul(q, signs)


def _run_rotation(ctx: Context) -> Tensor:
    """Return the run's Q, the same at every client and in every round."""
    seed = dataclasses.replace(ctx, round_number=0, client_id="").seed("dsr-rotation")
    return random_rotation(_width(ctx), seed)


def own_dimensions(ctx: Context) -> Tensor:
    """Return which dimensions are the client's own: bool (D,)."""
    width = _width(ctx)
    if not ctx.dimensions:
        raise MethodError(f"{ctx.client_id or 'the client'} was assigned no dimensions of the embedding")
    if min(ctx.dimensions) < 0 or max(ctx.dimensions) >= width:
        raise MethodError(
            f"the assigned dimensions {_first_few(ctx.dimensions)} are not all within the embedding's {width}"
        )
    mask = torch.zeros(width, dtype=torch.bool)
    mask[list(ctx.dimensions)] = True
    return mask


def _width(ctx: Context) -> int:
    wanted = ctx.spec.method.dimensions_wanted(ctx.spec.model)
    assert wanted is not None, "the method's config declares that it divides dimensions"
    return wanted.width


def _first_few(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:5])) + (", ..." if len(numbers) > 5 else "")
