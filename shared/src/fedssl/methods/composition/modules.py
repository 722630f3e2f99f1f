"""Functions over modules that parts share: run, copy, load, and name and declare their tensors."""

import copy
from collections.abc import Iterable
from typing import TypeVar

import torch
from torch import nn

from fedssl.artifacts.tensors import DTYPES, Tensors, in_name_order
from fedssl.errors import MethodError
from fedssl.methods.api import Batch, Context
from fedssl.methods.composition.part import ENCODER, PROJECTOR, Online
from fedssl.models import Encoder
from fedssl.protocol.plan import Kind, TensorSpec

M = TypeVar("M", bound=nn.Module)


def module_of(modules: nn.ModuleDict, name: str, kind: type[M]) -> M:
    """Return the module of this name, which must be of this kind."""
    found = modules[name]
    assert isinstance(found, kind)
    return found


def declare(name: str, tensor: torch.Tensor, kind: Kind = "weights") -> TensorSpec:
    """Declare a weight in the plan: floats are combined by a weighted mean, integers by a rounded one."""
    return TensorSpec(
        name=name,
        dtype=DTYPES[tensor.dtype],
        shape=tuple(tensor.shape),
        kind=kind,
        reduce="mean" if tensor.is_floating_point() else "integral_mean",
    )


def learning_rate(ctx: Context) -> float:
    """Return the learning rate of this round's first step."""
    return ctx.spec.training.optimizer.learning_rate_at(ctx.round_number - 1, ctx.spec.num_rounds)


def run_online(modules: nn.ModuleDict, batch: Batch, *, joint: bool) -> Online:
    """Run encoder and projector once on every view and stream; as one batch if `joint`."""
    streams = (*batch.views, *batch.extra.values())
    if joint:
        h_all = modules[ENCODER](torch.cat(streams))
        z_all = modules[PROJECTOR](h_all) if PROJECTOR in modules else h_all
        h, z = h_all.chunk(len(streams)), z_all.chunk(len(streams))
    else:
        h = tuple(modules[ENCODER](x) for x in streams)
        z = tuple(modules[PROJECTOR](x) for x in h) if PROJECTOR in modules else h
    num_views = len(batch.views)
    extra = dict(zip(batch.extra, zip(h[num_views:], z[num_views:], strict=True), strict=True))
    return Online(h=h[:num_views], z=z[:num_views], extra=extra, projected=z[:num_views])


def embed_local(modules: nn.ModuleDict, batch: Batch) -> tuple[torch.Tensor, ...]:
    """Return encoder's and projector's z (B, D) of each local crop, from one pass of all crops; none if there are none.

    They are a batch of their own, because their size differs (DINO's code does the same).
    """
    if not batch.local_views:
        return ()
    h = modules[ENCODER](torch.cat(batch.local_views))
    z: torch.Tensor = modules[PROJECTOR](h) if PROJECTOR in modules else h
    return z.chunk(len(batch.local_views))


def encoder_width(modules: nn.ModuleDict) -> int:
    """Return H, the width of the encoder's representation."""
    width = modules[ENCODER].feature_dim
    assert isinstance(width, int)
    return width


def encoder_layers(modules: nn.ModuleDict) -> list[tuple[str, ...]]:
    """Return the prefixes of the parameters' names of each of the encoder's layers, beginning at the input."""
    return module_of(modules, ENCODER, Encoder).layer_prefixes()


def tensors_of(modules: nn.ModuleDict, names: Iterable[str]) -> Tensors:
    """Return the parameters and buffers of the named modules, as `module.tensor`, in name order."""
    found = {f"{name}.{key}": value for name in names for key, value in modules[name].state_dict().items()}
    return in_name_order(found)


def load_modules(modules: nn.ModuleDict, names: Iterable[str], tensors: Tensors, what: str) -> None:
    """Overwrite the named modules. Raises MethodError if `tensors` do not fit them."""
    for name in names:
        own = {key.removeprefix(f"{name}."): value for key, value in tensors.items() if key.startswith(f"{name}.")}
        try:
            modules[name].load_state_dict(own)
        except RuntimeError as error:
            raise MethodError(f"the {what} does not fit the module {name!r}: {error}") from error


@torch.no_grad()
def load_tensors(modules: nn.ModuleDict, names: Iterable[str], tensors: Tensors, what: str) -> None:
    """Overwrite the named tensors `module.tensor`. Raises MethodError if `tensors` lack one, or have another shape."""
    own = modules.state_dict()
    for name in sorted(names):
        if name not in tensors or tensors[name].shape != own[name].shape:
            raise MethodError(f"the {what} does not fit the modules: {name} is missing, or has another shape")
        own[name].copy_(tensors[name])


def copy_of(module: M) -> M:
    """Return a frozen deep copy, for target networks and teachers."""
    twin = copy.deepcopy(module)
    twin.requires_grad_(requires_grad=False)
    return twin
