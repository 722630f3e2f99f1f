"""The coordinator's half of a composed method."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fedssl.artifacts.tensors import Tensors
from fedssl.methods.api import Context, Metrics, ServerState, Update
from fedssl.methods.composition.client import ClientAlgorithm
from fedssl.methods.composition.modules import tensors_of
from fedssl.models.initialisation import on_meta_device
from fedssl.protocol.plan import ArtifactPlan, Reduction, TensorSpec
from fedssl.protocol.runs import RunSpec


@dataclass(frozen=True, slots=True)
class Reducer:
    """How the coordinator combines the shared modules of the clients.

    `combine` returns the next global weights and metrics, from the updates (in client-id order) and the state.
    `declares` is what the artifact plan declares of every tensor that `combine` returns; None leaves a mean of each.
    `begin` adds the first updates of a round to `ctx.prefix_mean`, which `combine` continues. If `finish` is given,
    `combine` returns sums over the clients, from which, with the state, `finish` computes the weights and metrics.
    `weights` returns the weight of each update in the mean that `combine` returns in this round, or None if it does not
    return a weighted mean of the updates.
    """

    combine: Callable[[Sequence[Update], ServerState, Context], tuple[Tensors, Metrics]]
    declares: Reduction | None = "method"
    begin: Callable[[Sequence[Update], Context], None] | None = None
    finish: Callable[[Tensors, ServerState, Context], tuple[Tensors, Metrics]] | None = None
    weights: Callable[[Sequence[Update], Context], Sequence[float] | None] = lambda updates, ctx: None


@dataclass(frozen=True)
class ServerAlgorithm:
    """A method's coordinator in a run: one reducer for the shared modules, and each part's rule for its own tensors."""

    client: ClientAlgorithm
    reducer: Reducer
    spec: RunSpec

    @functools.cached_property
    def plan(self) -> ArtifactPlan:
        """The client's plan, with the reduction that the reducer applies to each tensor.

        It is found by a build on the meta device, which computes nothing.
        """
        plan, rule = self.client.plan(self.spec), self.reducer.declares
        if rule is None:
            return plan
        ctx = Context(spec=self.spec, round_number=0)
        with on_meta_device():
            own = self.client.own(self.client.modules(ctx), ctx)
        apart = () if rule == "keep" else tuple(f"{n}." for wire in self.client.wires for n in wire.combines)

        def ruled(tensors: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
            return tuple(
                tensor
                if tensor.name.startswith(apart) or tensor.name in own
                else tensor.model_copy(update={"reduce": rule})
                for tensor in tensors
            )

        return ArtifactPlan(broadcast=ruled(plan.broadcast), update=ruled(plan.update), frozen=plan.frozen)

    def initial_state(self, modules: nn.ModuleDict, ctx: Context) -> ServerState:
        """Return the state before the first round, from freshly built client modules."""
        state = tensors_of(modules, self.client.sent(modules))
        for wire in self.client.wires:
            state.update(wire.initial_state(modules, ctx))
        return state

    def broadcast(self, state: ServerState, ctx: Context) -> Tensors:
        """Return what every client of the round receives, besides the frozen tensors, which it has already."""
        frozen = {each.name for each in self.plan.frozen}
        return {name: tensor for name, tensor in state.items() if name not in frozen}

    def frozen(self, state: ServerState, ctx: Context) -> Tensors:
        """Return the encoder's tensors that never change, which a client receives once."""
        return {each.name: state[each.name] for each in self.plan.frozen}

    def aggregate(self, state: ServerState, updates: Sequence[Update], ctx: Context) -> tuple[ServerState, Metrics]:
        """Return the next state, from the updates in client-id order. Tensors that the plan keeps stay as they are."""
        found, metrics = self.aggregate_sums(state, updates, ctx)
        return self.finish(found, metrics, state, updates, ctx)

    def aggregate_sums(
        self, state: ServerState, updates: Sequence[Update], ctx: Context
    ) -> tuple[ServerState, Metrics]:
        """Return what sums over the clients yield: the weights and the parts' tensors, or what `finish` needs for them.

        It reads no tensor of the kinds in `MethodConfig.sent_apart`.
        """
        found, metrics = self.reducer.combine(self._reduced(updates), state, ctx)
        found = dict(found)
        for wire in self.client.wires:
            found.update(wire.aggregate(state, updates, ctx))
        return found, metrics

    def finish(
        self, found: ServerState, metrics: Metrics, state: ServerState, updates: Sequence[Update], ctx: Context
    ) -> tuple[ServerState, Metrics]:
        """Return the next state from what `aggregate_sums` returned, and from each client's tensors of the kinds in
        `MethodConfig.sent_apart`. It reads no other tensor of an update."""
        if self.reducer.finish is not None:
            found, metrics = self.reducer.finish(found, state, ctx)
        next_state = dict(found)
        for wire in self.client.wires:
            next_state.update(wire.aggregate_apart(state, updates, ctx))
        next_state |= {spec.name: state[spec.name] for spec in self.plan.received if spec.reduce == "keep"}
        return next_state, metrics

    def begin(self, updates: Sequence[Update], ctx: Context) -> None:
        """Add the first updates of a round, in client-id order, to `ctx.prefix_mean`, if the reducer can use it."""
        if self.reducer.begin is not None:
            self.reducer.begin(self._reduced(updates), ctx)

    def _reduced(self, updates: Sequence[Update]) -> list[Update]:
        return [dataclasses.replace(each, load=_LoadOnly(each.load, self._reduced_names)) for each in updates]

    @functools.cached_property
    def _reduced_names(self) -> frozenset[str]:
        return self.client.reduced(Context(spec=self.spec, round_number=0))

    @property
    def screens(self) -> bool:
        """Return whether a part must see each update before any is combined."""
        return any(wire.refusal is not None for wire in self.client.wires)

    def refusal(self, state: ServerState, update: Update, ctx: Context) -> str | None:
        """Return why a part cannot use this update, or None if all can."""
        reasons = (wire.refusal(state, update, ctx) for wire in self.client.wires if wire.refusal is not None)
        return next((why for why in reasons if why is not None), None)

    def restarted(self, state: ServerState) -> ServerState:
        """Return the state from which all clients start cold, because one of them has lost its own."""
        next_state = dict(state)
        for wire in self.client.wires:
            next_state.update(wire.restart(state))
        return next_state


@dataclass(frozen=True, slots=True)
class _LoadOnly:
    """Opens some tensors of an update. It equals another one that opens the same tensors of an equal update."""

    load: Callable[[], Mapping[str, torch.Tensor]]
    names: frozenset[str]

    def __call__(self) -> Mapping[str, torch.Tensor]:
        return _Selection(self.load(), self.names)


class _Selection(Mapping[str, torch.Tensor]):
    """Some of a mapping's tensors, each loaded when it is read."""

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
