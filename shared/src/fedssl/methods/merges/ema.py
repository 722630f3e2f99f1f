"""FedEMA's merge rule: the client's network moves towards the global one, and less so the further apart they are.

Zhuang et al. 2022, Divergence-Aware Federated Self-Supervised Learning; as FedRLC prints it (Eq. 12 and below):

    w_k <- mu w_k + (1 - mu) w_*,   mu = min(lambda_k d, 1),   lambda_k = tau / (the first d)

w_k: encoder, projector and predictor as this client's last round left them, w_*: the global ones, mu the same for all
three; parameters only, BatchNorm's statistics are the global ones. tau is `tau`, the 1 of the minimum is `cap`.

    paper      d = || f_* - f_k ||_2 between the network received and the client's own, encoder and projector;
               lambda_k is set in the client's first mixed round
    reference  d = FedU's divergence of the client's last local training, mean over the convolutions of
               || w_after - w_before ||_2; lambda_k is set after its first training                     (EasyFL)

The default is "paper", with cap = 1: FedU2's code caps mu at 0.7. With "paper", mu is exactly tau in a client's first
mixed round, with "reference" in the round after its first training; therefore the first d is kept and not lambda_k:
mu = min(tau (d / first), cap). The only client of a round gets its own network back: with "paper", such a d,
which is 0 except for rounding, does not count as the first.

`selective` (EasyFL): a client that missed the previous round overwrites its online network, and its target network or
DINO's teacher if it keeps one, with the global one. A client without state overwrites too. Otherwise the target network
does not change. MoCo's keys start as a copy of the online network in every round. All other modules that are sent are
overwritten in every round: those of add-ons, DINO's prototypes, Orchestra's averaged target network. The rule goes onto
any objective: "SSD with FedEMA's merge".
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from fedssl.artifacts.tensors import Tensors
from fedssl.methods.api import ClientData, ClientState, Context, Schedule
from fedssl.methods.composition.follower import TARGETS
from fedssl.methods.composition.modules import load_modules, module_of
from fedssl.methods.composition.part import ENCODER, PREDICTOR, PROJECTOR, Merge
from fedssl.methods.composition.rounding import error_length
from fedssl.methods.merges.divergence import (
    MergeMemory,
    copies,
    mean_convolution_distance,
    memory,
    parameter_distance,
    parameter_length,
    take,
)
from fedssl.protocol.methods.merges import DivergenceAwareConfig

MEMORY, _START, _ERROR = "ema", "ema_start", "upload_error"
MIXED = (ENCODER, PROJECTOR, PREDICTOR)
_MEASURED = (ENCODER, PROJECTOR)
_ROUNDING = 1e-6  # as a share of a network's length: nearer networks are equal, except for rounding


@dataclass(frozen=True)
class DivergenceAwareEMA(Merge):
    """Mix the client's network into the global one."""

    config: DivergenceAwareConfig

    kept: ClassVar[tuple[str, ...]] = (MEMORY,)
    remembered: ClassVar[tuple[str, ...]] = MIXED

    def heads(self, modules: nn.ModuleDict, ctx: Context) -> dict[str, nn.Module]:
        names = ("drift", "first", "coefficient", *([_ERROR] if ctx.spec.upload.rounds else []))
        numbers = {name: torch.zeros(()) for name in names}
        last_round = torch.zeros((), dtype=torch.int64)
        kept = MergeMemory(modules, self.remembered, last_round=last_round, **numbers)
        start = {_START: copies(modules, (ENCODER,))} if self.config.variant == "reference" else {}
        return {MEMORY: kept, **start}

    def receive(
        self,
        modules: nn.ModuleDict,
        names: tuple[str, ...],
        broadcast: Tensors,
        state: ClientState | None,
        ctx: Context,
    ) -> None:
        load_modules(modules, names, broadcast, "broadcast")
        if state is None:
            return
        kept = memory(modules, MEMORY)
        rounding = _upload_rounding(kept, state) if ctx.spec.upload.rounds else 0.0
        if not self.mixes(modules, ctx):
            for target in TARGETS:
                if not set(target.names.values()) & set(names):  # an averaged target network was received
                    target.restart(modules)
            return
        coefficient = self._coefficient(modules, kept, rounding)
        for name in MIXED:
            if name in modules:
                _mix(modules[name], kept.local[name], coefficient)

    def mixes(self, modules: nn.ModuleDict, ctx: Context) -> bool:
        """Return whether the client has a network of its own to mix in."""
        last = int(memory(modules, MEMORY).number("last_round"))
        return last > 0 and (not self.config.selective or last == ctx.round_number - 1)

    def _coefficient(self, modules: nn.ModuleDict, kept: MergeMemory, rounding: float) -> Tensor:
        """Return mu, from the global network in `modules` and the client's own in `kept`.

        `rounding`: how far the two can be apart if no other client took part, because of its upload.
        """
        if self.config.variant == "paper":
            received = [modules[name] for name in _MEASURED if name in modules]
            own = [kept.local[name] for name in _MEASURED if name in modules]
            distance = parameter_distance(received, own)
            is_rounding = distance <= _ROUNDING * parameter_length(own) + rounding
            _set_first(kept, torch.where(is_rounding, 0.0, distance))
        else:
            distance = kept.number("drift")
        first = kept.number("first")
        share = torch.where(first > 0, distance / first, 0.0)
        return kept.number("coefficient").copy_((self.config.tau * share).clamp_max(self.config.cap))

    def begin(self, modules: nn.ModuleDict, broadcast: Tensors, data: ClientData, ctx: Context) -> None:
        if self.config.variant == "reference":
            take(module_of(modules, _START, nn.ModuleDict), modules)

    def end(self, modules: nn.ModuleDict, data: ClientData, schedule: Schedule, ctx: Context) -> None:
        kept = memory(modules, MEMORY)
        if self.config.variant == "reference":
            start = module_of(modules, _START, nn.ModuleDict)
            kept.number("drift").copy_(mean_convolution_distance(modules[ENCODER], start[ENCODER]))
            _set_first(kept, kept.number("drift"))
        kept.number("last_round").fill_(ctx.round_number)
        take(kept.local, modules)


def _upload_rounding(kept: MergeMemory, state: ClientState) -> float:
    """Return how far a client's own weights can be from those that the coordinator restored from its last update.

    The restored weights include the error that the update took over, and not the one that it left, so both are counted.
    The latter is kept, because the next update takes it over.
    """
    left = error_length(state, _MEASURED)
    taken_over = float(kept.number(_ERROR))
    kept.number(_ERROR).copy_(left)
    return taken_over + float(left)


def _set_first(kept: MergeMemory, distance: Tensor) -> None:
    """Store the first distance that is not 0."""
    first = kept.number("first")
    first.copy_(torch.where(first > 0, first, distance))


@torch.no_grad()
def _mix(received: nn.Module, local: nn.Module, coefficient: Tensor) -> None:
    for theirs, own in zip(received.parameters(), local.parameters(), strict=True):
        theirs.lerp_(own, coefficient)
