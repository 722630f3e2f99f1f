"""The parts of a round that compute: they need torch, so only the aggregator imports this module.

No transaction is open while it computes. What it finds afterwards may have moved on, so it looks again, under the
run's lock, before it publishes.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

import torch
from sqlalchemy.orm import Session

from fedssl.artifacts.tensors import LazyTensors, Tensors, load_tensors, serialised
from fedssl.engine import run_aggregation, start_run
from fedssl.errors import DataError, MethodError
from fedssl.methods import METHODS
from fedssl.methods.api import ClientData, Context, Metrics, Update
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.states import AssignmentState, Outcome, RoundState, RunState, Verdict
from fedssl.shards import find_public, load_public
from fedssl_coordinator.artifacts import repository as artifacts
from fedssl_coordinator.artifacts.service import store
from fedssl_coordinator.db import transaction
from fedssl_coordinator.events.repository import record
from fedssl_coordinator.models import Assignment, Round, Run
from fedssl_coordinator.rounds import repository, service
from fedssl_coordinator.runs import repository as runs
from fedssl_coordinator.settings import settings


def prepare(run_id: UUID) -> None:
    """Make the run's plan and first weights from its seed. Repeated, it makes the same."""
    with transaction() as session:
        spec = RunSpec.model_validate(runs.get_one(session, run_id).spec)
    method = METHODS[spec.method.name]
    try:
        result = start_run(method, _context(spec, 0))
        plan = method.artifacts(spec.method, spec)
    except (MethodError, DataError) as error:
        _fail(run_id, None, str(error))
        return
    state, broadcast = _put(result.state), _put(result.broadcast)
    with transaction() as session:
        run = runs.locked(session, run_id)
        if run is None or run.state == RunState.FINISHED or run.plan is not None:
            return  # stopped, or prepared by somebody else
        _note(session, state, broadcast)
        runs.set_first_weights(session, run, plan.model_dump(mode="json"), state.digest, broadcast.digest)
        message = f"initial weights made from seed {spec.seed}"
        record(session, "run.prepared", message, run_id=run_id, data={"broadcast": broadcast.digest})


def aggregate(run_id: UUID) -> None:
    """Aggregate the round that is due, publish the result and close the round. Repeated, it gives the same bits."""
    with transaction() as session:
        run = runs.get_one(session, run_id)
        current = repository.unclosed(session, run_id)
        if current is None or current.state != RoundState.AGGREGATING:
            return
        rows = repository.assignments(session, [current.id])
    accepted = [row for row in rows if row.state == AssignmentState.ACCEPTED]
    try:
        state, broadcast, metrics = _aggregated(run, current, accepted)
    except MethodError as error:  # and no other: a store may come back, and the weights of weeks with it
        _fail(run_id, current, str(error))
        return
    cohort_size = len({row.client_id for row in rows})
    verdict = Verdict.AGGREGATED if len(accepted) == cohort_size else Verdict.PARTIAL
    with transaction() as session:
        locked = _still_due(session, run_id, current)
        if locked is None:
            return
        run, current = locked
        _note(session, state, broadcast)
        service.close_round(session, current, verdict, f"{len(accepted)} of {cohort_size} updates")
        runs.set_next_weights(session, run, state.digest, broadcast.digest)
        metrics = {**metrics, **_mean_loss(session, current, accepted)}
        repository.replace_metrics(session, run_id, current.number, None, metrics)


@dataclass(frozen=True, slots=True)
class _Stored:
    digest: str
    num_bytes: int


def _aggregated(run: Run, current: Round, accepted: Sequence[Assignment]) -> tuple[_Stored, _Stored, Metrics]:
    spec = RunSpec.model_validate(run.spec)
    assert run.server_state is not None, "a prepared run has a server state"
    previous = load_tensors(store().path(run.server_state))
    ctx = _context(spec, current.number)
    result = run_aggregation(METHODS[spec.method.name], previous, [_update(row) for row in accepted], ctx)
    return _put(result.state), _put(result.broadcast), result.metrics


def _context(spec: RunSpec, round_number: int) -> Context:
    public = None
    if spec.public_data is not None:
        images = load_public(find_public(spec.public_data, settings().public_data), spec.data).images
        public = ClientData(torch.from_numpy(images))
    return Context(spec=spec, round_number=round_number, public=public)


def _update(row: Assignment) -> Update:
    assert row.update_digest is not None, "a constraint says that an accepted assignment has an update"
    assert row.num_examples is not None, "set together with the update"
    return Update(row.client_id, row.num_examples, functools.partial(LazyTensors, store().path(row.update_digest)))


def _still_due(session: Session, run_id: UUID, expected: Round) -> tuple[Run, Round] | None:
    """The run, locked, and its round; None: the run was stopped, or somebody else has closed the round."""
    run = runs.locked(session, run_id)
    current = repository.unclosed(session, run_id)
    if run is None or current is None or (current.id, current.state) != (expected.id, RoundState.AGGREGATING):
        return None
    return run, current


def _mean_loss(session: Session, current: Round, accepted: Sequence[Assignment]) -> Metrics:
    losses = repository.client_metrics(session, current.run_id, current.number, "loss")
    weights = {row.client_id: row.num_examples or 0 for row in accepted if row.client_id in losses}
    if not (total := sum(weights.values())):
        return {}
    return {"loss": sum(losses[client] * weight for client, weight in weights.items()) / total}


def _fail(run_id: UUID, current: Round | None, reason: str) -> None:
    """End a run that can never go on."""
    with transaction() as session:
        run = runs.locked(session, run_id)
        if run is None or run.state == RunState.FINISHED:
            return
        if current is not None and _still_due(session, run_id, current) is None:
            return
        service.end_run(
            session, run, Outcome.FAILED, reason if current is None else f"round {current.number}: {reason}"
        )


def _put(tensors: Tensors) -> _Stored:
    data = serialised(tensors)
    with store().writer() as writer:
        writer.write(data)
        return _Stored(writer.commit(), len(data))


def _note(session: Session, *stored: _Stored) -> None:
    for artifact in stored:
        artifacts.add(session, artifact.digest, artifact.num_bytes)


def set_threads(count: int) -> None:
    """One thread gives the same bits on every machine."""
    torch.set_num_threads(count)
