"""A client's update about public images: how similar its network finds each pair, in several packings.

    S_ij = <R_i, R_j>,   R_i = n(z_i), z_i the embedding of image i by the client's network, not augmented, in eval mode

Shi et al. 2021, FLESD, Eq. 4. With N images and embeddings of D numbers:

    factored-f32, factored-f16                 L (N, D) with L L^T = S, a function of S (`similarity_factor.py`)
    representations-f32, representations-f16   R itself, (N, D): the same S, and the axes of the client's network
    triangle-f16, triangle-i8                  S_ij for i < j row by row, (N (N - 1) / 2,); i8 is round(127 S_ij)

FLESD's code sends R (Section 6). Here L is the default: it is as large as R, and reveals no more to the coordinator
than S. The N x N matrix is never formed: only the entries of the requested rows are. Embeddings of different widths fit
one plan: a factor's columns beyond the rank are zero.
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
from fedssl.methods.composition.embedding import embed
from fedssl.methods.composition.part import ENCODER, PROJECTOR, Part, Wire
from fedssl.methods.reducers.similarity_factor import similarity_factor
from fedssl.protocol.methods.distillation import DistillationConfig, Form, Packing
from fedssl.protocol.plan import ArtifactPlan, Kind, TensorSpec
from fedssl.unit_vectors import directions

NAMES: dict[Form, str] = {"factored": "factor", "representations": "representations", "triangle": "similarities"}
"""The name of the tensor that leaves a client."""

_KINDS: dict[Form, Kind] = {
    "factored": "similarity",
    "representations": "representations",
    "triangle": "similarity",
}

_TYPES = {"f32": torch.float32, "f16": torch.float16, "i8": torch.int8}
_ROWS, _STEPS = 1024, 127


@dataclass(frozen=True)
class SimilarityUpload(Part):
    """The similarities that are sent in place of a client's weights."""

    config: DistillationConfig

    def extra_update(self, modules: nn.ModuleDict, data: ClientData, ctx: Context) -> Tensors:
        networks = [modules[name] for name in (ENCODER, PROJECTOR) if name in modules]
        z_ND = embed(networks, public_images(ctx).images, ctx)
        return {NAMES[self.config.form]: pack(z_ND, self.config.packing, self._width(modules, ctx))}

    @property
    def wire(self) -> Wire:
        return Wire(plan=self._plan)

    def _plan(self, modules: nn.ModuleDict, ctx: Context) -> ArtifactPlan:
        public, form = ctx.spec.public_data, self.config.form
        if public is None:
            raise MethodError("the spec names no public images")  # the spec's check refuses this earlier
        size = public.num_images
        pairs, rows = (size * (size - 1) // 2,), (size, self._width(modules, ctx))
        tensor = TensorSpec(
            name=NAMES[form],
            dtype=DTYPES[_dtype(self.config.packing)],
            shape=pairs if form == "triangle" else rows,
            kind=_KINDS[form],
            reduce="method",
        )
        return ArtifactPlan(broadcast=(), update=(tensor,))

    def _width(self, modules: nn.ModuleDict, ctx: Context) -> int:
        """Return D of the widest client: all clients send tensors of one shape."""
        model = ctx.spec.model
        if model.projector is not None and PROJECTOR in modules:
            return model.projector.out_dim
        return max(encoder.feature_dim for encoder in (model.encoder, *self.config.own_encoders.values()))


def public_images(ctx: Context) -> ClientData:
    """Return the images that all clients and the coordinator hold."""
    if ctx.public is None:
        raise MethodError("the public images were not loaded")
    return ctx.public


def pack(z_ND: Tensor, packing: Packing, width: int | None = None) -> Tensor:
    """Return the similarities of N embeddings, packed for the update. `width` is the factor's (None: D)."""
    dtype = _dtype(packing)
    if packing.startswith("factored"):
        return similarity_factor(z_ND, width).to(dtype).contiguous()
    unit_ND = directions(z_ND.float())
    if packing.startswith("representations"):
        return unit_ND.to(dtype)
    size = len(unit_ND)
    packed = torch.empty(size * (size - 1) // 2, dtype=dtype, device=z_ND.device)
    place = 0
    for start in range(0, size, _ROWS):
        for offset, row_N in enumerate(unit_ND[start : start + _ROWS] @ unit_ND.T):
            entries = row_N[start + offset + 1 :].clamp(-1, 1)
            packed[place : place + len(entries)] = (entries * _STEPS).round() if packing == "triangle-i8" else entries
            place += len(entries)
    return packed


def _dtype(packing: Packing) -> torch.dtype:
    return _TYPES[packing.split("-")[1]]


@dataclass(frozen=True, slots=True)
class Ensemble:
    """The clients' similarities of `num_images` images, as they arrived."""

    packed: Sequence[Tensor]
    packing: Packing
    num_images: int

    def rows(self, rows: Tensor, anchors: Tensor, temperature: float) -> Tensor:
        """Return p (R, A): the ensemble's distribution of the rows' images over the anchors (FLESD Eq. 5, 6 and 8)."""
        if not self.packing.startswith("triangle"):
            return ensemble_similarity(self.packed, rows, anchors, temperature)
        entries_KRA = torch.stack([self._entries(triangle, rows, anchors) for triangle in self.packed])
        return F.softmax((entries_KRA / temperature).logsumexp(dim=0), dim=1)

    def _entries(self, triangle: Tensor, rows: Tensor, anchors: Tensor) -> Tensor:
        first, second = torch.minimum(rows[:, None], anchors), torch.maximum(rows[:, None], anchors)
        place = first * self.num_images - first * (first + 1) // 2 + second - first - 1
        same = first == second
        values = triangle[place.masked_fill(same, 0)].float()
        cosines = values / _STEPS if triangle.dtype == torch.int8 else values
        # No cosine is larger than 1, but a number that was sent may be, and would outweigh the other clients'.
        return cosines.clamp(-1, 1).masked_fill(same, 1.0)
