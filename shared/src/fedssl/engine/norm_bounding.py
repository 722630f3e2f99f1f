"""Bounds the distance between an update and the broadcast, before anything is aggregated."""

import functools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from fedssl.aggregation.mean import chunks, rounded
from fedssl.artifacts.dtypes import FLOATS
from fedssl.artifacts.tensors import Tensors
from fedssl.errors import MethodError
from fedssl.methods.api import Context, Update
from fedssl.protocol.plan import ArtifactPlan

UPDATE_NORM = "update_norm"
"""The name of the metric per client."""


@dataclass(frozen=True, slots=True)
class Norms:
    """The norms of one round's updates by client, and the clients whose updates were clipped or rejected."""

    by_client: Mapping[str, float] = field(default_factory=dict)
    clipped: tuple[str, ...] = ()
    rejected: tuple[str, ...] = ()


NO_NORMS = Norms()
"""The norms were not computed."""


def check_bound(plan: ArtifactPlan, ctx: Context) -> None:
    """Raise MethodError if the spec bounds a norm that this method's updates do not have."""
    if ctx.spec.robustness.max_update_norm is not None and not _compared(plan):
        raise MethodError(
            f"{ctx.spec.method.name} sends no weights that could be compared with the broadcast: leave "
            "robustness.max_update_norm out"
        )
    is_rejecting = ctx.spec.robustness.max_update_norm is not None and ctx.spec.robustness.action == "reject"
    if is_rejecting and any(tensor.kind == "control" for tensor in plan.update):
        raise MethodError(
            "a client whose update is rejected keeps its new control variate, and the coordinator's never includes it: "
            'set robustness.action = "clip" with scaffold'
        )


def bounded(
    updates: Sequence[Update], make_broadcast: Callable[[], Tensors], plan: ArtifactPlan, ctx: Context
) -> tuple[Sequence[Update], Norms]:
    """Return the updates as they may be aggregated, and their norms. `make_broadcast` returns what the clients
    received.

    Norms are summed in float64, in name order, so they are the same wherever they are computed. Each update is read
    once, one tensor at a time. A clipped update is computed tensor by tensor when it is aggregated. Raises MethodError
    if too few are left: none, or fewer than the spec's `cohort.min_updates`.
    """
    config = ctx.spec.robustness
    if config.max_update_norm is None:
        return updates, NO_NORMS
    broadcast, names = make_broadcast(), _compared(plan)
    norms = {update.client_id: _norm(update.load(), broadcast, names) for update in updates}
    beyond = {client: norm for client, norm in norms.items() if not norm <= config.max_update_norm}
    rejected = {client for client, norm in beyond.items() if config.action == "reject" or math.isinf(norm)}
    kept = [update for update in updates if update.client_id not in rejected]
    least = max(1, ctx.spec.cohort.min_updates or 1)
    if len(kept) < least:
        raise MethodError(
            f"{len(rejected)} of {len(updates)} updates lie farther than {config.max_update_norm:g} from the broadcast "
            f"and were rejected, {least} are needed: check the metric update_norm, and raise "
            "robustness.max_update_norm if it is the training that moves this far"
        )
    within = [
        update
        if update.client_id not in beyond
        else replace(
            update,
            load=functools.partial(_clip, update, broadcast, names, config.max_update_norm / norms[update.client_id]),
        )
        for update in kept
    ]
    finite = {client: min(norm, sys.float_info.max) for client, norm in norms.items()}
    return within, Norms(finite, tuple(sorted(beyond.keys() - rejected)), tuple(sorted(rejected)))


def _compared(plan: ArtifactPlan) -> list[str]:
    """Return the names of the floating-point weights that both the broadcast and the update hold."""
    sent = {spec.name: (spec.dtype, spec.shape) for spec in plan.broadcast}
    return sorted(
        spec.name
        for spec in plan.update
        if spec.kind == "weights" and spec.dtype in FLOATS and sent.get(spec.name) == (spec.dtype, spec.shape)
    )


def _norm(tensors: Mapping[str, torch.Tensor], broadcast: Tensors, names: Sequence[str]) -> float:
    squares = [
        float((piece.double() - old.double()).square().sum())
        for name in names
        for piece, old in chunks(tensors[name], broadcast[name])
    ]
    return math.sqrt(math.fsum(squares)) if all(map(math.isfinite, squares)) else math.inf


def _clip(update: Update, broadcast: Tensors, names: Sequence[str], factor: float) -> Mapping[str, torch.Tensor]:
    return _Clipped(update.load(), broadcast, frozenset(names), factor)


class _Clipped(Mapping[str, torch.Tensor]):
    """An update whose difference from the broadcast is scaled, one tensor at a time, when the tensor is read."""

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], broadcast: Tensors, names: frozenset[str], factor: float
    ) -> None:
        self._tensors, self._broadcast, self._names, self._factor = tensors, broadcast, names, factor

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self._tensors[name]
        if name not in self._names:
            return tensor
        old = self._broadcast[name].double()
        return rounded(old + (tensor.double() - old) * self._factor, tensor.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)
