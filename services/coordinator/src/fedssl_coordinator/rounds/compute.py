"""The parts of a round that compute: they need torch, so only the aggregator imports this module."""

import functools
from uuid import UUID

import torch
from sqlalchemy.orm import Session

from fedssl.artifacts.tensors import LazyTensors, Tensors, load_tensors, serialised
from fedssl.engine import run_aggregation, start_run
from fedssl.errors import FedSSLError
from fedssl.methods import METHODS
from fedssl.methods.api import Context, Update
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.states import AssignmentState, Outcome, RoundState, Verdict
from fedssl_coordinator.artifacts import repository as artifacts
from fedssl_coordinator.artifacts.service import store
from fedssl_coordinator.db import transaction
from fedssl_coordinator.events.repository import record
from fedssl_coordinator.models import Assignment, Round, Run
from fedssl_coordinator.rounds import repository, service
from fedssl_coordinator.runs import repository as runs


def prepare(run_id: UUID) -> None:
    """Make the run's plan and first weights from its seed. Repeated, it makes the same."""
    with transaction() as session:
        run = runs.get_one(session, run_id)
        spec = RunSpec.model_validate(run.spec)
    method = METHODS[spec.method.name]
    result = start_run(method, Context(spec=spec, round_number=0))
    state, broadcast = _put(result.state), _put(result.broadcast)
    plan = method.artifacts(spec.method, spec)
    with transaction() as session:
        _note(session, state, broadcast)
        if runs.prepared(session, run_id, plan.model_dump(mode="json"), state, broadcast):
            message = f"initial weights made from seed {spec.seed}"
            record(session, "run.prepared", message, run_id=run_id, data={"broadcast": broadcast})


def aggregate(run_id: UUID) -> None:
    """Aggregate the round that is due, publish the result and close the round. Repeated, it gives the same bits."""
    with transaction() as session:
        run = runs.get_one(session, run_id)
        current = repository.unclosed(session, run_id)
        if current is None or current.state != RoundState.AGGREGATING:
            return
        rows = repository.assignments(session, [current.id])
    spec = RunSpec.model_validate(run.spec)
    accepted = [row for row in rows if row.state == AssignmentState.ACCEPTED]
    assert run.server_state is not None, "a prepared run has a server state"
    ctx = Context(spec=spec, round_number=current.number)
    previous = load_tensors(store().path(run.server_state))
    try:
        result = run_aggregation(METHODS[spec.method.name], previous, [_update(row) for row in accepted], ctx)
    except FedSSLError as error:
        _fail(run, current, str(error))
        return
    state, broadcast = _put(result.state), _put(result.broadcast)
    cohort_size = len({row.client_id for row in rows})
    verdict = Verdict.AGGREGATED if len(accepted) == cohort_size else Verdict.PARTIAL
    with transaction() as session:
        _note(session, state, broadcast)
        if not service.close_round(session, current, verdict, f"{len(accepted)} of {cohort_size} updates"):
            return  # the run was stopped meanwhile
        runs.publish(session, run_id, state, broadcast)
        metrics = {**result.metrics, **_mean_loss(session, current, accepted)}
        repository.replace_metrics(session, run_id, current.number, None, metrics)


def _update(row: Assignment) -> Update:
    assert row.update_digest is not None, "a constraint says that an accepted assignment has an update"
    assert row.num_examples is not None, "set together with the update"
    return Update(row.client_id, row.num_examples, functools.partial(LazyTensors, store().path(row.update_digest)))


def _mean_loss(session: Session, current: Round, accepted: list[Assignment]) -> dict[str, float]:
    losses = repository.client_metrics(session, current.run_id, current.number, "loss")
    weights = {row.client_id: row.num_examples or 0 for row in accepted if row.client_id in losses}
    if not (total := sum(weights.values())):
        return {}
    return {"loss": sum(losses[client] * weight for client, weight in weights.items()) / total}


def _fail(run: Run, current: Round, reason: str) -> None:
    with transaction() as session:
        service.close_round(session, current, Verdict.FAILED, reason)
        service.finish_run(session, run, Outcome.FAILED, f"round {current.number}: {reason}")


def _put(tensors: Tensors) -> str:
    with store().writer() as writer:
        writer.write(serialised(tensors))
        return writer.commit()


def _note(session: Session, *digests: str) -> None:
    for digest in dict.fromkeys(digests):
        artifacts.add(session, digest, store().path(digest).stat().st_size)


def set_threads(count: int) -> None:
    """One thread gives the same bits on every machine."""
    torch.set_num_threads(count)
