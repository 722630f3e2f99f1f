"""The parts that a composed method is made of: one objective, any add-ons, one merge rule.

All three are `Part`s: they may build modules, declare which of them are sent and which stay with the client, and hook
into the round. A part has no state of its own: everything that changes is in its modules, whose tensors travel or are
kept.

A round calls, in this order: `heads`, the merge rule's `receive`, `start_cold` (without client state), `begin` and
`start_steps`; per epoch `begin_epoch`; per batch `before_step`, `transform`, the objective's `complete`, `terms` and,
after the optimiser's step, `after_step`; and last `end` and `extra_update`.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import nn

from fedssl.artifacts.tensors import Tensors
from fedssl.methods.api import Batch, ClientData, ClientState, Context, Schedule, Terms, Update
from fedssl.protocol.plan import ArtifactPlan, Kind

ENCODER, PROJECTOR, PREDICTOR = "encoder", "projector", "predictor"


class MaskedTokens(NamedTuple):
    """The encoder's outputs for the visible patches of each image.

    `tokens` (B, 1 + K, H): the class token and K visible patches. `restore` (B, N): the place of each patch if the
    visible ones come first. `mask` (B, N): 1 for hidden patches.
    """

    tokens: torch.Tensor
    restore: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class Online:
    """The online network's outputs, with one entry per view: `h` (B, H) of the encoder and `z` (B, D) of the projector
    (without a projector, z is h). `extra` holds (h, z) of the batch's further streams by name. `projected` is z as the
    projector returned it, before any part transformed it. `predicted` (B, D) and `targets` (B, D) are the predictor's
    outputs for z and the target network's for the views, if the objective computes them. `masked`: what an objective
    that hides patches has computed."""

    h: tuple[torch.Tensor, ...]
    z: tuple[torch.Tensor, ...]
    extra: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    projected: tuple[torch.Tensor, ...] = ()
    predicted: tuple[torch.Tensor, ...] = ()
    targets: tuple[torch.Tensor, ...] = ()
    masked: MaskedTokens | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """The coordinator's side of a part that sends tensors of its own."""

    plan: Callable[[nn.ModuleDict, Context], ArtifactPlan] = lambda modules, ctx: ArtifactPlan(broadcast=(), update=())
    """The tensors that travel besides the shared modules, from the client's modules on the meta device."""

    initial_state: Callable[[nn.ModuleDict, Context], Tensors] = lambda modules, ctx: {}
    """The tensors that `plan` broadcasts, before the first round."""

    aggregate: Callable[[Tensors, Sequence[Update], Context], Tensors] = lambda state, updates, ctx: {}
    """The next values of those tensors and of the modules in `combines`, from the state and the updates."""

    aggregate_apart: Callable[[Tensors, Sequence[Update], Context], Tensors] = lambda state, updates, ctx: {}
    """The next values of those tensors, computed from each client's own tensors of the kinds in
    `MethodConfig.sent_apart` only. In a secure round these leave without masks, next to the sum that `aggregate`
    receives."""

    refusal: Callable[[Tensors, Update, Context], str | None] | None = None
    """Returns why an update cannot be used, from the state and the update, or None if it can. If given, it is called
    for each update before any is combined."""

    restart: Callable[[Tensors], Tensors] = lambda state: {}
    """The tensors of the state that begin again after a client has lost its state, if the config `restarts_states`."""

    kinds: Mapping[str, Kind] = field(default_factory=dict)
    """The kind of a shared module's tensors, for the data owner's policy, by the module's name, unless it is
    `weights`."""

    combines: tuple[str, ...] = ()
    """Shared modules that `aggregate` combines, by a weighted mean, in place of the reducer."""


class Part:
    """The base of objectives, add-ons and merge rules. Each attribute and method has a default."""

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
        """The factor of the objective's own terms; if it is 0, they are not computed."""
        return 1.0

    built_last: ClassVar[bool] = False
    """True if `heads` reads the modules of all other parts, and is therefore called after theirs."""

    compiles: ClassVar[bool] = True
    """True if one compiled program of `transform`, `complete` and `terms` serves all clients and rounds: no size in
    them changes, and the compiler handles them in one piece. Otherwise they are compiled only if the spec asks for
    it."""

    def heads(self, modules: nn.ModuleDict, ctx: Context) -> dict[str, nn.Module]:
        """Return new modules. `modules` holds those of the parts before: encoder, projector, the objective's heads.

        Called under the run's seed, and on the meta device for the plan: only build modules here.
        """
        return {}

    def load_start(self, modules: nn.ModuleDict, tensors: Tensors, ctx: Context) -> str:
        """Load first values of the part's own modules from the weights of `model.initial`, on the coordinator.

        Returns what was loaded, for people: empty if nothing was. Raises SpecError if the tensors do not fit.
        """
        return ""

    def start_cold(self, modules: nn.ModuleDict, ctx: Context) -> None:
        """Set the first values of the kept modules, after the broadcast was received, if the client has no state: it is
        new to the run, or lost its disk."""

    def begin(self, modules: nn.ModuleDict, broadcast: Tensors, data: ClientData, ctx: Context) -> None:
        """Prepare what training needs, such as teachers and reference weights."""

    def schedule(self, schedule: Schedule, num_images: int, ctx: Context) -> Schedule:
        """Return how much this client trains in this round, according to the spec."""
        return schedule

    def start_steps(self, modules: nn.ModuleDict, schedule: Schedule, ctx: Context) -> None:
        """Prepare what changes from step to step, before the round's first epoch."""

    def begin_epoch(self, modules: nn.ModuleDict, data: ClientData, epoch: int, ctx: Context) -> None:
        """Compute what an epoch needs from all of the client's images, before its first batch."""

    def transform(self, online: Online, modules: nn.ModuleDict, ctx: Context) -> Online:
        """Return the online outputs in the form that all terms will see."""
        return online

    def before_step(self, modules: nn.ModuleDict, ctx: Context) -> None:
        """Update networks before each batch's forward pass: moving averages that the pass will use."""

    def terms(self, online: Online, modules: nn.ModuleDict, batch: Batch, ctx: Context) -> Terms:
        """Return the weighted loss terms of one batch, and further numbers to report. Updates no network."""
        return {}, {}

    def after_step(self, modules: nn.ModuleDict, ctx: Context) -> None:
        """Apply what follows an optimiser step: moving averages, corrections."""

    def step_constants(self, modules: nn.ModuleDict, ctx: Context) -> Hashable:
        """Return what a step depends on besides the spec and the tensors of the modules, such as a size or a number
        from `ctx`. A captured step is captured again when this changes."""
        return None

    def end(self, modules: nn.ModuleDict, data: ClientData, schedule: Schedule, ctx: Context) -> None:
        """Update the kept modules after training."""

    def extra_update(self, modules: nn.ModuleDict, data: ClientData, ctx: Context) -> Tensors:
        """Return the tensors to send besides the shared modules, as `wire` declares them."""
        return {}

    @property
    def wire(self) -> Wire | None:
        """The coordinator's side of this part; None if it has only shared modules that the reducer combines."""
        return None


class Objective(Part):
    """One self-supervised (or supervised) loss, onto which add-ons go."""

    shared: ClassVar[tuple[str, ...]] = (PROJECTOR,)

    num_views: ClassVar[int] = 2

    joint_forward: ClassVar[bool] = True
    """True if the views pass the network as one batch, and so share BatchNorm statistics. `is_joint` returns it unless
    the config decides."""

    def is_joint(self) -> bool:
        """Return whether the views pass the network as one batch in this run."""
        return self.joint_forward

    def online(self, modules: nn.ModuleDict, batch: Batch, ctx: Context) -> Online | None:
        """Return the network's outputs for a batch if the objective does not run encoder and projector on whole views,
        or None if it does."""
        return None

    def complete(self, online: Online, modules: nn.ModuleDict, batch: Batch, ctx: Context) -> Online:
        """Return the outputs with `predicted` and `targets`, after every `transform`. The terms of all parts use
        them."""
        return online


class Merge(Part):
    """A client's treatment of the global model that it receives."""

    sends: ClassVar[bool] = True
    """True if the shared modules are sent. If not, the client keeps them, the update is empty, and the broadcast holds
    the initial weights for a cold start."""

    def source(self, name: str) -> str:
        """Return the module whose tensors are sent under the name of a shared one: itself, except in ablations."""
        return name

    def receive(
        self,
        modules: nn.ModuleDict,
        names: tuple[str, ...],
        broadcast: Tensors,
        state: ClientState | None,
        ctx: Context,
    ) -> None:
        """Put the broadcast into the named modules. Kept modules hold the client's `state` already,
        which is None if the client starts cold."""
        raise NotImplementedError
