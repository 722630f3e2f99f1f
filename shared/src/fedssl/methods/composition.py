"""Most methods are one objective on an encoder that is averaged: this composes them.

An `Objective` says which heads it trains and what its loss terms are; `ComposedClient` makes views, runs the online
network once, and deals the modules out between what is sent and what stays.
"""

import copy
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch
from torch import nn

from fedssl.aggregation import weighted_mean
from fedssl.artifacts.tensors import DTYPES, Tensors, in_name_order
from fedssl.data.augment import normalize, random_view, to_float
from fedssl.data.batches import epoch_batches
from fedssl.errors import MethodError
from fedssl.methods.api import (
    Batch,
    ClientData,
    ClientState,
    Context,
    Losses,
    Metrics,
    Schedule,
    ServerState,
    Update,
)
from fedssl.models import build_encoder, build_mlp, initialised
from fedssl.protocol.plan import ArtifactPlan, TensorSpec
from fedssl.protocol.runs import RunSpec

ENCODER, PROJECTOR, PREDICTOR = "encoder", "projector", "predictor"

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True, slots=True)
class Online:
    """The online network's outputs, one entry a view: `h` (B, H) of the encoder, `z` (B, D) of the projector."""

    h: tuple[torch.Tensor, ...]
    z: tuple[torch.Tensor, ...]


class Objective:
    """One self-supervised (or supervised) loss, with the modules that it needs beside the encoder."""

    shared: ClassVar[tuple[str, ...]] = (PROJECTOR,)
    """Heads that are sent and averaged, beside the encoder."""

    kept: ClassVar[tuple[str, ...]] = ()
    """Modules that stay with the client from round to round."""

    num_views: ClassVar[int] = 2

    joint_forward: ClassVar[bool] = True
    """Whether the views pass the network as one batch, and so share BatchNorm statistics."""

    def heads(self, modules: nn.ModuleDict, ctx: Context) -> dict[str, nn.Module]:
        """Further modules. `modules` already holds the encoder and, where the model has one, the projector."""
        return {}

    def start_cold(self, modules: nn.ModuleDict, ctx: Context) -> None:
        """Give the kept modules a first value, after the broadcast has been merged."""

    def terms(self, online: Online, modules: nn.ModuleDict, batch: Batch, ctx: Context) -> Losses:
        """The weighted loss terms of one batch."""
        raise NotImplementedError

    def after_step(self, modules: nn.ModuleDict, ctx: Context) -> None:
        """What follows an optimiser step."""


@dataclass(frozen=True, slots=True)
class ComposedClient:
    """A client that trains one objective and sends the modules that it shares."""

    objective_of: Objective

    def build(self, ctx: Context) -> nn.ModuleDict:
        return initialised(lambda: self._modules(ctx), Context(spec=ctx.spec, round_number=0).seed("model"))

    def _modules(self, ctx: Context) -> nn.ModuleDict:
        model = ctx.spec.model
        encoder = build_encoder(model.encoder, ctx.spec.data.channels)
        modules = nn.ModuleDict({ENCODER: encoder})
        if PROJECTOR in self.objective_of.shared and model.projector is not None:
            modules[PROJECTOR] = build_mlp(model.projector, encoder.feature_dim)
        modules.update(self.objective_of.heads(modules, ctx))
        return modules

    def schedule(self, num_images: int, ctx: Context) -> Schedule:
        training, optimizer = ctx.spec.training, ctx.spec.training.optimizer
        progress = (ctx.round_number - 1) / ctx.spec.num_rounds
        factor = (1 + math.cos(math.pi * progress)) / 2 if optimizer.schedule == "cosine" else 1.0
        batches = epoch_batches(num_images, training.batch_size, ctx.generator("schedule"), training.drop_last)
        return Schedule(
            num_epochs=training.local_epochs,
            steps_per_epoch=len(batches),
            learning_rate=optimizer.learning_rate * factor,
        )

    def merge(self, modules: nn.ModuleDict, broadcast: Tensors, state: ClientState | None, ctx: Context) -> None:
        load_modules(modules, self._sent(modules), broadcast, "broadcast")
        if state is None:
            self.objective_of.start_cold(modules, ctx)
        else:
            load_modules(modules, self.objective_of.kept, state, "client state")

    def batches(self, data: ClientData, epoch: int, ctx: Context) -> Iterator[Batch]:
        training, num_views = ctx.spec.training, self.objective_of.num_views
        # Batches are drawn on the CPU, so that every device sees the images in one order.
        order = torch.Generator().manual_seed(ctx.seed(f"batches/{epoch}"))
        views = ctx.generator(f"views/{epoch}")
        for indices in epoch_batches(len(data), training.batch_size, order, training.drop_last):
            indices = indices.to(data.images.device)
            images = to_float(data.images[indices])
            both = random_view(images.repeat(num_views, 1, 1, 1), ctx.spec.data.augmentation, views)
            yield Batch(
                views=normalize(both, ctx.spec.data).chunk(num_views),
                indices=indices,
                labels=None if data.labels is None else data.labels[indices],
                extra={},
            )

    def objective(self, modules: nn.ModuleDict, batch: Batch, broadcast: Tensors, ctx: Context) -> Losses:
        online = run_online(modules, batch.views, joint=self.objective_of.joint_forward)
        return self.objective_of.terms(online, modules, batch, ctx)

    def after_step(self, modules: nn.ModuleDict, ctx: Context) -> None:
        self.objective_of.after_step(modules, ctx)

    def finish(
        self, modules: nn.ModuleDict, data: ClientData, broadcast: Tensors, state: ClientState | None, ctx: Context
    ) -> tuple[Tensors, ClientState]:
        return tensors_of(modules, self._sent(modules)), tensors_of(modules, self.objective_of.kept)

    def _sent(self, modules: nn.ModuleDict) -> tuple[str, ...]:
        return (ENCODER, *(name for name in self.objective_of.shared if name in modules))

    def plan(self, spec: RunSpec) -> ArtifactPlan:
        """The sent modules' tensors, down and up, from a build on the meta device that computes nothing."""
        with torch.device("meta"):
            modules = self._modules(Context(spec=spec, round_number=0))
        sent = self._sent(modules)
        tensors = tuple(
            TensorSpec(
                name=f"{module}.{name}",
                dtype=DTYPES[tensor.dtype],
                shape=tuple(tensor.shape),
                reduce="mean" if tensor.is_floating_point() else "integral_mean",
            )
            for module in sorted(sent)
            for name, tensor in sorted(modules[module].state_dict().items())
        )
        return ArtifactPlan(broadcast=tensors, update=tensors)


@dataclass(frozen=True, slots=True)
class FedAvgServer:
    """The mean of the updates, weighted by their number of examples, is the next broadcast (McMahan et al. 2017)."""

    client: ComposedClient

    def initial_state(self, modules: nn.ModuleDict, ctx: Context) -> ServerState:
        return tensors_of(modules, self.client._sent(modules))

    def broadcast(self, state: ServerState, ctx: Context) -> Tensors:
        return state

    def aggregate(self, state: ServerState, updates: Sequence[Update], ctx: Context) -> tuple[ServerState, Metrics]:
        weights = [update.num_examples for update in updates]
        return weighted_mean((update.load() for update in updates), weights), {}


def run_online(modules: nn.ModuleDict, views: tuple[torch.Tensor, ...], *, joint: bool) -> Online:
    """Encoder and projector on every view; without a projector z is h."""
    if joint:
        h_all = modules[ENCODER](torch.cat(views))
        z_all = modules[PROJECTOR](h_all) if PROJECTOR in modules else h_all
        return Online(h=h_all.chunk(len(views)), z=z_all.chunk(len(views)))
    h = tuple(modules[ENCODER](view) for view in views)
    return Online(h=h, z=tuple(modules[PROJECTOR](x) for x in h) if PROJECTOR in modules else h)


def encoder_width(modules: nn.ModuleDict) -> int:
    """H, the width of the encoder's representation."""
    width = modules[ENCODER].feature_dim
    assert isinstance(width, int)
    return width


def tensors_of(modules: nn.ModuleDict, names: Iterable[str]) -> Tensors:
    """Parameters and buffers of the named modules, as `module.tensor`, in name order."""
    found = {f"{name}.{key}": value for name in names for key, value in modules[name].state_dict().items()}
    return in_name_order(found)


def load_modules(modules: nn.ModuleDict, names: Iterable[str], tensors: Tensors, what: str) -> None:
    """Overwrite the named modules. Raises MethodError where `tensors` are not theirs."""
    for name in names:
        own = {key.removeprefix(f"{name}."): value for key, value in tensors.items() if key.startswith(f"{name}.")}
        try:
            modules[name].load_state_dict(own)
        except RuntimeError as error:
            raise MethodError(f"the {what} does not fit the module {name!r}: {error}") from error


def copy_of(module: M) -> M:
    """A frozen deep copy, for target networks and teachers."""
    twin = copy.deepcopy(module)
    twin.requires_grad_(requires_grad=False)
    return twin


@torch.no_grad()
def move_towards(target: nn.Module, online: nn.Module, momentum: float) -> None:
    """target = momentum * target + (1 - momentum) * online, parameters only (BatchNorm's buffers are its own)."""
    for slow, fast in zip(target.parameters(), online.parameters(), strict=True):
        slow.lerp_(fast, 1 - momentum)
