"""SCAFFOLD as an add-on: control variates take the drift of the client's own images out of its steps.

Karimireddy et al. 2020, SCAFFOLD, Algorithm 1 with option II, over every parameter that is trained:

    after each SGD step                          w   <- w - lr (c - c_k)              (its line 10)
    after the round                              c_k' = c_k - c + (x - w) / (S s)     (line 12, II)
    the client sends c_k' - c_k; the coordinator c   <- c + |S|/N mean_k (c_k' - c_k) (line 17)

x are the weights that local training started from, S the number of its steps, lr the round's learning rate, and s the
assumed length of a step per unit of gradient (`step_size`). c and every c_k start from 0; c_k stays with the client, c
and the differences travel as tensors of the kind "control". |S| is the number of updates that are used, and N that of
the clients that the spec names, by `cohort.clients` or `partition`. If the spec names none, |S|/N is `cohort.fraction`.
A client whose update is rejected keeps its c_k, so c stays the mean of the c_k. BatchNorm's statistics are not
parameters and have no variates.

Momentum: SGD with momentum m moves by lr / (1 - m) per gradient in the long run, while the correction moves by lr. With
g_k the client's mean gradient, `step_size` "momentum" (s = lr / (1 - m), the default) gives c_k' = g_k + m (c_k - c):
at first a gradient, and c_k - c grows to (g_k - c) / (1 - m) over about 1 / (1 - m) rounds, where the correction
cancels the drift. "plain" (s = lr, NIID-Bench) gives c_k' = g_k / (1 - m) at once: 10 times a gradient at 0.9, with the
noise of one round. Both settle at the same correction; without momentum they are the same.

Cold start: c_k = 0. If a client has lost its c_k, its share of c must leave c, but the coordinator has never had c_k:
only differences were sent, and it keeps only their mean. So when a round closes with an update that the client trained
without its c_k, c becomes 0, and every client starts cold in its next round (c_j = 0). From then on c is again the mean
of the variates, exactly; the correction needs a few rounds until it has its old size.

Deviations: NIID-Bench has variates for BatchNorm's buffers too. As in NIID-Bench, the correction follows the
optimiser's step instead of entering the gradient, so neither momentum nor weight decay acts on it.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from fedssl.artifacts.tensors import DTYPES, Tensors
from fedssl.methods.api import ClientData, Context, Schedule, Update
from fedssl.methods.composition.modules import learning_rate
from fedssl.methods.composition.part import Part, Wire
from fedssl.methods.composition.snapshots import Snapshot, snapshot, trained_parameters
from fedssl.methods.composition.weighting import equal_mean_of
from fedssl.protocol.methods.add_ons import ScaffoldConfig
from fedssl.protocol.plan import ArtifactPlan, TensorSpec
from fedssl.protocol.runs import RunSpec

CONTROL, DELTA = "control", "control_delta"
"""Prefixes of the tensors' names: c in the broadcast, c_k' - c_k in the update."""

_OWN, _CORRECTION, _START, _CHANGE = "scaffold_own", "scaffold_correction", "scaffold_start", "scaffold_change"


@dataclass(frozen=True)
class ControlVariates(Part):
    """w <- w - lr (c - c_k) after every step."""

    config: ScaffoldConfig

    kept: ClassVar[tuple[str, ...]] = (_OWN,)
    built_last: ClassVar[bool] = True

    def heads(self, modules: nn.ModuleDict, ctx: Context) -> dict[str, nn.Module]:
        trained = trained_parameters(modules)
        return {name: Snapshot(trained) for name in (_OWN, _CORRECTION, _START, _CHANGE)}

    def begin(self, modules: nn.ModuleDict, broadcast: Tensors, data: ClientData, ctx: Context) -> None:
        snapshot(modules, _START).load(trained_parameters(modules))
        own = snapshot(modules, _OWN).tensors()
        correction = {name: broadcast[f"{CONTROL}.{name}"].to(value.device) - value for name, value in own.items()}
        snapshot(modules, _CORRECTION).load(correction)

    @torch.no_grad()
    def after_step(self, modules: nn.ModuleDict, ctx: Context) -> None:
        parameters, step = dict(modules.named_parameters()), learning_rate(ctx)
        for name, correction in snapshot(modules, _CORRECTION).tensors().items():
            parameters[name].add_(correction, alpha=-step)

    def step_constants(self, modules: nn.ModuleDict, ctx: Context) -> Hashable:
        return learning_rate(ctx)

    @torch.no_grad()
    def end(self, modules: nn.ModuleDict, data: ClientData, schedule: Schedule, ctx: Context) -> None:
        num_steps = schedule.num_epochs * schedule.steps_per_epoch
        if num_steps == 0:
            return  # the round gives no estimate of the gradient: c_k stays, and the difference is 0
        way = num_steps * self._step_size(ctx)
        parameters, start = dict(modules.named_parameters()), snapshot(modules, _START).tensors()
        correction, own = snapshot(modules, _CORRECTION).tensors(), snapshot(modules, _OWN).tensors()
        new = {name: (start[name] - parameters[name]) / way - correction[name] for name in own}
        snapshot(modules, _CHANGE).load({name: new[name] - own[name] for name in own})
        snapshot(modules, _OWN).load(new)

    def _step_size(self, ctx: Context) -> float:
        momentum = ctx.spec.training.optimizer.momentum if self.config.step_size == "momentum" else 0.0
        return learning_rate(ctx) / (1 - momentum)

    def extra_update(self, modules: nn.ModuleDict, data: ClientData, ctx: Context) -> Tensors:
        return {f"{DELTA}.{name}": change for name, change in snapshot(modules, _CHANGE).tensors().items()}

    @property
    def wire(self) -> Wire:
        return Wire(plan=self._plan, initial_state=self._initial_state, aggregate=self._aggregate, restart=_restart)

    def _plan(self, modules: nn.ModuleDict, ctx: Context) -> ArtifactPlan:
        down, up = (
            tuple(
                TensorSpec(
                    name=f"{prefix}.{name}",
                    dtype=DTYPES[tensor.dtype],
                    shape=tuple(tensor.shape),
                    kind="control",
                    reduce="method",
                )
                for name, tensor in sorted(snapshot(modules, _OWN).tensors().items())
            )
            for prefix in (CONTROL, DELTA)
        )
        return ArtifactPlan(broadcast=down, update=up)

    def _initial_state(self, modules: nn.ModuleDict, ctx: Context) -> Tensors:
        return {f"{CONTROL}.{name}": value.clone() for name, value in snapshot(modules, _OWN).tensors().items()}

    def _aggregate(self, state: Tensors, updates: Sequence[Update], ctx: Context) -> Tensors:
        names = [name.removeprefix(f"{CONTROL}.") for name in state if name.startswith(f"{CONTROL}.")]
        means = equal_mean_of((_changes(update, names) for update in updates), len(updates), None, ctx)
        share = _share(ctx.spec, len(updates))
        return {f"{CONTROL}.{name}": state[f"{CONTROL}.{name}"].add(means[name], alpha=share) for name in names}


def _restart(state: Tensors) -> Tensors:
    return {name: torch.zeros_like(value) for name, value in state.items() if name.startswith(f"{CONTROL}.")}


def _share(spec: RunSpec, num_updates: int) -> float:
    """Return |S|/N. With a factor other than that of the updates that are used, c would not be the mean of the c_k.

    It is at most 1: a deployed run may have more clients than its spec's partition.
    """
    if spec.cohort.clients is not None:
        return num_updates / len(spec.cohort.clients)
    if spec.partition is None:
        return spec.cohort.fraction
    return min(1.0, num_updates / (1 if spec.partition.pooled else spec.partition.num_clients))


def _changes(update: Update, names: Sequence[str]) -> Tensors:
    tensors = update.load()
    return {name: tensors[f"{DELTA}.{name}"] for name in names}
