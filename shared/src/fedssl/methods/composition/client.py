"""The client's half of a composed method."""

import math
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from fedssl.artifacts.tensors import Tensors, in_name_order
from fedssl.data.batches import num_batches, on_device
from fedssl.data.image_batches import MakeViews, each_view, local_views, take_each
from fedssl.errors import MethodError, SpecError
from fedssl.methods.api import Batch, ClientData, ClientState, Context, Metrics, Schedule, Terms
from fedssl.methods.composition.embedding import plain_batches
from fedssl.methods.composition.modules import (
    declare,
    learning_rate,
    load_modules,
    load_tensors,
    run_online,
    tensors_of,
)
from fedssl.methods.composition.part import ENCODER, PROJECTOR, Merge, Objective, Part, Wire
from fedssl.methods.composition.streams import ROTATED, draw_batches, draw_streams, turned
from fedssl.models import Encoder, add_adapters, build_encoder, build_mlp, freeze, frozen_tensors, initialised
from fedssl.models.batch_norm import norm_tensors, recalibrate
from fedssl.models.initialisation import on_meta_device
from fedssl.protocol.model import EncoderConfig
from fedssl.protocol.plan import ArtifactPlan
from fedssl.protocol.runs import RunSpec


@dataclass(frozen=True)
class ClientAlgorithm:
    """The client's side of a method: it trains one objective with its add-ons, and sends the modules that they share
    unless its merge rule sends nothing.

    It has no state of its own: everything that changes is in `modules`. One set of modules serves client after client:
    before each round, all parameters and buffers get their first values again. `merge` or `begin_epoch` must set
    whatever else changes in a module.

    `before_step`, `objective` and `after_step` are the step. A GPU captures it and replays the capture for later
    batches, rounds and clients. A step therefore never waits for a number (no `float(x)`, `if x > 0` or `x[mask]` on
    tensors), changes tensors in place, and finds what it needs of the broadcast in `modules`.
    """

    host: Objective
    merge_rule: Merge
    add_ons: tuple[Part, ...] = ()

    @property
    def parts(self) -> tuple[Part, ...]:
        """Objective first, merge rule after the add-ons: the order in which their modules are built."""
        return (self.host, *self.add_ons, self.merge_rule)

    @property
    def wires(self) -> tuple[Wire, ...]:
        """The facts about the parts that the coordinator needs."""
        return tuple(wire for part in self.parts if (wire := part.wire) is not None)

    @property
    def sends_modules(self) -> bool:
        """True if the shared modules are in the update."""
        return self.merge_rule.sends

    def keeps_modules(self, ctx: Context) -> bool:
        """Return whether this client keeps its shared modules from round to round."""
        return not self.merge_rule.sends

    def keeps_state(self, ctx: Context) -> bool:
        """Return whether this client keeps anything from round to round."""
        keeps_norms, keeps_errors = ctx.spec.model.batch_norm == "local", ctx.spec.upload.rounds
        return self.keeps_modules(ctx) or keeps_norms or keeps_errors or any(part.kept for part in self.parts)

    def encoder(self, ctx: Context) -> EncoderConfig:
        """Return the encoder that this client trains."""
        return ctx.spec.model.encoder

    @property
    def compiles(self) -> bool:
        """True if one compiled program of `objective` serves all clients and rounds."""
        return all(part.compiles for part in self.parts)

    def architecture(self, ctx: Context) -> Hashable:
        """Return what `build` depends on besides the spec: equal for clients with the same modules."""
        return self.encoder(ctx)

    def build(self, ctx: Context) -> nn.ModuleDict:
        """Return all modules, including the parts' buffers, initialised only from the run's seed."""
        return initialised(lambda: self.modules(ctx), Context(spec=ctx.spec, round_number=0).seed("model"))

    def modules(self, ctx: Context) -> nn.ModuleDict:
        """Return all modules with fresh weights, drawn from torch's default generator, on torch's default device."""
        model, encoder = ctx.spec.model, self.fresh_encoder(ctx)
        modules = nn.ModuleDict({ENCODER: encoder})
        if PROJECTOR in self.host.shared and model.projector is not None:
            modules[PROJECTOR] = build_mlp(model.projector, encoder.feature_dim)
        for part in sorted(self.parts, key=lambda part: part.built_last):
            for name, module in part.heads(modules, ctx).items():
                if name in modules:
                    raise MethodError(f"two parts of the method bring a module {name!r}")
                modules[name] = module
        return modules

    def fresh_encoder(self, ctx: Context) -> Encoder:
        """Return a new encoder, partly frozen and with adapters if the spec asks for it."""
        data, model = ctx.spec.data, ctx.spec.model
        encoder = build_encoder(self.encoder(ctx), data.channels, data.image_size)
        encoder.recomputes = ctx.spec.training.gradient_checkpointing
        if self.freezes(ctx):
            freeze(encoder, model.trainable or ())
        if model.lora is not None:
            add_adapters(encoder, model.lora)
        if model.batch_norm != "average" and not norm_tensors(encoder):
            raise SpecError(
                f'model.batch_norm = "{model.batch_norm}" would change nothing, because the encoder has no BatchNorm '
                "that is trained: leave it out"
            )
        return encoder

    def freezes(self, ctx: Context) -> bool:
        """Return whether parts of the encoder, or all of it, are not trained."""
        return ctx.spec.model.freezes

    def learning_rate_factors(self, ctx: Context) -> Mapping[str, float]:
        """Return the factor of the learning rate of each module whose rate differs."""
        return {}

    def trained(self, data: ClientData) -> ClientData:
        """Return the images that the client trains on. Their number is its weight in a mean."""
        return data

    def judge(self, modules: nn.ModuleDict, data: ClientData, ctx: Context) -> Metrics:
        """Return metrics of the model that was received, before it is trained."""
        return {}

    def schedule(self, num_images: int, ctx: Context) -> Schedule:
        """Return how many epochs and steps this client trains in this round, and at what learning rate."""
        training = ctx.spec.training
        schedule = Schedule(
            num_epochs=training.local_epochs,
            steps_per_epoch=training.num_steps(num_batches(num_images, training.batch_size, training.drop_last)),
            learning_rate=learning_rate(ctx),
        )
        for part in self.parts:
            schedule = part.schedule(schedule, num_images, ctx)
        return schedule

    def merge(
        self,
        modules: nn.ModuleDict,
        broadcast: Tensors,
        state: ClientState | None,
        data: ClientData,
        ctx: Context,
    ) -> None:
        """Receive the global model. `state` is None if the client starts cold.

        `modules` are in training mode and on the device.
        """
        if state is not None:
            load_modules(modules, self._kept(modules, ctx), state, "client state")
        self.receive(modules, broadcast, state, ctx)
        if state is not None:
            load_tensors(modules, self.own(modules, ctx), state, "client state")
        if ctx.spec.model.batch_norm == "recalibrate":
            recalibrate(modules[ENCODER], plain_batches(data, ctx))
        for part in self.parts if state is None else ():
            part.start_cold(modules, ctx)
        for part in self.parts:
            part.begin(modules, broadcast, data, ctx)

    def receive(self, modules: nn.ModuleDict, broadcast: Tensors, state: ClientState | None, ctx: Context) -> None:
        """Put the broadcast into the shared modules by the merge rule."""
        self.merge_rule.receive(modules, self.sent(modules), broadcast, state, ctx)

    def start_steps(self, modules: nn.ModuleDict, schedule: Schedule, ctx: Context) -> None:
        """Prepare what changes from step to step of the round."""
        for part in self.parts:
            part.start_steps(modules, schedule, ctx)

    def begin_epoch(self, modules: nn.ModuleDict, data: ClientData, epoch: int, ctx: Context) -> None:
        """Compute what an epoch needs from all of the client's images, such as a clustering."""
        for part in self.parts:
            part.begin_epoch(modules, data, epoch, ctx)

    def batches(self, data: ClientData, epoch: int, ctx: Context, make_views: MakeViews = each_view) -> Iterator[Batch]:
        """Yield one epoch's batches."""
        num_views = self.host.num_views
        # Batches are drawn on the CPU, so that every device sees the images in the same order.
        order = torch.Generator().manual_seed(ctx.seed(f"batches/{epoch}"))
        views = ctx.generator(f"views/{epoch}")
        draw = draw_streams(frozenset(stream for part in self.parts for stream in part.streams), data, epoch, ctx)
        batches = draw_batches(data, order, ctx)
        num_drawn = 0
        for number, own in enumerate(take_each(data.images, batches)):
            streams = draw(num_drawn, batches[number])
            num_drawn += len(own)
            parts = make_views([own] * num_views + [*streams.values()], ctx.spec.data, views)
            indices = on_device(batches[number], data.images.device)
            extra = dict(zip(streams, parts[num_views:], strict=True))
            if ROTATED in extra:
                extra[ROTATED] = turned(extra[ROTATED])
            labels = None if data.labels is None else data.labels[indices]
            local = local_views(own, ctx.spec.data, views)
            yield Batch(views=parts[:num_views], indices=indices, labels=labels, extra=extra, local_views=local)

    def before_step(self, modules: nn.ModuleDict, ctx: Context) -> None:
        """Apply what comes before a batch's forward pass."""
        for part in self.parts:
            part.before_step(modules, ctx)

    def objective(self, modules: nn.ModuleDict, batch: Batch, ctx: Context) -> Terms:
        """Return the loss terms of one batch, and further numbers to report."""
        online = self.host.online(modules, batch, ctx)
        if online is None:
            online = run_online(modules, batch, joint=self.host.is_joint())
        for part in self.parts:
            online = part.transform(online, modules, ctx)
        online = self.host.complete(online, modules, batch, ctx)
        weight = math.prod([part.objective_weight for part in self.parts])
        terms, measurements = self.host.terms(online, modules, batch, ctx) if weight else ({}, {})
        losses = terms if weight == 1 else {name: weight * term for name, term in terms.items()}
        for part in self.parts[1:]:
            more, measured = part.terms(online, modules, batch, ctx)
            losses.update(more)
            measurements.update(measured)
        return losses, measurements

    def step_constants(self, modules: nn.ModuleDict, ctx: Context) -> Hashable:
        """Return what steps depend on besides the spec and the values of the modules' tensors.

        A captured step is captured again when this changes.
        """
        return tuple(part.step_constants(modules, ctx) for part in self.parts)

    def after_step(self, modules: nn.ModuleDict, ctx: Context) -> None:
        """Apply what follows an optimiser step: corrections, a target network's moving average."""
        # Corrections of the online network come before the objective's moving averages of it.
        for part in (*self.add_ons, self.host, self.merge_rule):
            part.after_step(modules, ctx)

    def finish(
        self, modules: nn.ModuleDict, data: ClientData, schedule: Schedule, ctx: Context
    ) -> tuple[Tensors, ClientState]:
        """Return the update to send and the state to keep."""
        for part in self.parts:
            part.end(modules, data, schedule, ctx)
        update = self._module_update(modules, ctx) if self.sends_modules else {}
        for part in self.parts:
            update.update(part.extra_update(modules, data, ctx))
        kept, own = tensors_of(modules, self._kept(modules, ctx)), self.own(modules, ctx)
        if own:
            shared = tensors_of(modules, self.sent(modules))
            kept = in_name_order({**kept, **{name: shared[name] for name in own}})
        return update, kept

    def _module_update(self, modules: nn.ModuleDict, ctx: Context) -> Tensors:
        sources = {name: modules[self.merge_rule.source(name)] for name in self.sent(modules)}
        unsent = self.unsent(modules, ctx)
        return {
            f"{name}.{key}": value
            for name, module in sources.items()
            for key, value in module.state_dict().items()
            if f"{name}.{key}" not in unsent
        }

    def frozen(self, ctx: Context) -> frozenset[str]:
        """Return the names of the encoder's tensors that no client changes or sends. Clients receive them once."""
        if not self.freezes(ctx):
            return frozenset()
        with on_meta_device():
            encoder = self.fresh_encoder(ctx)
        return frozenset(f"{ENCODER}.{name}" for name in frozen_tensors(encoder))

    def own(self, modules: nn.ModuleDict, ctx: Context) -> frozenset[str]:
        """Return the names of the shared modules' tensors that each client keeps: BatchNorm's, or none."""
        if ctx.spec.model.batch_norm != "local":
            return frozenset()
        return frozenset(f"{name}.{key}" for name in self.sent(modules) for key in norm_tensors(modules[name]))

    def unsent(self, modules: nn.ModuleDict, ctx: Context) -> frozenset[str]:
        """Return the names of the shared modules' tensors that no client sends."""
        return self.frozen(ctx) | self.own(modules, ctx)

    def sent(self, modules: nn.ModuleDict) -> tuple[str, ...]:
        """Return the names of the shared modules: clients receive them, and send them back if `sends_modules`."""
        return (ENCODER, *(name for part in self.parts for name in part.shared if name in modules))

    def reduced(self, ctx: Context) -> frozenset[str]:
        """Return the names of the tensors that the reducer combines."""
        with on_meta_device():
            modules = self.modules(ctx)
        apart = {name for wire in self.wires for name in wire.combines}
        names = [name for name in self.sent(modules) if name not in apart]
        all_names = frozenset(f"{name}.{key}" for name in names for key in modules[name].state_dict())
        return all_names - self.unsent(modules, ctx)

    def _kept(self, modules: nn.ModuleDict, ctx: Context) -> tuple[str, ...]:
        kept = tuple(name for part in self.parts for name in part.kept if name in modules)
        return (*self.sent(modules), *kept) if self.keeps_modules(ctx) else kept

    def plan(self, spec: RunSpec) -> ArtifactPlan:
        """Return the tensors of the sent modules and those of the parts, from a build on the meta device."""
        ctx = Context(spec=spec, round_number=0)
        with on_meta_device():
            modules = self.modules(ctx)
        kinds = {name: kind for wire in self.wires for name, kind in wire.kinds.items()}
        weights = tuple(
            declare(f"{module}.{name}", tensor, kinds.get(module, "weights"))
            for module in sorted(self.sent(modules))
            for name, tensor in sorted(modules[module].state_dict().items())
        )
        frozen, own = self.frozen(ctx), self.own(modules, ctx)
        extra = [wire.plan(modules, ctx) for wire in self.wires]
        received = tuple(
            each.model_copy(update={"reduce": "keep"}) if each.name in own else each
            for each in weights
            if each.name not in frozen
        )
        sent = tuple(each for each in received if self.sends_modules and each.name not in own)
        if not self.merge_rule.sends and any(plan.update for plan in extra):
            raise MethodError("a merge rule that sends nothing cannot be combined with a part that must send tensors")
        return ArtifactPlan(
            broadcast=received + tuple(spec for plan in extra for spec in plan.broadcast),
            update=sent + tuple(spec for plan in extra for spec in plan.update),
            frozen=tuple(each.model_copy(update={"reduce": "keep"}) for each in weights if each.name in frozen),
        )
