"""Makes runs, changes their state, and shows them."""

import itertools
from collections.abc import Sequence
from uuid import UUID

from sqlalchemy import func
from sqlalchemy.orm import Session

from fedssl.protocol.runs import RunSpec
from fedssl.protocol.states import AssignmentState, Outcome, RoundState, RunState
from fedssl.protocol.views import AssignmentView, RoundView, RunCreate, RunSummary, RunView
from fedssl.protocol.work import Progress
from fedssl_coordinator.core import enqueue
from fedssl_coordinator.core.audit import HAD_UPDATES, RUN_DELETED, record
from fedssl_coordinator.core.models import Assignment, Round, Run
from fedssl_coordinator.core.problems import ProblemError
from fedssl_coordinator.federation import retries
from fedssl_coordinator.federation.distillation import service as distillation
from fedssl_coordinator.federation.rounds import repository as rounds
from fedssl_coordinator.federation.rounds import service as rounds_service
from fedssl_coordinator.federation.runs import declared_encoders, repository
from fedssl_coordinator.federation.transitions import transition
from fedssl_coordinator.identity import clients
from fedssl_coordinator.storage.datasets import service as datasets

_ASSIGNMENTS_SHOWN = 5_000  # on a page of rounds: 2 MB
_POSSIBLE = {
    RunState.CREATED: "only start or stop",
    RunState.RUNNING: "only pause or stop",
    RunState.PAUSED: "only resume or stop",
    RunState.FINISHED: "it stays as it is; create a new one",
}


def create(session: Session, request: RunCreate, idempotency_key: str | None) -> RunView:
    """A new run; with an idempotency key seen before, the run that was made then."""
    if idempotency_key is not None and (same := _same_again(session, idempotency_key, request.spec)) is not None:
        return same
    spec = declared_encoders.pinned(session, datasets.pinned(session, request.spec))
    run = repository.add(
        session,
        name=spec.name,
        method=spec.method.name,
        method_version=spec.method.info.version,
        state=RunState.CREATED,
        spec=spec.model_dump(mode="json"),
        num_rounds=spec.num_rounds,
        idempotency_key=idempotency_key,
    )
    if run is None:
        assert idempotency_key is not None, "only the key can conflict"
        same = _same_again(session, idempotency_key, request.spec)
        assert same is not None, "the insert conflicted with it"
        return same
    record(session, "run.created", f"{run.name}: {run.method}, {run.num_rounds} rounds", run_id=run.id)
    if request.start:
        _start(session, run)
    return show(session, run.id)


def change(session: Session, run_id: UUID, verb: str) -> RunView:
    """start, pause, resume or stop a run. Asking for the state that it is in already is no error."""
    run = repository.locked(session, run_id)
    if run is None:
        raise _no_run(run_id)
    state = RunState(run.state)
    match verb, state:
        case "start", RunState.CREATED:
            _start(session, run)
        case "pause", RunState.RUNNING:
            transition(session, run, RunState.PAUSED, "no new work is given out")
        case "resume", RunState.PAUSED:
            _resume(session, run)
        case "stop", RunState.CREATED | RunState.RUNNING | RunState.PAUSED:
            rounds_service.end_run(session, run, Outcome.STOPPED, "stopped by an operator")
        case ("start" | "resume", RunState.RUNNING) | ("pause", RunState.PAUSED):
            pass
        case "stop", RunState.FINISHED if run.outcome == Outcome.STOPPED:
            pass
        case _:
            raise ProblemError("conflict", f"run {run_id} is {state}: it cannot {verb}, {_POSSIBLE[state]}")
    enqueue.wake_watchers(session)
    return show(session, run_id)


def delete(session: Session, run_id: UUID) -> None:
    """Delete a finished run: rounds, metrics, evaluations. Its artifacts go with the next collections; the audit log
    keeps its events. Raises ProblemError.
    """
    run = repository.locked(session, run_id)
    if run is None:
        raise _no_run(run_id)
    if run.state != RunState.FINISHED:
        raise ProblemError("conflict", f"run {run_id} is {run.state}: stop it first, only a finished run is deleted")
    about = {"name": run.name, "method": run.method, "outcome": run.outcome, "rounds_closed": run.rounds_closed}
    about[HAD_UPDATES] = bool(run.plan and run.plan["update"])
    repository.delete_all(session, run_id)
    record(session, RUN_DELETED, f"{run.name}: deleted by an admin", run_id=run_id, data=about)
    enqueue.wake_watchers(session)


def show(session: Session, run_id: UUID) -> RunView:
    """A run in full."""
    run = _get(session, run_id)
    spec = RunSpec.model_validate(run.spec)
    current, job = rounds.latest(session, run_id), distillation.unfinished(session, run_id)
    return RunView(
        **summary(run).model_dump(),
        spec=spec,
        initial_model=run.initial_broadcast,
        model=run.broadcast,
        server_state=run.server_state,
        current_round=round_views(session, [current])[0] if current else None,
        distillation=None if job is None else distillation.view(job),
        clients=clients.eligible(session, spec.cohort.clients),
    )


def summary(run: Run) -> RunSummary:
    return RunSummary.model_validate(run, from_attributes=True)


def round_views(session: Session, rows: Sequence[Round]) -> list[RoundView]:
    """Rounds with everybody's part in them."""
    members: dict[UUID, list[AssignmentView]] = {row.id: [] for row in rows}
    for assignment in rounds.assignments(session, [row.id for row in rows]):
        members[assignment.round_id].append(_assignment_view(assignment))
    return [
        RoundView(
            number=row.number,
            attempt=row.attempt,
            state=row.state,
            verdict=row.verdict,
            reason=row.reason,
            broadcast=row.broadcast,
            num_wanted=row.num_wanted,
            opened_at=row.opened_at,
            deadline=row.deadline,
            closed_at=row.closed_at,
            assignments=members[row.id],
        )
        for row in rows
    ]


def that_fit(session: Session, rows: Sequence[Round]) -> Sequence[Round]:
    """As many of the rounds, from the first on, as have _ASSIGNMENTS_SHOWN assignments together; one at least."""
    numbers = rounds.numbers_of_assignments(session, [row.id for row in rows])
    totals = itertools.accumulate(numbers.get(row.id, 0) for row in rows)
    num_fitting = sum(total <= _ASSIGNMENTS_SHOWN for total in totals)
    return rows[: max(1, num_fitting)]


def model_digest(session: Session, run_id: UUID, *, initial: bool) -> str:
    """The digest of a run's weights. Raises ProblemError before there are any."""
    run = _get(session, run_id)
    digest = run.initial_broadcast if initial else run.broadcast
    if digest is None:
        raise ProblemError("conflict", f"run {run_id} has no weights yet: start it, and wait for its first round")
    return digest


def require(session: Session, run_id: UUID) -> None:
    """Raise ProblemError where there is no such run."""
    _get(session, run_id)


def is_finished(session: Session, run_id: UUID) -> bool:
    """Whether nothing happens in the run any more."""
    return _get(session, run_id).state == RunState.FINISHED


def _get(session: Session, run_id: UUID) -> Run:
    run = repository.get(session, run_id)
    if run is None:
        raise _no_run(run_id)
    return run


def _no_run(run_id: UUID) -> ProblemError:
    return ProblemError("not-found", f"no run {run_id}: `GET /v1/runs` lists those that there are")


def _same_again(session: Session, key: str, spec: RunSpec) -> RunView | None:
    """The run that was made with this key; None: there is none. Raises ProblemError where it has another spec."""
    run = repository.by_idempotency_key(session, key)
    if run is None:
        return None
    if not _asks_for(spec, RunSpec.model_validate(run.spec)):
        raise ProblemError("conflict", f"Idempotency-Key {key} was used for run {run.id}, which has another spec")
    return show(session, run.id)


def _asks_for(asked: RunSpec, stored: RunSpec) -> bool:
    """Whether `stored` came of `asked`: the digest of the public images and the clients' encoders may have been put in
    when the run was made."""
    stored = declared_encoders.as_asked(asked, stored)
    if asked.public_data is not None and stored.public_data is not None and asked.public_data.digest is None:
        without = stored.public_data.model_copy(update={"digest": None})
        stored = stored.model_copy(update={"public_data": without})
    return asked == stored


def _start(session: Session, run: Run) -> None:
    transition(session, run, RunState.RUNNING, "the run may begin", started_at=func.now())
    enqueue.advance(session, run.id)


def _resume(session: Session, run: Run) -> None:
    transition(session, run, RunState.RUNNING, "work is given out again")
    retries.start_anew(session, run)  # whoever resumes a stalled run wants it tried now
    repository.set_reason(session, run, None)
    distillation.resume(session, run)
    current = rounds.unclosed(session, run.id)
    if current is not None and current.state == RoundState.OPEN:  # the pause does not count against the round
        seconds = RunSpec.model_validate(run.spec).cohort.deadline_seconds
        rounds.extend(session, current, seconds, next_attempt=False)
    enqueue.advance(session, run.id)
    enqueue.wake_workers(session)


def _assignment_view(row: Assignment) -> AssignmentView:
    return AssignmentView(
        id=row.id,
        client_id=row.client_id,
        attempt=row.attempt,
        state=AssignmentState(row.state),
        reason=row.reason,
        num_examples=row.num_examples,
        update=row.update_digest,
        progress=Progress.model_validate(row.progress) if row.progress else None,
        offered_at=row.offered_at,
        leased_at=row.leased_at,
        closed_at=row.closed_at,
        lease_expires_at=row.lease_expires_at,
    )
