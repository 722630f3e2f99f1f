"""Reads and writes runs. Every part of the federation uses this module; `runs` is what operators do with them."""

import threading
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from sqlalchemy import ColumnElement, delete, func, select, tuple_
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from fedssl.protocol.plan import ArtifactPlan
from fedssl.protocol.projects import DEFAULT_PROJECT
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.states import WITHOUT_WEIGHTS, AssignmentState, RoundState, RunState
from fedssl.protocol.work import AcceptedUpdate
from fedssl_coordinator.core.audit import record
from fedssl_coordinator.core.db import transaction
from fedssl_coordinator.core.models import (
    Assignment,
    DimensionAssignment,
    DistillationJob,
    Evaluation,
    Metric,
    PartialUpload,
    Round,
    Run,
    SecureMember,
    SecureRound,
    SiteEvaluation,
    Upload,
)
from fedssl_coordinator.core.problems import ProblemError
from fedssl_coordinator.core.run_documents import parsed
from fedssl_coordinator.storage.artifacts.service import UpdateForm, update_form


def get(session: Session, run_id: UUID) -> Run | None:
    return session.get(Run, run_id)


def get_one(session: Session, run_id: UUID) -> Run:
    """Return a run that exists."""
    return session.get_one(Run, run_id)


class Definition(NamedTuple):
    """The part of a prepared run that does not change, except for the spec's `num_rounds` if the run is continued."""

    spec: RunSpec
    plan: ArtifactPlan
    method_version: int
    update_form: UpdateForm


_MOST_DEFINITIONS = 64
_definitions: dict[UUID, Definition] = {}
_writing = threading.Lock()


def definition(session: Session, run_id: UUID, num_rounds: int | None = None) -> Definition:
    """Return the definition of a prepared run. This process caches those of the last runs.

    Its spec has the `num_rounds` that the caller has read, or an earlier value if that is None.
    """
    known = _definitions.get(run_id)
    if known is None or num_rounds not in (None, known.spec.num_rounds):
        statement = select(Run.spec, Run.plan, Run.method_version).where(Run.id == run_id, Run.plan.is_not(None))
        spec, plan, version = session.execute(statement).one()
        known_plan = parsed(ArtifactPlan, "plan", run_id, plan)
        known = Definition(parsed(RunSpec, "spec", run_id, spec), known_plan, version, update_form(known_plan.update))
        with _writing:
            while len(_definitions) >= _MOST_DEFINITIONS:
                del _definitions[next(iter(_definitions))]
            _definitions[run_id] = known
    return known


def known_definition(run_id: UUID, num_rounds: int | None = None) -> Definition:
    """Do the same as `definition`, but read it in a transaction of its own if it is not cached."""
    known = _definitions.get(run_id)
    if known is not None and num_rounds in (None, known.spec.num_rounds):
        return known
    with transaction() as session:
        return definition(session, run_id, num_rounds)


def require(session: Session, run_id: UUID) -> Run:
    """Return a run. Raises ProblemError if it does not exist."""
    if (run := get(session, run_id)) is None:
        raise not_found(run_id)
    return run


def not_found(run_id: UUID) -> ProblemError:
    """Return the error for a run that does not exist."""
    return ProblemError("not-found", f"no run {run_id}: `GET /v1/runs` lists the runs that exist")


def weights_after(session: Session, run: Run, round_number: int) -> str:
    """Return the digest of the model after a closed round, which is evaluated, exported, and what other runs start
    from."""
    if round_number == run.rounds_closed:
        assert run.broadcast is not None, "a prepared run has a broadcast"
        return run.model or run.broadcast
    found = func.coalesce(Round.model, Round.broadcast)
    return session.scalars(select(found).where(Round.run_id == run.id, Round.number == round_number + 1)).one()


def by_idempotency_key(session: Session, project: str, key: str) -> Run | None:
    return session.scalars(select(Run).where(Run.idempotency_key == stored_key(project, key))).one_or_none()


def stored_key(project: str, key: str) -> str:
    """Return the key as its column has it: unique in the project. No key contains a space."""
    return key if project == DEFAULT_PROJECT else f"{project} {key}"


def add(session: Session, **values: Any) -> Run | None:
    """Return the new run, or None if a run of the project has this idempotency key."""
    statement = insert(Run).values(**values).on_conflict_do_nothing(index_elements=["idempotency_key"]).returning(Run)
    return session.scalars(statement).one_or_none()


def newest_first(
    session: Session, limit: int, before: tuple[datetime, UUID] | None, state: RunState | None
) -> Sequence[Run]:
    statement = select(Run).order_by(Run.created_at.desc(), Run.id.desc()).limit(limit)
    if state is not None:
        statement = statement.where(Run.state == state)
    if before is not None:
        statement = statement.where(tuple_(Run.created_at, Run.id) < before)
    return session.scalars(statement).all()


def locked(session: Session, run_id: UUID) -> Run | None:
    """Return the run as it is now. No other transaction can change its state before this one ends.

    A transaction that changes a run or one of its rounds takes this lock first.
    """
    return session.get(Run, run_id, with_for_update={"key_share": True}, populate_existing=True)


def awaiting_clients(session: Session, num_eligible: ColumnElement[int]) -> Sequence[UUID]:
    """Return the running runs without a round in progress that have enough clients: they may be waiting for one more.

    A run that needs more clients than there are is left out, or it would be checked each time a client registers.
    """
    in_progress = select(Round.id).where(Round.run_id == Run.id, Round.state != RoundState.CLOSED)
    fewest = Run.spec["cohort"]["min_clients"].as_integer()
    statement = select(Run.id).where(Run.state == RunState.RUNNING, ~in_progress.exists(), fewest <= num_eligible)
    return session.scalars(statement).all()


class WeightDigests(NamedTuple):
    """The coordinator's state, what clients receive in the next round, and what is evaluated if that differs."""

    state: str
    broadcast: str
    model: str | None


def set_first_weights(
    session: Session, run: Run, plan: dict[str, Any], weights: WeightDigests, frozen: str | None
) -> None:
    """Set the plan, and the weights that the run starts from. `frozen`: those that each client fetches once."""
    run.plan, run.frozen = plan, frozen
    run.initial_broadcast, run.initial_model = weights.broadcast, weights.model
    _set_weights(session, run, weights)


def set_next_weights(session: Session, run: Run, weights: WeightDigests) -> None:
    """Set the new global weights, and count one more closed round."""
    run.rounds_closed += 1
    _set_weights(session, run, weights)


def count_round(session: Session, run: Run) -> None:
    """Count one more closed round, without new weights."""
    run.rounds_closed += 1
    session.flush()


def restart_states(session: Session, run: Run, round_number: int, lost: Sequence[str]) -> None:
    """Make every client start cold after this round, because these clients trained it without their lost state."""
    run.restart_round = round_number
    session.flush()
    message = (
        f"{', '.join(lost)} trained without a lost client state: the method's state on the coordinator begins again, "
        "and every client starts cold in its next round"
    )
    record(session, "run.states_restarted", message, run_id=run.id, round_number=round_number, data={"clients": lost})


def set_reason(session: Session, run: Run, reason: str | None) -> None:
    """Set why an unfinished run makes no progress."""
    run.reason = reason
    session.flush()


def set_words(session: Session, run: Run, values: Mapping[str, Any]) -> None:
    """Set the displayed name, the tags or the notes."""
    for name, value in values.items():
        setattr(run, name, value)
    session.flush()


def delete_all(session: Session, run_id: UUID) -> None:
    """Delete the run and every row about it, but not its events."""
    of_rounds = select(Assignment.id).where(Assignment.run_id == run_id)
    for uploads in (Upload, PartialUpload):
        session.execute(delete(uploads).where(uploads.assignment_id.in_(of_rounds)))
    secure = select(Round.id).where(Round.run_id == run_id)
    for messages in (SecureMember, SecureRound):
        session.execute(delete(messages).where(messages.round_id.in_(secure)))
    # Evaluations first, then metrics: this waits for an evaluation that is just completing and adds metrics.
    for table in (Evaluation, SiteEvaluation, Metric, DistillationJob, DimensionAssignment, Assignment, Round):
        session.execute(delete(table).where(table.run_id == run_id))
    session.execute(delete(Run).where(Run.id == run_id))


def _set_weights(session: Session, run: Run, weights: WeightDigests) -> None:
    run.server_state, run.broadcast, run.model = weights
    run.num_tries, run.num_deaths, run.retry_at, run.reason = 0, 0, None, None
    session.flush()


def newest_accepted(session: Session, run: Run, client_id: str, last_round: int | None = None) -> AcceptedUpdate | None:
    """Return the client's newest accepted update in the run, up to `last_round`, but not of a skipped or failed round.

    Such a round puts no update into the weights, so no client's state advances in it. Updates up to the round after
    which all clients start cold do not count either.
    """
    statement = (
        select(Assignment.round_number, Assignment.update_digest)
        .join(Round, Round.id == Assignment.round_id)
        .where(
            Assignment.run_id == run.id,
            Assignment.client_id == client_id,
            Assignment.state == AssignmentState.ACCEPTED,
            Assignment.round_number > (run.restart_round or 0),
            *(Round.verdict.is_distinct_from(each) for each in WITHOUT_WEIGHTS),
        )
        .order_by(Assignment.round_number.desc())
        .limit(1)
    )
    if last_round is not None:
        statement = statement.where(Assignment.round_number <= last_round)
    found = session.execute(statement).one_or_none()
    return None if found is None else AcceptedUpdate(round_number=found[0], update=found[1])
