"""The parts that a composed method is made of: one objective, any add-ons, one merge rule.

All three are `Part`s: they may bring modules, say which of those are sent and which stay with the client, and hook into
the round. A part has no state of its own; whatever changes lives in its modules, whose tensors travel or are kept.

A round calls, in this order: `heads`, the merge rule's `receive`, `start_cold` (without client state), `begin`, for
every epoch `begin_epoch`, for every batch `transform`, the objective's `complete` and `terms` and after its step
`after_step`, and at last `end` and `extra_update`.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import nn

from fedssl.artifacts.tensors import Tensors
from fedssl.methods.api import Batch, ClientData, Context, Losses, Measurements, Schedule, Update
from fedssl.protocol.plan import ArtifactPlan, Kind

ENCODER, PROJECTOR, PREDICTOR = "encoder", "projector", "predictor"


@dataclass(frozen=True, slots=True)
class Online:
    """The online network's outputs. One entry a view: `h` (B, H) of the encoder, `z` (B, D) of the projector (without a
    projector z is h); `extra` holds (h, z) of the batch's further streams by name. `projected` is z as the projector
    gave it, whatever a part has made of `z` since. `predicted` (B, D) and `targets` (B, D): what the predictor makes of
    z and the target network of the views, where the objective computes them."""

    h: tuple[torch.Tensor, ...]
    z: tuple[torch.Tensor, ...]
    extra: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    projected: tuple[torch.Tensor, ...] = ()
    predicted: tuple[torch.Tensor, ...] = ()
    targets: tuple[torch.Tensor, ...] = ()


def _nothing_more(modules: nn.ModuleDict, ctx: Context) -> ArtifactPlan:
    return ArtifactPlan(broadcast=(), update=())


def _no_state(modules: nn.ModuleDict, ctx: Context) -> Tensors:
    return {}


def _nothing_combined(state: Tensors, updates: Sequence[Update], ctx: Context) -> Tensors:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """The coordinator's side of a part that sends tensors of its own."""

    plan: Callable[[nn.ModuleDict, Context], ArtifactPlan] = _nothing_more
    """The tensors that travel besides the shared modules, from the client's modules on the meta device."""

    initial_state: Callable[[nn.ModuleDict, Context], Tensors] = _no_state
    """The tensors that `plan` broadcasts, before the first round."""

    aggregate: Callable[[Tensors, Sequence[Update], Context], Tensors] = _nothing_combined
    """The next of those tensors and of the modules in `combines`, from the state and the updates."""

    kinds: Mapping[str, Kind] = field(default_factory=dict)
    """What a shared module's tensors are to the data owner, by the module's name, unless they are `weights`."""

    combines: tuple[str, ...] = ()
    """Shared modules that `aggregate` combines, by a weighted mean, in place of the reducer."""


class Part:
    """What objectives, add-ons and merge rules have in common. Everything here may be left as it is."""

    shared: ClassVar[tuple[str, ...]] = ()
    """Modules that are sent and averaged."""

    kept: ClassVar[tuple[str, ...]] = ()
    """Modules that stay with the client from round to round."""

    @property
    def streams(self) -> tuple[str, ...]:
        """Further image streams that a batch must bring, by the names of `composition/streams.py`."""
        return ()

    @property
    def objective_weight(self) -> float:
        """What this part multiplies the objective's own terms by; at 0 they are not computed."""
        return 1.0

    built_last: ClassVar[bool] = False
    """Whether `heads` looks at the modules of all other parts, and so comes after theirs."""

    compiles: ClassVar[bool] = True
    """Whether one compiled program of `transform`, `complete` and `terms` serves all clients and rounds: no size in
    them changes, and the compiler takes them in one piece. Otherwise a GPU compiles them only where the spec asks."""

    def heads(self, modules: nn.ModuleDict, ctx: Context) -> dict[str, nn.Module]:
        """New modules. `modules` holds those of the parts before: encoder, projector, the objective's heads.

        Called under the run's seed, and on the meta device for the plan: only build here.
        """
        return {}

    def start_cold(self, modules: nn.ModuleDict, ctx: Context) -> None:
        """Give the kept modules their first value, after the broadcast was received: the client is new to the run, or
        lost its disk."""

    def begin(self, modules: nn.ModuleDict, broadcast: Tensors, data: ClientData, ctx: Context) -> None:
        """Last preparations before training: teachers, reference weights."""

    def schedule(self, schedule: Schedule, num_images: int, ctx: Context) -> Schedule:
        """Change how much this client trains in this round."""
        return schedule

    def begin_epoch(self, modules: nn.ModuleDict, data: ClientData, epoch: int, ctx: Context) -> None:
        """Before an epoch's first batch: what is computed from all of the client's images."""

    def transform(self, online: Online, modules: nn.ModuleDict, ctx: Context) -> Online:
        """Change the online outputs before any term sees them."""
        return online

    def before_step(self, modules: nn.ModuleDict, ctx: Context) -> None:
        """Before each batch's forward pass: moving averages that the pass is to see."""

    def terms(self, online: Online, modules: nn.ModuleDict, batch: Batch, ctx: Context) -> tuple[Losses, Measurements]:
        """Return the weighted loss terms of one batch, and what else is reported of it. Updates no network."""
        return {}, {}

    def after_step(self, modules: nn.ModuleDict, ctx: Context) -> None:
        """What follows an optimiser step: moving averages, queues, corrections."""

    def step_constants(self, modules: nn.ModuleDict, ctx: Context) -> Hashable:
        """What `transform`, `complete`, `terms` and `after_step` depend on beside the spec and tensors of the modules:
        a size, a number out of `ctx`. A GPU records steps anew where it changes."""
        return None

    def end(self, modules: nn.ModuleDict, data: ClientData, schedule: Schedule, ctx: Context) -> None:
        """After training: bring the kept modules up to date."""

    def extra_update(self, modules: nn.ModuleDict, data: ClientData, ctx: Context) -> Tensors:
        """Return the tensors to send besides the shared modules, as `wire` declares them."""
        return {}

    @property
    def wire(self) -> Wire | None:
        """What the coordinator must know of this part; None if it only has shared modules that the reducer combines."""
        return None


class Objective(Part):
    """One self-supervised (or supervised) loss: the host of the add-ons."""

    shared: ClassVar[tuple[str, ...]] = (PROJECTOR,)

    num_views: ClassVar[int] = 2

    joint_forward: ClassVar[bool] = True
    """Whether the views pass the network as one batch, and so share BatchNorm statistics; what `is_joint` answers where
    the config has no say."""

    def is_joint(self) -> bool:
        """Whether the views pass the network as one batch in this run."""
        return self.joint_forward

    def complete(self, online: Online, modules: nn.ModuleDict, batch: Batch, ctx: Context) -> Online:
        """Add `predicted` and `targets`, after every `transform`: computed once, the terms of all parts use them."""
        return online


class Merge(Part):
    """What "receive the global model" means."""

    sends: ClassVar[bool] = True
    """Whether the shared modules are sent. If not, the client keeps them, the update is empty, and the broadcast holds
    the initial weights for a cold start."""

    def source(self, name: str) -> str:
        """The module whose tensors go up under the name of a shared one: itself, but for ablations."""
        return name

    def receive(
        self, modules: nn.ModuleDict, names: tuple[str, ...], broadcast: Tensors, *, cold: bool, ctx: Context
    ) -> None:
        """Put the broadcast into the named modules. Kept modules hold the client state already, unless `cold`."""
        raise NotImplementedError
