"""What a client tells about public images: how similar each pair is to it, in the forms in which that may travel.

    S_ij = <R_i, R_j>,   R_i = n(z_i), z_i what the client's network makes of image i, not augmented, in eval mode

Shi et al. 2021, FLESD, Eq. 4. With N images and D numbers an embedding:

    factored-f32, factored-f16   R itself, (N, D): S is R R^T, and equal wherever R differs by a rotation
    triangle-f16, triangle-i8    S_ij for i < j row by row, (N (N - 1) / 2,); the latter as round(127 S_ij)

FLESD sends the factors (Section 6). The N x N matrix is formed nowhere: only the entries of the rows asked for are.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedssl.aggregation import ensemble_similarity
from fedssl.artifacts.tensors import DTYPES, Tensors
from fedssl.errors import MethodError
from fedssl.methods.api import ClientData, Context
from fedssl.methods.composition import encoder_width
from fedssl.methods.embedding import embed
from fedssl.methods.parts import ENCODER, PROJECTOR, Part
from fedssl.protocol.methods.distillation import DistillationConfig, Packing
from fedssl.protocol.plan import TensorSpec

NAMES: dict[Packing, str] = {
    "factored-f32": "representations",
    "factored-f16": "representations",
    "triangle-f16": "similarities",
    "triangle-i8": "similarities",
}
"""What the tensor that leaves a client is called."""

_TYPES: dict[Packing, torch.dtype] = {
    "factored-f32": torch.float32,
    "factored-f16": torch.float16,
    "triangle-f16": torch.float16,
    "triangle-i8": torch.int8,
}
_ROWS, _STEPS = 1024, 127


@dataclass(frozen=True)
class SimilarityUpload(Part):
    """Goes up in place of a client's weights."""

    config: DistillationConfig

    def extra_update(self, modules: nn.ModuleDict, data: ClientData, ctx: Context) -> Tensors:
        networks = [modules[name] for name in (ENCODER, PROJECTOR) if name in modules]
        z_ND = embed(networks, public_images(ctx).images, ctx)
        return {NAMES[self.config.packing]: pack(z_ND, self.config.packing)}

    def extra_plan(self, modules: nn.ModuleDict, ctx: Context) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
        public, projector = ctx.spec.public_data, ctx.spec.model.projector
        if public is None:
            raise MethodError("the spec names no public images")  # the spec's check refuses this earlier
        width = projector.out_dim if projector is not None and PROJECTOR in modules else encoder_width(modules)
        size = public.num_images
        factored = self.config.packing.startswith("factored")
        tensor = TensorSpec(
            name=NAMES[self.config.packing],
            dtype=DTYPES[_TYPES[self.config.packing]],
            shape=(size, width) if factored else (size * (size - 1) // 2,),
            kind="similarity",
            reduce="method",
        )
        return (), (tensor,)


def public_images(ctx: Context) -> ClientData:
    """The images that everybody holds."""
    if ctx.public is None:
        raise MethodError("the public images were not loaded")
    return ctx.public


def pack(z_ND: Tensor, packing: Packing) -> Tensor:
    """The similarities of N embeddings, ready to travel."""
    unit_ND = F.normalize(z_ND.float(), dim=1)
    if packing.startswith("factored"):
        return unit_ND.to(_TYPES[packing])
    size = len(unit_ND)
    packed = torch.empty(size * (size - 1) // 2, dtype=_TYPES[packing], device=z_ND.device)
    place = 0
    for start in range(0, size, _ROWS):
        for offset, row_N in enumerate(unit_ND[start : start + _ROWS] @ unit_ND.T):
            entries = row_N[start + offset + 1 :].clamp(-1, 1)
            packed[place : place + len(entries)] = (entries * _STEPS).round() if packing == "triangle-i8" else entries
            place += len(entries)
    return packed


@dataclass(frozen=True, slots=True)
class Ensemble:
    """The clients' similarities of `num_images` images, as they arrived."""

    packed: Sequence[Tensor]
    packing: Packing
    num_images: int

    def rows(self, rows: Tensor, anchors: Tensor, temperature: float) -> Tensor:
        """p (R, A): what the clients together find about the rows' images among the anchors (FLESD Eq. 5, 6 and 8)."""
        if self.packing.startswith("factored"):
            return ensemble_similarity(self.packed, rows, anchors, temperature)
        entries_KRA = torch.stack([self._entries(triangle, rows, anchors) for triangle in self.packed])
        return F.softmax((entries_KRA / temperature).logsumexp(dim=0), dim=1)

    def _entries(self, triangle: Tensor, rows: Tensor, anchors: Tensor) -> Tensor:
        first, second = torch.minimum(rows[:, None], anchors), torch.maximum(rows[:, None], anchors)
        place = first * self.num_images - first * (first + 1) // 2 + second - first - 1
        same = first == second
        values = triangle[place.masked_fill(same, 0)].float()
        return (values / _STEPS if triangle.dtype == torch.int8 else values).masked_fill(same, 1.0)
