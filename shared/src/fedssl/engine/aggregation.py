"""The coordinator's half of a round: the first state, and the next state from the clients' updates."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from fedssl.aggregation import AggregationError
from fedssl.artifacts.tensors import Tensors, check_tensors, in_name_order
from fedssl.engine.distillation import DistillationCheckpoint, OnEpoch, run_distillation
from fedssl.engine.norm_bounding import NO_NORMS, Norms, bounded, check_bound
from fedssl.errors import MethodError
from fedssl.methods import BoundMethod, Method
from fedssl.methods.api import Context, Distil, Metrics, ServerState, Update


@dataclass(frozen=True, slots=True)
class ServerResult:
    """The state to keep and the broadcast of the next round. `norms` are the updates' if the spec bounds them."""

    state: ServerState
    broadcast: Tensors
    metrics: Metrics
    norms: Norms = NO_NORMS


def start_run(
    method: Method,
    ctx: Context,
    *,
    on_epoch: OnEpoch = lambda progress: None,
    checkpoint: DistillationCheckpoint | None = None,
) -> ServerResult:
    """Return the state and the broadcast before the first round, from only the run's seed and the public images.

    `on_epoch` and `checkpoint` are for methods that train on the coordinator: see `run_distillation`.
    """
    bound = method.bind(ctx.spec)
    check_bound(bound.plan, ctx)
    ctx = dataclasses.replace(ctx, distil=_distil(on_epoch, checkpoint))
    state = bound.server.initial_state(bound.client.build(ctx), ctx)
    return _publish(bound, state, {}, ctx)


def run_aggregation(
    method: Method,
    state: Mapping[str, torch.Tensor],
    updates: Sequence[Update],
    ctx: Context,
    *,
    on_epoch: OnEpoch = lambda progress: None,
    checkpoint: DistillationCheckpoint | None = None,
    restart: bool = False,
) -> ServerResult:
    """Return the next state from the updates, in client-id order whatever order they are given in.

    `on_epoch` and `checkpoint` are for methods that train on the coordinator: see `run_distillation`. `restart`: all
    clients will start cold, because one of them has lost its state (`MethodConfig.restarts_states`). Raises
    MethodError if there are no updates, two of one client, or too few left after the spec's `robustness`.
    """
    ordered = sorted(updates, key=lambda update: update.client_id)
    if not ordered:
        raise MethodError("a round without updates cannot be aggregated")
    if len({update.client_id for update in ordered}) != len(ordered):
        raise MethodError("two updates of one client in one round")
    bound, known = method.bind(ctx.spec), in_name_order(state)
    within, norms = bounded(ordered, functools.partial(bound.server.broadcast, known, ctx), bound.plan, ctx)
    try:
        ctx = dataclasses.replace(ctx, distil=_distil(on_epoch, checkpoint))
        next_state, metrics = bound.server.aggregate(known, within, ctx)
    except AggregationError as error:
        raise MethodError(f"the updates cannot be aggregated: {error}") from error
    if restart:
        next_state = bound.server.restarted(next_state)
    return dataclasses.replace(_publish(bound, next_state, metrics, ctx), norms=norms)


def _distil(on_epoch: OnEpoch, checkpoint: DistillationCheckpoint | None) -> Distil:
    return functools.partial(run_distillation, on_epoch=on_epoch, checkpoint=checkpoint)


def _publish(bound: BoundMethod, state: ServerState, metrics: Metrics, ctx: Context) -> ServerResult:
    broadcast = bound.server.broadcast(state, ctx)
    check_tensors(broadcast, bound.plan.broadcast, "broadcast")
    return ServerResult(in_name_order(state), in_name_order(broadcast), metrics)
