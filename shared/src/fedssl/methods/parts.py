"""The parts that a composed method is made of: one objective, any add-ons, one merge rule.

All three are `Part`s: they may bring modules, say which of those are sent and which stay with the client, and hook into
the round. A part has no state of its own; whatever changes lives in its modules, whose tensors travel or are kept.

A round calls, in this order: `heads`, the merge rule's `receive`, `start_cold` (without client state), `begin`, then
for every batch `transform` and `terms` and after its step `after_step`, and at last `end` and `extra_update`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import nn

from fedssl.artifacts.tensors import Tensors
from fedssl.methods.api import Batch, ClientData, Context, Losses, Schedule, Update
from fedssl.protocol.plan import TensorSpec

ENCODER, PROJECTOR, PREDICTOR = "encoder", "projector", "predictor"


@dataclass(frozen=True, slots=True)
class Online:
    """The online network's outputs. One entry a view: `h` (B, H) of the encoder, `z` (B, D) of the projector (without a
    projector z is h); `extra` holds (h, z) of the batch's further streams by name."""

    h: tuple[torch.Tensor, ...]
    z: tuple[torch.Tensor, ...]
    extra: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)


class Part:
    """What objectives, add-ons and merge rules have in common. Everything here may be left as it is."""

    shared: ClassVar[tuple[str, ...]] = ()
    """Modules that are sent and averaged."""

    kept: ClassVar[tuple[str, ...]] = ()
    """Modules that stay with the client from round to round."""

    streams: ClassVar[tuple[str, ...]] = ()
    """Further image streams that a batch must bring; `references` is the one there is: as many other random images of
    the client, one view each."""

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

    def transform(self, online: Online, modules: nn.ModuleDict, ctx: Context) -> Online:
        """Change the online outputs before any term sees them."""
        return online

    def terms(self, online: Online, modules: nn.ModuleDict, batch: Batch, ctx: Context) -> Losses:
        """The weighted loss terms of one batch."""
        return {}

    def after_step(self, modules: nn.ModuleDict, ctx: Context) -> None:
        """What follows an optimiser step: moving averages, queues, corrections."""

    def end(self, modules: nn.ModuleDict, data: ClientData, schedule: Schedule, ctx: Context) -> None:
        """After training: bring the kept modules up to date."""

    def extra_update(self, modules: nn.ModuleDict, data: ClientData, ctx: Context) -> Tensors:
        """Tensors to send beside the shared modules, as declared by `extra_plan`."""
        return {}

    def extra_plan(self, modules: nn.ModuleDict, ctx: Context) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
        """Tensors beside the shared modules: (broadcast, update)."""
        return (), ()

    def initial_server_state(self, modules: nn.ModuleDict, ctx: Context) -> Tensors:
        """The coordinator's tensors that `extra_plan` broadcasts, before the first round."""
        return {}

    def aggregate(self, state: Tensors, updates: Sequence[Update], ctx: Context) -> Tensors:
        """The next of those, from the tensors of `extra_update`."""
        return {}


class Objective(Part):
    """One self-supervised (or supervised) loss: the host of the add-ons."""

    shared: ClassVar[tuple[str, ...]] = (PROJECTOR,)

    num_views: ClassVar[int] = 2

    joint_forward: ClassVar[bool] = True
    """Whether the views pass the network as one batch, and so share BatchNorm statistics."""


class Merge(Part):
    """What "receive the global model" means."""

    def receive(
        self, modules: nn.ModuleDict, names: tuple[str, ...], broadcast: Tensors, *, cold: bool, ctx: Context
    ) -> None:
        """Put the broadcast into the named modules. Kept modules hold the client state already, unless `cold`."""
        raise NotImplementedError
