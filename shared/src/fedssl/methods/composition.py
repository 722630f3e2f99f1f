"""Composes parts into a method's two halves.

`ComposedClient` makes views, runs the online network once, asks every part for its loss terms, and deals the modules
out between what is sent and what stays. `ComposedServer` reduces the sent modules by its reducer, and the parts' own
tensors by theirs.
"""

import copy
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn

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
from fedssl.methods.parts import ENCODER, PROJECTOR, Merge, Objective, Online, Part
from fedssl.models import build_encoder, build_mlp, initialised
from fedssl.protocol.plan import ArtifactPlan, TensorSpec
from fedssl.protocol.runs import RunSpec

REFERENCES = "references"

M = TypeVar("M", bound=nn.Module)


class Overwrite(Merge):
    """The broadcast replaces the client's weights, as in FedAvg."""

    def receive(
        self, modules: nn.ModuleDict, names: tuple[str, ...], broadcast: Tensors, *, cold: bool, ctx: Context
    ) -> None:
        load_modules(modules, names, broadcast, "broadcast")


OVERWRITE = Overwrite()


@dataclass(frozen=True, slots=True)
class ComposedClient:
    """A client that trains one objective with its add-ons and sends the modules that they share."""

    host: Objective
    add_ons: tuple[Part, ...] = ()
    merge_rule: Merge = OVERWRITE

    @property
    def parts(self) -> tuple[Part, ...]:
        """Objective first, merge rule last: the order in which their modules are built."""
        return (self.host, *self.add_ons, self.merge_rule)

    def build(self, ctx: Context) -> nn.ModuleDict:
        return initialised(lambda: self.modules(ctx), Context(spec=ctx.spec, round_number=0).seed("model"))

    def modules(self, ctx: Context) -> nn.ModuleDict:
        """All modules with fresh weights, from the generator and on the device of the moment."""
        model = ctx.spec.model
        encoder = build_encoder(model.encoder, ctx.spec.data.channels)
        modules = nn.ModuleDict({ENCODER: encoder})
        if PROJECTOR in self.host.shared and model.projector is not None:
            modules[PROJECTOR] = build_mlp(model.projector, encoder.feature_dim)
        for part in self.parts:
            for name, module in part.heads(modules, ctx).items():
                if name in modules:
                    raise MethodError(f"two parts of the method bring a module {name!r}")
                modules[name] = module
        return modules

    def schedule(self, num_images: int, ctx: Context) -> Schedule:
        training = ctx.spec.training
        batches = epoch_batches(num_images, training.batch_size, torch.Generator(), training.drop_last)
        return Schedule(
            num_epochs=training.local_epochs, steps_per_epoch=len(batches), learning_rate=learning_rate(ctx)
        )

    def merge(
        self,
        modules: nn.ModuleDict,
        broadcast: Tensors,
        state: ClientState | None,
        data: ClientData,
        ctx: Context,
    ) -> None:
        if state is not None:
            load_modules(modules, self._kept(), state, "client state")
        self.merge_rule.receive(modules, self.sent(modules), broadcast, cold=state is None, ctx=ctx)
        for part in self.parts if state is None else ():
            part.start_cold(modules, ctx)
        for part in self.parts:
            part.begin(modules, broadcast, data, ctx)

    def batches(self, data: ClientData, epoch: int, ctx: Context) -> Iterator[Batch]:
        training, num_views = ctx.spec.training, self.host.num_views
        # Batches are drawn on the CPU, so that every device sees the images in one order.
        order = torch.Generator().manual_seed(ctx.seed(f"batches/{epoch}"))
        others = torch.Generator().manual_seed(ctx.seed(f"references/{epoch}"))
        views = ctx.generator(f"views/{epoch}")
        anchors = epoch_batches(len(data), training.batch_size, order, training.drop_last)
        wants_references = any(REFERENCES in part.streams for part in self.parts)
        pool = torch.randperm(len(data), generator=others) if wants_references else None
        for number, indices in enumerate(anchors):
            streams = [indices] * num_views
            if pool is not None:
                # A second, independently shuffled pass over the same images.
                streams.append(pool.roll(-number * training.batch_size)[: len(indices)])
            chosen = torch.cat(streams).to(data.images.device)
            augmented = random_view(to_float(data.images[chosen]), ctx.spec.data.augmentation, views)
            parts = normalize(augmented, ctx.spec.data).chunk(len(streams))
            indices = indices.to(data.images.device)
            yield Batch(
                views=parts[:num_views],
                indices=indices,
                labels=None if data.labels is None else data.labels[indices],
                extra={} if pool is None else {REFERENCES: parts[num_views]},
            )

    def objective(self, modules: nn.ModuleDict, batch: Batch, broadcast: Tensors, ctx: Context) -> Losses:
        online = run_online(modules, batch, joint=self.host.joint_forward)
        for part in self.parts:
            online = part.transform(online, modules, ctx)
        losses: Losses = {}
        for part in self.parts:
            losses.update(part.terms(online, modules, batch, ctx))
        return losses

    def after_step(self, modules: nn.ModuleDict, ctx: Context) -> None:
        for part in self.parts:
            part.after_step(modules, ctx)

    def finish(
        self, modules: nn.ModuleDict, data: ClientData, broadcast: Tensors, state: ClientState | None, ctx: Context
    ) -> tuple[Tensors, ClientState]:
        schedule = self.schedule(len(data), ctx)
        for part in self.parts:
            part.end(modules, data, schedule, ctx)
        update = tensors_of(modules, self.sent(modules))
        for part in self.parts:
            update.update(part.extra_update(modules, data, ctx))
        return update, tensors_of(modules, self._kept())

    def sent(self, modules: nn.ModuleDict) -> tuple[str, ...]:
        """The names of the modules that travel."""
        return (ENCODER, *(name for part in self.parts for name in part.shared if name in modules))

    def module_tensors(self, ctx: Context) -> frozenset[str]:
        """The names of the sent modules' tensors: what the reducer combines."""
        with torch.device("meta"):
            modules = self.modules(ctx)
        return frozenset(f"{name}.{key}" for name in self.sent(modules) for key in modules[name].state_dict())

    def _kept(self) -> tuple[str, ...]:
        return tuple(name for part in self.parts for name in part.kept)

    def plan(self, spec: RunSpec) -> ArtifactPlan:
        """The sent modules' tensors and the parts' own, from a build on the meta device that computes nothing."""
        ctx = Context(spec=spec, round_number=0)
        with torch.device("meta"):
            modules = self.modules(ctx)
        weights = tuple(
            declare(f"{module}.{name}", tensor)
            for module in sorted(self.sent(modules))
            for name, tensor in sorted(modules[module].state_dict().items())
        )
        extra = [part.extra_plan(modules, ctx) for part in self.parts]
        return ArtifactPlan(
            broadcast=weights + tuple(spec for down, _ in extra for spec in down),
            update=weights + tuple(spec for _, up in extra for spec in up),
        )


Reducer = Callable[[Sequence[Update], ServerState, Context], tuple[Tensors, Metrics]]
"""The next global weights from the updates (client-id order) and the state; metrics for people beside them."""


@dataclass(frozen=True, slots=True)
class ComposedServer:
    """The coordinator's half: one reducer for the shared modules, and each part's own rule for its own tensors."""

    client: ComposedClient
    reduce: Reducer

    def initial_state(self, modules: nn.ModuleDict, ctx: Context) -> ServerState:
        state = tensors_of(modules, self.client.sent(modules))
        for part in self.client.parts:
            state.update(part.initial_server_state(modules, ctx))
        return state

    def broadcast(self, state: ServerState, ctx: Context) -> Tensors:
        return state

    def aggregate(self, state: ServerState, updates: Sequence[Update], ctx: Context) -> tuple[ServerState, Metrics]:
        names = self.client.module_tensors(ctx)
        weights, metrics = self.reduce([_only(update, names) for update in updates], state, ctx)
        next_state = dict(weights)
        for part in self.client.parts:
            next_state.update(part.aggregate(state, updates, ctx))
        return next_state, metrics


def _only(update: Update, names: frozenset[str]) -> Update:
    return dataclasses.replace(update, load=lambda: _Selection(update.load(), names))


class _Selection(Mapping[str, torch.Tensor]):
    """Some of a mapping's tensors, loaded no earlier than they are asked for."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], names: frozenset[str]) -> None:
        self._tensors = tensors
        self._names = names

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._names))

    def __len__(self) -> int:
        return len(self._names)


def declare(name: str, tensor: torch.Tensor) -> TensorSpec:
    """A weight's place in the plan: floats by weighted mean, integers by a mean that stays whole."""
    return TensorSpec(
        name=name,
        dtype=DTYPES[tensor.dtype],
        shape=tuple(tensor.shape),
        reduce="mean" if tensor.is_floating_point() else "integral_mean",
    )


def learning_rate(ctx: Context) -> float:
    """This round's learning rate: constant, or lr/2 (1 + cos(pi r/R)) with r counted from 0 (EasyFL)."""
    optimizer = ctx.spec.training.optimizer
    if optimizer.schedule == "constant":
        return optimizer.learning_rate
    return optimizer.learning_rate * (1 + math.cos(math.pi * (ctx.round_number - 1) / ctx.spec.num_rounds)) / 2


def run_online(modules: nn.ModuleDict, batch: Batch, *, joint: bool) -> Online:
    """Encoder and projector on every view and stream, once; `joint`: as one batch."""
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
    return Online(h=h[:num_views], z=z[:num_views], extra=extra)


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
