"""Bounds what one update may do to the result, before anything is aggregated.

What is bounded: the distance of weights and of cluster centers from the broadcast, the change of a control variate, and
the length of the rows of centroids, dictionaries, representations and similarity factors. See `RobustnessConfig`.

If an update is left out, its client counts as if it had not taken part in the round, and continues from the state
before it. Therefore SCAFFOLD's c stays the mean of the c_k. A control variate that is clipped differs from its client's
own: with SCAFFOLD, "reject" is exact and "clip" is not.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from fedssl.aggregation.mean import rounded
from fedssl.artifacts.tensors import Tensors
from fedssl.engine.update_measures import Layout, measure, recorded, row_norms, why_unusable
from fedssl.errors import MethodError, SpecError
from fedssl.methods.api import Context, Metrics, Update
from fedssl.protocol.measures import CENTER_NORM, CONTROL_NORM, FEATURE_NORM, UPDATE_NORM
from fedssl.protocol.plan import ArtifactPlan
from fedssl.protocol.robustness import RobustnessConfig
from fedssl.protocol.runs import RunSpec
from fedssl.wording import apart, plural

_SETTINGS = {
    UPDATE_NORM: ("max_update_norm", "weights that could be compared with the broadcast"),
    CENTER_NORM: ("max_center_norm", "cluster centers"),
    CONTROL_NORM: ("max_control_norm", "control variates"),
    FEATURE_NORM: ("max_feature_norm", "centroids, dictionaries, representations or similarities"),
}


@dataclass(frozen=True, slots=True)
class Norms:
    """The measurements of one round's updates by client, and why updates were clipped or rejected, by client."""

    measures: Mapping[str, Metrics] = field(default_factory=dict)
    clipped: Mapping[str, str] = field(default_factory=dict)
    rejected: Mapping[str, str] = field(default_factory=dict)

    @property
    def by_client(self) -> Mapping[str, float]:
        """The distance of each update from the broadcast, for methods that send weights."""
        return {client: found[UPDATE_NORM] for client, found in self.measures.items() if UPDATE_NORM in found}


NO_NORMS = Norms()
"""The updates were not measured."""


class TooFewUpdates(MethodError):
    """A round has too few updates that can be used. `norms` names the others and gives the reasons."""

    def __init__(self, message: str, norms: Norms) -> None:
        super().__init__(message)
        self.norms = norms


def check_bound(plan: ArtifactPlan, spec: RunSpec) -> None:
    """Raise SpecError if the spec bounds a norm that this method's updates do not have."""
    for name in _limits(spec.robustness).keys() - Layout.of(plan).metrics:
        setting, what = _SETTINGS[name]
        raise SpecError(f"{spec.method.name} sends no {what}: leave robustness.{setting} out")


def is_bounded(ctx: Context) -> bool:
    """Return whether the spec bounds any norm."""
    return bool(_limits(ctx.spec.robustness))


def bounded(
    updates: Sequence[Update],
    broadcast: Tensors,
    plan: ArtifactPlan,
    ctx: Context,
    refusal: Callable[[Update], str | None] = lambda update: None,
) -> tuple[Sequence[Update], Norms]:
    """Return the updates in the form in which they may be aggregated, and their norms.

    `broadcast` is what the clients received. `refusal` returns why the method cannot use an update that has finite
    numbers, or None if it can.

    Norms are summed in float64, in name order, so they are the same wherever they are computed. Each update is read
    once, one tensor at a time. A clipped update is computed tensor by tensor when it is aggregated. Updates that cannot
    be used in any run are rejected even without a bound. Raises TooFewUpdates.
    """
    kept, norms = screened(updates, broadcast, plan, ctx, refusal)
    _require_enough(len(kept), len(updates), norms, ctx)
    return kept, norms


def screened(
    updates: Sequence[Update],
    broadcast: Tensors,
    plan: ArtifactPlan,
    ctx: Context,
    refusal: Callable[[Update], str | None],
) -> tuple[Sequence[Update], Norms]:
    """Return the same as `bounded`, even if too few updates are left."""
    limits, layout = _limits(ctx.spec.robustness), Layout.of(plan)
    clipped: dict[str, str] = {}
    rejected: dict[str, str] = {}
    measures, kept = {}, []
    for update in updates:
        found = measure(update.load(), broadcast, layout)
        measures[update.client_id] = recorded(found)
        beyond = {name: limit for name, limit in limits.items() if not found.get(name, 0.0) <= limit}
        if (why := why_unusable(found) or refusal(update)) is not None:
            rejected[update.client_id] = why
            continue
        if beyond:
            why = "; ".join(_beyond(name, found[name], limit) for name, limit in beyond.items())
            if ctx.spec.robustness.action == "reject":
                rejected[update.client_id] = why
                continue
            clipped[update.client_id] = why
            load = functools.partial(_clip, update, broadcast, layout, beyond, found)
            update = replace(update, load=load)
        kept.append(update)
    return kept, Norms(measures, clipped, rejected)


def least_updates(ctx: Context) -> int:
    """Return the fewest updates that give a round a result: the spec's `cohort.min_updates`, or 1."""
    return ctx.spec.cohort.min_updates or 1


def _require_enough(num_kept: int, num_updates: int, norms: Norms, ctx: Context) -> None:
    """Raise TooFewUpdates if fewer updates are left than the spec's `cohort.min_updates`, or none."""
    least = least_updates(ctx)
    if num_kept >= least:
        return
    reasons = "; ".join(f"{client}: {norms.rejected[client]}" for client in sorted(norms.rejected))
    num_rejected = len(norms.rejected)
    rejected = f"{num_rejected} of {plural(num_updates, 'update')} {'was' if num_rejected == 1 else 'were'} rejected"
    raise TooFewUpdates(f"{rejected}, and {least} {'is' if least == 1 else 'are'} needed. {reasons}", norms)


def _limits(config: RobustnessConfig) -> dict[str, float]:
    limits = {name: getattr(config, setting) for name, (setting, _) in _SETTINGS.items()}
    return {name: limit for name, limit in limits.items() if limit is not None}


def _beyond(name: str, value: float, limit: float) -> str:
    found, most = apart(value, limit, 6)
    return f"its {name} {found} is beyond robustness.{_SETTINGS[name][0]} {most}"


def _clip(
    update: Update, broadcast: Tensors, layout: Layout, limits: Mapping[str, float], found: Metrics
) -> Mapping[str, torch.Tensor]:
    return _Clipped(update.load(), broadcast, layout, limits, found)


class _Clipped(Mapping[str, torch.Tensor]):
    """An update within its limits: each tensor is scaled when it is read. `limits`: of the norms that are beyond."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        broadcast: Tensors,
        layout: Layout,
        limits: Mapping[str, float],
        found: Metrics,
    ) -> None:
        self._tensors, self._broadcast, self._limits = tensors, broadcast, limits
        groups = {**layout.differences, **layout.sums}
        self._factors = {
            name: limits[metric] / found[metric] for metric in limits if metric in groups for name in groups[metric]
        }
        self._moved = {name for names in layout.differences.values() for name in names}
        self._rows = frozenset(layout.features) if FEATURE_NORM in limits else frozenset[str]()

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self._tensors[name]
        if name in self._rows:
            return _rows_within(tensor, self._limits[FEATURE_NORM])
        if name not in self._factors:
            return tensor
        exact, factor = tensor.double(), self._factors[name]
        if name not in self._moved:
            return rounded(exact * factor, tensor.dtype)
        old = self._broadcast[name].double()
        return rounded(old + (exact - old) * factor, tensor.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _rows_within(tensor: torch.Tensor, limit: float) -> torch.Tensor:
    """Return the tensor with its longer rows scaled to the limit. Other rows keep every bit."""
    norms = row_norms(tensor)
    factors = torch.where(norms > limit, limit / norms, 1.0)
    scaled = tensor.double() * (factors if tensor.ndim == 1 else factors.unsqueeze(-1))
    return rounded(scaled, tensor.dtype)
