"""The coordinator's half of a round: the first state, and the next state from the clients' updates."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from fedssl.aggregation import AggregationError, OutOfRange
from fedssl.aggregation.layerwise import is_variance
from fedssl.artifacts.tensors import Tensors, check_tensors, in_name_order
from fedssl.engine import encoder_average, narrow_words, server_optimizer
from fedssl.engine.distillation import DistillationCheckpoint, OnEpoch, run_distillation
from fedssl.engine.encoder_average import averaged_encoder, check_average, first_average, next_average
from fedssl.engine.fixed_range import out_of_range
from fedssl.engine.narrow_words import TotalledMeans
from fedssl.engine.norm_bounding import NO_NORMS, Norms, bounded, check_bound, is_bounded, least_updates
from fedssl.engine.server_optimizer import first_optimizer_state, server_step
from fedssl.engine.update_measures import Layout, Step, is_negative, measure_all, recorded, why_unusable
from fedssl.errors import MethodError
from fedssl.methods import BoundMethod, Method
from fedssl.methods.api import Context, Distil, Metrics, ServerState, Update
from fedssl.methods.composition.rounding import restored_update
from fedssl.methods.composition.start import load_start
from fedssl.protocol.measures import WEIGHT_SHARE
from fedssl.protocol.plan import ArtifactPlan
from fedssl.wording import plural


@dataclass(frozen=True, slots=True)
class ServerResult:
    """The state to keep and the broadcast of the next round.

    `frozen`: tensors that clients receive once, because they never change. `model`: what is evaluated and exported: the
    broadcast, with the frozen tensors, and with the averaged encoder if there is one. `norms` are the measurements of
    the updates. `loaded` describes the weights that a run started from; it is empty if these were random.
    """

    state: ServerState
    broadcast: Tensors
    metrics: Metrics
    frozen: Tensors
    model: Tensors
    norms: Norms = NO_NORMS
    loaded: str = ""

    @property
    def received(self) -> Tensors:
        """The tensors that a client has when it begins the next round: the broadcast and the frozen tensors."""
        return in_name_order({**self.broadcast, **self.frozen})


class ValueOutOfRange(MethodError):
    """Too few updates have only values that fit the public scale of `aggregation.arithmetic = "fixed"`.

    The round has no result, because nothing is clipped. `norms` has the measurements of the updates, and names those
    that do not fit.
    """

    def __init__(self, message: str, norms: Norms) -> None:
        super().__init__(message)
        self.norms = norms


def start_run(
    method: Method,
    ctx: Context,
    *,
    on_epoch: OnEpoch = lambda progress: None,
    checkpoint: DistillationCheckpoint | None = None,
    initial: Tensors | None = None,
) -> ServerResult:
    """Return the state and the broadcast before the first round, from only the run's seed, the public images and the
    weights that the spec starts from.

    `on_epoch` and `checkpoint` are for methods that train on the coordinator: see `run_distillation`. `initial`: the
    tensors of the spec's `model.initial`. Raises SpecError if they do not fit, MethodError if they are missing, and the
    errors of `starting_plan`.
    """
    bound = method.bind(ctx.spec)
    starting_plan(bound)
    ctx = dataclasses.replace(ctx, distil=_distil(on_epoch, checkpoint))
    modules = bound.client.build(ctx)
    loaded = load_start(modules, bound.client.parts, initial, ctx)
    state = bound.server.initial_state(modules, ctx)
    kept = first_optimizer_state(bound, state, ctx) | first_average(bound, state, ctx)
    return dataclasses.replace(published(bound, state, kept, {}, ctx), loaded=loaded)


def starting_plan(bound: BoundMethod) -> ArtifactPlan:
    """Return the artifact plan of a run that can start.

    Raises SpecError if the spec bounds, averages or rounds what the method does not send or train.
    """
    check_bound(bound.restored_plan, bound.spec)
    check_average(bound)
    return bound.plan


def begin_aggregation(method: Method, updates: Sequence[Update], ctx: Context) -> None:
    """Add the first updates of a round, in client-id order, to `ctx.prefix_mean`, from which `run_aggregation` of all
    updates continues. Does nothing if the method, or the spec, needs all updates at once, or if they are rounded
    differences from the broadcast.

    Equal `load`s of two updates must open equal tensors. Raises AggregationError, and what `load` raises: nothing is
    kept then, and `run_aggregation` reports the reason.
    """
    bound = method.bind(ctx.spec)
    if not bound.rounded:
        bound.server.begin(sorted(updates, key=lambda update: update.client_id), ctx)


def run_aggregation(
    method: Method,
    state: Mapping[str, torch.Tensor],
    updates: Sequence[Update],
    ctx: Context,
    *,
    on_epoch: OnEpoch = lambda progress: None,
    checkpoint: DistillationCheckpoint | None = None,
    on_result: Callable[[ServerResult], None] = lambda result: None,
) -> ServerResult:
    """Return the next state from the updates, in client-id order, whatever their given order.

    Every update is measured (`update_measures.py`), which changes no bit of the result. An update that is not finite,
    lies beyond every possible training, or does not fit the fixed-point scale, is left out, and so are those that the
    spec's `robustness` rejects. If values or weights do not fit into words of 32 bits, all have 64 bits.

    `on_epoch` and `checkpoint` are for methods that train on the coordinator: see `run_distillation`. `on_result` gets
    the result before the updates are measured, so that it can be stored meanwhile. It may be called again, if the first
    result contained an update that cannot be used: the last one is what is returned, without `norms`. Raises
    TooFewUpdates or ValueOutOfRange if too few updates are left, and MethodError if there are none, two of one client,
    or the result is not finite although every update is.
    """
    ordered = sorted(updates, key=lambda update: update.client_id)
    if not ordered:
        raise MethodError("a round without updates cannot be aggregated")
    if len({update.client_id for update in ordered}) != len(ordered):
        raise MethodError("two updates of one client in one round")
    bound = method.bind(ctx.spec)
    known, kept = split_state(in_name_order(state))
    before = bound.server.broadcast(known, ctx)
    ordered = [restored(bound, update, before) for update in ordered]
    ctx = dataclasses.replace(ctx, distil=_distil(on_epoch, checkpoint))
    # A training on the coordinator must not begin with an update that is left out later: it may keep a checkpoint.
    distils = ctx.spec.method.distillation_epochs(ctx.round_number) > 0
    is_screened = is_bounded(ctx) or distils or bound.server.screens
    screen = functools.partial(bounded, ordered, before, bound.restored_plan, ctx)
    refusal = functools.partial(_refusal, bound, known, ctx)
    within, norms = screen(refusal) if is_screened else (ordered, NO_NORMS)
    attempt = functools.partial(_aggregated, bound, known, kept, before, ordered, on_result=on_result)
    try:
        return attempt(within, norms, ctx)
    except ValueOutOfRange as error:
        if not is_screened:
            within, norms = screen()
        within, norms = _within_range(bound, known, within, norms, ctx, error)
    except MethodError:
        if is_screened:
            raise
        # A further read of the updates finds those that cannot be used. If all can, the error is raised.
        within, norms = screen()
        if not norms.rejected:
            raise
    try:
        return attempt(within, norms, ctx)
    except ValueOutOfRange:
        if ctx.total_bits is None:
            raise
        # Honest values and weights may exceed 32 bits, and no client may end a round with its own.
        return attempt(within, norms, dataclasses.replace(ctx, total_bits=None))


def _within_range(
    bound: BoundMethod,
    known: ServerState,
    updates: Sequence[Update],
    norms: Norms,
    ctx: Context,
    error: ValueOutOfRange,
) -> tuple[Sequence[Update], Norms]:
    """Return the updates that fit the fixed-point scale, and the norms with those that do not.

    Raises ValueOutOfRange if too few are left.
    """
    misfits = out_of_range(bound, known, updates, ctx)
    kept = [update for update in updates if update.client_id not in misfits]
    norms = dataclasses.replace(norms, rejected={**norms.rejected, **misfits})
    if len(kept) < (least := least_updates(ctx)):
        names = ", ".join(sorted(misfits))
        raise ValueOutOfRange(
            f"{error}. Without {names}, fewer than {plural(least, 'update')} are left", norms
        ) from error
    return kept, norms


def _aggregated(
    bound: BoundMethod,
    known: ServerState,
    kept: Tensors,
    before: Tensors,
    updates: Sequence[Update],
    within: Sequence[Update],
    norms: Norms,
    ctx: Context,
    *,
    on_result: Callable[[ServerResult], None],
) -> ServerResult:
    """Return the result of the updates in `within`, and measurements of all of them. `before`: the broadcast that
    clients received; `kept`: the engine's own part of the state."""
    means = TotalledMeans(bound, len(within), ctx)
    try:
        state, metrics = bound.server.aggregate(known, within, dataclasses.replace(ctx, fixed_mean=means))
        state, moments = server_step(bound, known, state, kept, ctx)
    except OutOfRange as error:
        raise ValueOutOfRange(f"out of range: {error}", norms) from error
    except AggregationError as error:
        raise MethodError(f"the updates cannot be aggregated: {error}") from error
    if not {update.client_id for update in within}.isdisjoint(ctx.restarting):
        state = bound.server.restarted(state)
    kept = moments | next_average(bound, state, kept, ctx) | means.totals.kept(ctx)
    result = published(bound, state, kept, metrics, ctx)
    on_result(result)
    layout, shares = Layout.of(bound.restored_plan), _shares(bound, within, norms, ctx)
    step = Step.between(before, result.broadcast, layout)
    measures = {}
    for update, found in zip(updates, measure_all(updates, before, layout, step), strict=True):
        if update.client_id not in norms.rejected and (why := why_unusable(found)) is not None:
            update.load()  # raises if the numbers are not those that the client sent
            raise MethodError(f"the update of {update.client_id} cannot be used: {why}")
        share = shares.get(update.client_id)
        measures[update.client_id] = recorded(found) | ({} if share is None else {WEIGHT_SHARE: share})
    return dataclasses.replace(result, norms=dataclasses.replace(norms, measures=measures))


def restored(bound: BoundMethod, update: Update, received: Tensors) -> Update:
    """Return an update with the client's weights, if it has rounded differences from what the client received."""
    if not bound.rounded:
        return update

    def load() -> Mapping[str, torch.Tensor]:
        return restored_update(update.load(), received, bound.rounded)

    return dataclasses.replace(update, load=load, reopen=None)


def _refusal(bound: BoundMethod, state: ServerState, ctx: Context, update: Update) -> str | None:
    return bound.server.refusal(state, update, ctx)


def _shares(bound: BoundMethod, updates: Sequence[Update], norms: Norms, ctx: Context) -> Metrics:
    """Return each update's share of the round's step, or nothing if the step is not a weighted mean of the updates as
    they were sent and measured."""
    is_moved = norms.clipped or ctx.spec.aggregation.server_optimizer is not None
    weights = None if is_moved else bound.server.reducer.weights(updates, ctx)
    if weights is None:
        return {}
    total = sum(weights)
    return {update.client_id: weight / total for update, weight in zip(updates, weights, strict=True)}


def _distil(on_epoch: OnEpoch, checkpoint: DistillationCheckpoint | None) -> Distil:
    return functools.partial(run_distillation, on_epoch=on_epoch, checkpoint=checkpoint)


def published(bound: BoundMethod, state: ServerState, kept: Tensors, metrics: Metrics, ctx: Context) -> ServerResult:
    """Return the result of a round. `kept`: the engine's own part of the state, besides the method's.

    Raises MethodError if a tensor is not finite, or a variance of a BatchNorm is negative.
    """
    broadcast, frozen = bound.server.broadcast(state, ctx), bound.server.frozen(state, ctx)
    check_tensors(broadcast, bound.plan.broadcast, "broadcast")
    for name, tensor in {**state, **kept, **broadcast}.items():
        if tensor.is_floating_point() and not _is_finite(tensor):
            raise MethodError(
                f"the aggregation's result is not finite ({name}), and nothing of it is published: no single update is "
                "the cause, so lower training.optimizer.learning_rate, or the step of the reducer or of "
                "aggregation.server_optimizer"
            )
        if is_variance(name) and is_negative(float(tensor.min())):
            raise MethodError(f"the aggregation's result has negative variances ({name}): nothing of it is published")
    broadcast, others = in_name_order(broadcast), {**frozen, **averaged_encoder(kept)}
    model = in_name_order({**broadcast, **others}) if others else broadcast
    return ServerResult(in_name_order({**state, **kept}), broadcast, metrics, frozen, model)


def _is_finite(tensor: torch.Tensor) -> bool:
    if not tensor.numel():
        return True
    least, most = torch.aminmax(tensor)  # one pass; both are NaN if any number is
    return math.isfinite(least) and math.isfinite(most)


def split_state(state: ServerState) -> tuple[Tensors, Tensors]:
    """Return the method's own tensors of a stored state, which clients receive, and those that the engine keeps."""
    prefixes = (server_optimizer.PREFIX, encoder_average.PREFIX, narrow_words.PREFIX)
    own = {name: tensor for name, tensor in state.items() if not name.startswith(prefixes)}
    return own, {name: tensor for name, tensor in state.items() if name.startswith(prefixes)}
