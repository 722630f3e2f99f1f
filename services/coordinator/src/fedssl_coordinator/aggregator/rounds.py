"""The parts of a round that compute. They import torch, so only the aggregator imports this module.

No transaction is open while it computes. The run may have changed in the meantime, so it is read again, under its
lock, before the result is published.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import torch
from sqlalchemy.orm import Session

from fedssl import tracing
from fedssl.artifacts.tensors import Tensors, serialised_parts
from fedssl.data import ImageData
from fedssl.data.partitioning import find_public, load_public, read_registered
from fedssl.engine import run_aggregation, start_run
from fedssl.engine.aggregation import ServerResult, ValueOutOfRange
from fedssl.engine.norm_bounding import Norms, TooFewUpdates
from fedssl.engine.secure_sums import NoSecureSum, run_secure_aggregation
from fedssl.engine.summed_metrics import mean_loss
from fedssl.errors import ArtifactDamaged, ArtifactNotFound, DataError, MethodError, SpecError
from fedssl.methods import METHODS
from fedssl.methods.api import CPU, ClientData, Context, Metrics
from fedssl.protocol.data import DataConfig, PublicDataConfig
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.states import AssignmentState, Outcome, RoundState, RunState, Verdict
from fedssl.secure_aggregation import NoSum
from fedssl.wording import plural
from fedssl_coordinator.aggregator import update_norms
from fedssl_coordinator.aggregator.begun_means import take_mean
from fedssl_coordinator.aggregator.secure_rounds import as_tensor, sent_apart, total_bits, unmasked_sum
from fedssl_coordinator.aggregator.stored import read_stored, stored_tensors
from fedssl_coordinator.aggregator.updates import UpdateLost, stored_update
from fedssl_coordinator.core.audit import record
from fedssl_coordinator.core.db import transaction
from fedssl_coordinator.core.logs import say_about
from fedssl_coordinator.core.models import Assignment, Round, Run
from fedssl_coordinator.core.settings import settings
from fedssl_coordinator.core.store import store
from fedssl_coordinator.federation import run_rows
from fedssl_coordinator.federation.evaluations import service as evaluations
from fedssl_coordinator.federation.rounds import closing, collapse_alerts, reopening, repository, round_metrics
from fedssl_coordinator.federation.run_rows import WeightDigests
from fedssl_coordinator.federation.secure_rounds import service as secure_rounds
from fedssl_coordinator.storage.artifacts import service as artifacts


@dataclass(frozen=True, slots=True)
class StoredArtifact:
    """An artifact that the store holds."""

    digest: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Weights:
    """The result of a round: the server's state and the next broadcast, which are in the store, and metrics. `model`:
    what is evaluated, if it is not the broadcast. `frozen`: what clients receive once, if these are the first weights
    and some are frozen. `loaded`: the weights that the run started from, if these are the first."""

    state: StoredArtifact
    broadcast: StoredArtifact
    model: StoredArtifact | None
    frozen: StoredArtifact | None
    metrics: Metrics
    norms: Norms
    loaded: str = ""

    @property
    def digests(self) -> WeightDigests:
        """The digests that a run's row has."""
        return WeightDigests(
            self.state.digest, self.broadcast.digest, None if self.model is None else self.model.digest
        )


def prepare(run_id: UUID) -> None:
    """Create the run's plan and first weights, from its seed and the weights that it starts from.

    Gives the same bits if it is repeated.
    """
    with transaction() as session:
        run = run_rows.get_one(session, run_id)
    try:
        weights = first_weights(run)
    except (MethodError, DataError, SpecError) as error:
        with transaction() as session:
            if (unprepared := run_rows.locked(session, run_id)) is not None and unprepared.state != RunState.FINISHED:
                closing.end_run(session, unprepared, Outcome.FAILED, str(error))
        return
    with transaction() as session:
        locked = run_rows.locked(session, run_id)
        if locked is None or locked.state == RunState.FINISHED or locked.plan is not None:
            return  # stopped, or prepared by another process
        publish_first(session, locked, weights)


def aggregate(run_id: UUID) -> None:
    """Aggregate the round that is due, publish the result and close the round. Gives the same bits if repeated."""
    with transaction() as session:
        run = run_rows.get_one(session, run_id)
        current = repository.unclosed(session, run_id)
        if current is None or current.state != RoundState.AGGREGATING:
            return
        rows = repository.assignments(session, [current.id])
        used = {row.id for row in _accepted(rows)}
    say_about(round=current.number)
    finish = _computed(run, current, rows)
    with transaction() as session:
        if (locked := _still_due(session, run_id, current, used)) is not None:
            finish(session, *locked)


def _computed(run: Run, current: Round, rows: Sequence[Assignment]) -> Callable[[Session, Run, Round], None]:
    """Compute the round's result, and return what then has to be done under the run's lock."""
    try:
        with tracing.round_span("aggregate", run.id, current.number):
            weights = next_weights(run, current, rows)
    except TooFewUpdates as error:
        return functools.partial(end_without_result, rows=rows, error=error)
    except ValueOutOfRange as error:
        return functools.partial(skip_out_of_range, rows=rows, error=error)
    except NoSum as error:
        return functools.partial(_skip_without_sum, reason=str(error))
    except UpdateLost as error:
        if not (lost := lost_updates(rows, error)):
            raise
        return functools.partial(reopening.ask_again, lost=lost)
    except MethodError as error:  # no other error is final: a store may come back
        return functools.partial(_fail, reason=str(error))
    return functools.partial(publish_next, rows=rows, weights=weights)


def first_weights(run: Run, device: torch.device = CPU, **training: Any) -> Weights:
    """Return the weights from which a run starts. `training` goes to `start_run`.

    Raises MethodError, DataError, SpecError if the weights of `model.initial` do not fit, and the errors of
    `read_stored`.
    """
    spec = RunSpec.model_validate(run.spec)
    method, ctx = METHODS[spec.method.name], _context(spec, 0, device)
    return _stored(start_run(method, ctx, initial=_start(run, spec), **training), is_first=True)


def next_weights(
    run: Run, current: Round, rows: Sequence[Assignment], device: torch.device = CPU, **training: Any
) -> Weights:
    """Return the weights that the round's accepted updates give. `training` is passed to `run_aggregation`.

    Raises MethodError, DataError if public images are missing, UpdateLost, and the errors of `read_stored`.
    """
    spec = RunSpec.model_validate(run.spec)
    assert run.server_state is not None, "a prepared run has a server state"
    previous = stored_tensors(run.server_state, f"server state after round {current.number - 1}")
    ctx = dataclasses.replace(
        _context(spec, current.number, device),
        prefix_mean=take_mean(current.id),
        total_bits=total_bits(run, spec, current.number),
        restarting=_trained_without_state(spec, rows),
    )
    if spec.secure_aggregation is not None:
        return _stored(_unmasked(spec, current, previous, ctx))
    updates = [stored_update(row) for row in _accepted(rows)]
    method, stored = METHODS[spec.method.name], list[Future[Weights]]()
    with ThreadPoolExecutor(1) as thread:  # the weights are written and synced while the updates are measured

        def store(found: ServerResult) -> None:
            stored.append(thread.submit(_stored, found))

        result = run_aggregation(method, previous, updates, ctx, on_result=store, **training)
    return dataclasses.replace(stored[-1].result(), norms=result.norms)


def _unmasked(spec: RunSpec, current: Round, previous: Tensors, ctx: Context) -> ServerResult:
    """Return the result of a secure round. Raises NoSum."""
    with transaction() as session:
        digests = secure_rounds.vectors(session, current.id)
    try:
        found = unmasked_sum(current.id, digests)
        apart = sent_apart(spec, {client: digests[client] for client in found.survivors})
    except (ArtifactDamaged, ArtifactNotFound) as error:
        raise NoSum(f"the store lacks a masked vector: {error}") from error
    method, num_clients = METHODS[spec.method.name], len(found.survivors)
    try:
        return run_secure_aggregation(method, previous, as_tensor(found), num_clients, ctx, apart=apart)
    except NoSecureSum as error:  # not a failure of the run: no client can cause one by what it sends
        raise NoSum(str(error)) from error


def publish_first(session: Session, run: Run, weights: Weights) -> None:
    """Store the plan and the first weights. The caller holds the run's lock."""
    spec = RunSpec.model_validate(run.spec)
    plan = METHODS[spec.method.name].bind(spec).plan
    _record_artifacts(session, weights)
    frozen = None if weights.frozen is None else weights.frozen.digest
    run_rows.set_first_weights(session, run, plan.model_dump(mode="json"), weights.digests, frozen)
    message, data = f"initial weights made from seed {spec.seed}", {"broadcast": weights.broadcast.digest}
    if (initial := spec.model.initial) is not None and run.initial_weights is not None:
        message = f"encoder from {initial.source}: {weights.loaded}; heads made from seed {spec.seed}"
        data["initial_weights"] = run.initial_weights
    record(session, "run.prepared", message, run_id=run.id, data=data)
    evaluations.queue_due(session, run, 0)


def publish_next(session: Session, run: Run, current: Round, rows: Sequence[Assignment], weights: Weights) -> None:
    """Close the round with its new weights. The caller holds the run's lock."""
    accepted, cohort_size = _accepted(rows), len({row.client_id for row in rows})
    used = [row for row in accepted if row.client_id not in weights.norms.rejected]
    is_whole = len(used) >= (current.num_wanted or cohort_size)
    verdict = Verdict.AGGREGATED if is_whole else Verdict.PARTIAL
    _record_artifacts(session, weights)
    if lost := _trained_without_state(RunSpec.model_validate(run.spec), used):
        run_rows.restart_states(session, run, current.number, lost)
    update_norms.record_norms(session, run, current.number, accepted, weights.norms)
    reason = f"{len(used)} of {plural(cohort_size, 'update')}"
    closing.close_round(session, current, verdict, reason + update_norms.describe(weights.norms))
    run_rows.set_next_weights(session, run, weights.digests)
    metrics = {**weights.metrics, **_mean_loss(session, run, current, used)}
    round_metrics.replace(session, run.id, current.number, None, metrics)
    evaluations.queue_due(session, run, current.number)
    collapse_alerts.raise_alerts(session, run, current, [row.client_id for row in used], metrics)


def end_without_result(
    session: Session, run: Run, current: Round, rows: Sequence[Assignment], error: TooFewUpdates
) -> None:
    """Reject the updates that cannot be used, and end the round, or the run, without new weights. The caller holds the
    run's lock."""
    update_norms.record_norms(session, run, current.number, _accepted(rows), error.norms)
    spec = RunSpec.model_validate(run.spec)
    closing.end_without_result(session, run, current, spec.cohort, str(error))


def skip_out_of_range(
    session: Session, run: Run, current: Round, rows: Sequence[Assignment], error: ValueOutOfRange
) -> None:
    """Close the round without new weights, because a value does not fit the fixed-point scale. Every client continues
    from its state before the round. The caller holds the run's lock."""
    update_norms.record_norms(session, run, current.number, _accepted(rows), error.norms)
    closing.skip_round(session, run, current, str(error))


def _skip_without_sum(session: Session, run: Run, current: Round, reason: str) -> None:
    closing.skip_round(session, run, current, f"no secure sum: {reason}")


def _fail(session: Session, run: Run, current: Round, reason: str) -> None:
    closing.end_run(session, run, Outcome.FAILED, f"round {current.number}: {reason}")


def lost_updates(rows: Sequence[Assignment], first: UpdateLost) -> dict[UUID, str]:
    """Return the accepted assignments whose update the store lacks now, each with the reason. Reads all the others."""
    reasons = {first.digest: first.reason}
    for row in _accepted(rows):
        if row.update_digest not in reasons:
            try:
                stored_update(row).load()
            except UpdateLost as error:
                reasons[error.digest] = error.reason
    lost = {digest: reason for digest, reason in reasons.items() if digest not in store()}
    return {row.id: lost[row.update_digest] for row in _accepted(rows) if row.update_digest in lost}


def put(tensors: Tensors) -> StoredArtifact:
    """Write tensors into the store."""
    num_bytes = 0
    with store().writer() as writer:
        for part in serialised_parts(tensors):
            writer.write(part)
            num_bytes += len(part)
        return StoredArtifact(writer.commit(), num_bytes)


def _context(spec: RunSpec, round_number: int, device: torch.device) -> Context:
    public = None
    if spec.public_data is not None:
        images = torch.from_numpy(_public_images(spec.public_data, spec.data).images)
        public = ClientData(images.to(device))
    return Context(spec=spec, round_number=round_number, device=device, public=public)


def _start(run: Run, spec: RunSpec) -> Tensors | None:
    """Return the tensors of the encoder that the run starts from, or None if it starts from random weights."""
    if spec.model.initial is None:
        return None
    assert run.initial_weights is not None, "set when the run was created"
    return stored_tensors(run.initial_weights, f"start of the run, {spec.model.initial.source}")


def _public_images(config: PublicDataConfig, data: DataConfig) -> ImageData:
    if config.digest is None:
        return load_public(find_public(config, settings().public_data), data)
    what = f"file of the public data set {config.dataset}"
    return read_stored(config.digest, what, lambda path: read_registered(path, config, data))


def _accepted(rows: Sequence[Assignment]) -> list[Assignment]:
    return [row for row in rows if row.state == AssignmentState.ACCEPTED]


def _trained_without_state(spec: RunSpec, rows: Sequence[Assignment]) -> list[str]:
    """Return the clients that had lost their state, if their updates make all clients of the run start cold."""
    if not spec.method.restarts_states:
        return []
    return [row.client_id for row in _accepted(rows) if row.lost_round is not None]


def _still_due(session: Session, run_id: UUID, expected: Round, used: set[UUID]) -> tuple[Run, Round] | None:
    """Return the run, locked, and its round, or None if what was computed is no longer wanted.

    The run may have been stopped, or another process may have closed the round. The round may also have been opened
    again and have other accepted updates than the assignments `used`.
    """
    run = run_rows.locked(session, run_id)
    current = repository.unclosed(session, run_id)
    if run is None or current is None or (current.id, current.state) != (expected.id, RoundState.AGGREGATING):
        return None
    accepted = {row.id for row in _accepted(repository.assignments(session, [current.id]))}
    return (run, current) if accepted == used else None


def _mean_loss(session: Session, run: Run, current: Round, used: Sequence[Assignment]) -> Metrics:
    """Return the mean loss that the clients reported. In a secure round they report none: its sum has the mean."""
    losses = round_metrics.of_clients(session, current.run_id, current.number, "loss")
    weights = {row.client_id: row.num_examples or 0 for row in used if row.client_id in losses}
    if not (total := sum(weights.values())):
        return {}
    if RunSpec.model_validate(run.spec).aggregation.arithmetic == "fixed":
        return mean_loss({client: losses[client] for client in weights}, weights)
    return {"loss": sum(losses[client] * weight for client, weight in weights.items()) / total}


def _stored(result: ServerResult, *, is_first: bool = False) -> Weights:
    state = put(result.state)
    return Weights(
        state,
        state if _are_same(result.state, result.broadcast) else put(result.broadcast),
        None if result.model is result.broadcast else put(result.model),
        put(result.frozen) if is_first and result.frozen else None,
        result.metrics,
        result.norms,
        result.loaded,
    )


def _are_same(some: Tensors, others: Tensors) -> bool:
    """Return whether these are the same tensors in memory, as with methods whose broadcast is the server's state."""
    return some.keys() == others.keys() and all(
        (tensor.data_ptr(), tensor.dtype, tensor.shape) == (other.data_ptr(), other.dtype, other.shape)
        for tensor, other in zip(some.values(), (others[name] for name in some), strict=True)
    )


def _record_artifacts(session: Session, weights: Weights) -> None:
    for artifact in (weights.state, weights.broadcast, weights.model, weights.frozen):
        if artifact is not None:
            artifacts.record_stored(session, artifact.digest, artifact.num_bytes)
