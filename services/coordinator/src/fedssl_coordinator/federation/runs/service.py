"""Creates runs, changes their state, and shows them."""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from uuid import UUID

from sqlalchemy import func
from sqlalchemy.orm import Session

from fedssl.protocol.runs import RunSpec
from fedssl.protocol.states import AssignmentState, Outcome, RoundState, RunState
from fedssl.protocol.views import AssignmentView, RoundView, RunCreate, RunEdit, RunSummary, RunView
from fedssl.protocol.work import Progress
from fedssl.wording import plural
from fedssl_coordinator.core import enqueue
from fedssl_coordinator.core.audit import HAD_UPDATES, RUN_DELETED, record
from fedssl_coordinator.core.models import Assignment, DistillationJob, Round, Run
from fedssl_coordinator.core.problems import ProblemError
from fedssl_coordinator.core.run_documents import spec_of
from fedssl_coordinator.federation import retries, run_rows
from fedssl_coordinator.federation.distillation import repository as distillation_jobs
from fedssl_coordinator.federation.distillation import service as distillation
from fedssl_coordinator.federation.rounds import closing, declines, fitness, policies, reopening, unattended, unseen
from fedssl_coordinator.federation.rounds import repository as rounds
from fedssl_coordinator.federation.runs import continuation, declared_encoders, starts
from fedssl_coordinator.federation.secure_rounds import service as secure_rounds
from fedssl_coordinator.federation.transitions import transition
from fedssl_coordinator.identity import clients
from fedssl_coordinator.identity.projects import service as projects
from fedssl_coordinator.storage.datasets import service as datasets

_ASSIGNMENTS_SHOWN = 5_000  # on a page of rounds: 2 MB
_POSSIBLE = {
    RunState.CREATED: "only start or stop",
    RunState.RUNNING: "only pause or stop",
    RunState.PAUSED: "only resume or stop",
    RunState.FINISHED: "it stays as it is; continue it for further rounds if it completed, or create a new one",
}


def create(session: Session, request: RunCreate, idempotency_key: str | None) -> RunView:
    """Create a run, or return the run that was created before with the same idempotency key. Raises ProblemError."""
    project = projects.chosen(session, request.project)
    if idempotency_key is not None and (same := _existing(session, project, idempotency_key, request.spec)) is not None:
        return same
    fitness.require_possible(request.spec)
    spec = starts.pinned(session, project, datasets.pinned(session, project, request.spec))
    spec = declared_encoders.pinned(session, project, spec)
    fitness.require_fit(session, project, spec)
    run = run_rows.add(
        session,
        project=project,
        name=spec.name,
        method=spec.method.name,
        method_version=spec.method.info.version,
        state=RunState.CREATED,
        spec=spec.model_dump(mode="json"),
        num_rounds=spec.num_rounds,
        initial_weights=None if spec.model.initial is None else spec.model.initial.digest,
        idempotency_key=None if idempotency_key is None else run_rows.stored_key(project, idempotency_key),
    )
    if run is None:
        assert idempotency_key is not None, "only the key can conflict"
        same = _existing(session, project, idempotency_key, request.spec)
        assert same is not None, "the insert conflicted with it"
        return same
    record(session, "run.created", f"{run.name}: {run.method}, {plural(run.num_rounds, 'round')}", run_id=run.id)
    if (difference := starts.difference(session, spec)) is not None:
        record(session, "run.start_differs", difference, run_id=run.id)
    if request.start:
        _start(session, run)
    return _view(session, run, {}, None, None)


def change(session: Session, run_id: UUID, verb: str) -> RunView:
    """Start, pause, resume or stop a run; a failed one can be resumed too.

    Does nothing if the run is in that state already. Raises ProblemError.
    """
    run = run_rows.locked(session, run_id)
    if run is None:
        raise run_rows.not_found(run_id)
    state = RunState(run.state)
    match verb, state:
        case "start", RunState.CREATED:
            _start(session, run)
        case "pause", RunState.RUNNING:
            transition(session, run, RunState.PAUSED, "no new work is given out", reason=None)
        case "resume", RunState.PAUSED:
            _resume(session, run)
        case "resume", RunState.FINISHED if run.outcome == Outcome.FAILED:
            reopening.take_up(session, run)
        case "stop", RunState.CREATED | RunState.RUNNING | RunState.PAUSED:
            closing.end_run(session, run, Outcome.STOPPED, "stopped by an operator")
        case ("start" | "resume", RunState.RUNNING) | ("pause", RunState.PAUSED):
            pass
        case "stop", RunState.FINISHED if run.outcome == Outcome.STOPPED:
            pass
        case _:
            possible = "only resume" if run.outcome == Outcome.FAILED else _POSSIBLE[state]
            raise ProblemError("conflict", f"run {run_id} is {state}: it cannot {verb}, {possible}")
    enqueue.wake_watchers(session)
    return show(session, run_id)


def continue_run(session: Session, run_id: UUID, num_rounds: int) -> RunView:
    """Train a completed run further, until it has `num_rounds` rounds. Raises ProblemError."""
    run = run_rows.locked(session, run_id)
    if run is None:
        raise continuation.not_found(session, run_id)
    continuation.continue_run(session, run, num_rounds)
    enqueue.wake_watchers(session)
    return show(session, run_id)


def edit(session: Session, run_id: UUID, request: RunEdit) -> RunView:
    """Change the run's displayed name, tags or notes, in whatever state it is. Raises ProblemError."""
    run = run_rows.locked(session, run_id)
    if run is None:
        raise run_rows.not_found(run_id)
    given = request.model_dump(mode="json", exclude_none=True)
    changes = {name: value for name, value in given.items() if value != getattr(run, name)}
    if changes:
        message = f"{run.name}: new {' and '.join(changes)}"
        run_rows.set_words(session, run, changes)
        record(
            session, "run.edited", message, run_id=run_id, data={key: changes[key] for key in changes if key != "notes"}
        )
        enqueue.wake_watchers(session)
    return show(session, run_id)


def delete(session: Session, run_id: UUID) -> None:
    """Delete a finished run with its rounds, metrics and evaluations. Raises ProblemError.

    The next collections remove its artifacts. The audit log keeps its events.
    """
    run = run_rows.locked(session, run_id)
    if run is None:
        raise run_rows.not_found(run_id)
    if run.state != RunState.FINISHED:
        raise ProblemError(
            "conflict", f"run {run_id} is {run.state}: only a finished run can be deleted, stop it first"
        )
    about = {"name": run.name, "method": run.method, "outcome": run.outcome, "rounds_closed": run.rounds_closed}
    about[HAD_UPDATES] = bool(run.plan and run.plan["update"])
    run_rows.delete_all(session, run_id)
    record(session, RUN_DELETED, f"{run.name}: deleted by an admin", run_id=run_id, data=about)
    enqueue.wake_watchers(session)


def show(session: Session, run_id: UUID, *, assignments: bool = True) -> RunView:
    """Return the full view of a run, with the assignments of its round if wanted. Raises ProblemError if it does not
    exist."""
    run = run_rows.require(session, run_id)
    current, job = rounds.latest(session, run_id), distillation_jobs.unfinished(session, run_id)
    view = None if current is None else round_views(session, [current], assignments=assignments)[0]
    return _view(session, run, derived_reasons(session, [run]), view, job)


def _view(
    session: Session, run: Run, reasons: Mapping[UUID, str], current: RoundView | None, job: DistillationJob | None
) -> RunView:
    spec = spec_of(run)
    return RunView(
        **summary(run, reasons).model_dump(),
        spec=spec,
        notes=run.notes,
        initial_model=run.initial_model or run.initial_broadcast,
        model=run.model or run.broadcast,
        server_state=run.server_state,
        current_round=current,
        distillation=None if job is None else distillation.view(job),
        clients=(eligible := clients.eligible(session, run.project, spec.cohort.clients)),
        left_out=_left_out(session, run, spec, eligible),
    )


def derived_reasons(session: Session, runs: Sequence[Run]) -> dict[UUID, str]:
    """Return why runs make no progress, if their rows do not state it: no aggregator is free, or clients declined
    or are absent."""
    unexplained = [run for run in runs if run.reason is None]
    return {
        **unseen.reasons(session, unexplained),
        **declines.reasons(session, unexplained),
        **unattended.reasons(session, unexplained),
    }


def summary(run: Run, reasons: Mapping[UUID, str]) -> RunSummary:
    """Return one line of the list of runs. `reasons`: why runs make no progress, besides the reasons in their rows."""
    found = RunSummary.model_validate(run, from_attributes=True)
    reason = reasons.get(run.id)
    return found if reason is None or found.reason is not None else found.model_copy(update={"reason": reason})


def round_views(session: Session, rows: Sequence[Round], *, assignments: bool = True) -> list[RoundView]:
    """Return the views of rounds, with the assignments of all clients if wanted."""
    ids = [row.id for row in rows]
    members: dict[UUID, list[AssignmentView]] = {round_id: [] for round_id in ids}
    for assignment in rounds.assignments(session, ids) if assignments else ():
        members[assignment.round_id].append(assignment_view(assignment))
    counts = {key: _counts(found) for key, found in members.items()} if assignments else rounds.counts(session, ids)
    is_secure = {run: run_rows.definition(session, run).spec.secure_aggregation for run in {row.run_id for row in rows}}
    secure = secure_rounds.views(session, [row.id for row in rows if is_secure[row.run_id]])
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
            counts=counts[row.id],
            secure=secure.get(row.id),
            assignments=members[row.id],
        )
        for row in rows
    ]


def _counts(assignments: Sequence[AssignmentView]) -> dict[AssignmentState, int]:
    """Return the number of clients per state of their newest assignment, which is each client's last one here."""
    newest = {each.client_id: each.state for each in assignments}
    return dict(sorted(Counter(newest.values()).items()))


def assignment_view(row: Assignment) -> AssignmentView:
    """Return one client's assignment as the API shows it."""
    return AssignmentView(
        id=row.id,
        client_id=row.client_id,
        attempt=row.attempt,
        state=AssignmentState(row.state),
        reason=row.reason,
        cause=row.cause,
        num_examples=row.num_examples,
        update=row.update_digest,
        progress=Progress.model_validate(row.progress) if row.progress else None,
        **(row.resources or {}),
        offered_at=row.offered_at,
        leased_at=row.leased_at,
        closed_at=row.closed_at,
        lease_expires_at=row.lease_expires_at,
    )


def fitting(session: Session, rows: Sequence[Round]) -> Sequence[Round]:
    """Return the first rounds that together have at most _ASSIGNMENTS_SHOWN assignments, and at least one round."""
    numbers = rounds.numbers_of_assignments(session, [row.id for row in rows])
    totals = itertools.accumulate(numbers.get(row.id, 0) for row in rows)
    num_fitting = sum(total <= _ASSIGNMENTS_SHOWN for total in totals)
    return rows[: max(1, num_fitting)]


def model_digest(session: Session, run_id: UUID, *, initial: bool) -> str:
    """Return the digest of a run's weights. Raises ProblemError if it has none yet."""
    run = run_rows.require(session, run_id)
    digest = (run.initial_model or run.initial_broadcast) if initial else (run.model or run.broadcast)
    if digest is None:
        raise ProblemError("conflict", f"run {run_id} has no weights yet: start it, and wait for its first round")
    return digest


def is_finished(session: Session, run_id: UUID) -> bool:
    """Return whether a run has ended. Raises ProblemError if it does not exist."""
    return run_rows.require(session, run_id).state == RunState.FINISHED


def _left_out(session: Session, run: Run, spec: RunSpec, names: Sequence[str]) -> dict[str, str]:
    """Return the clients to which the next round will not be offered, with the reason."""
    if run.state == RunState.FINISHED:
        return {}
    found = fitness.unfit(session, spec, run.method_version, names)
    return found | (policies.refusals(session, run, spec, names) if run.plan is not None else {})


def _existing(session: Session, project: str, key: str, spec: RunSpec) -> RunView | None:
    """Return the run that was created with this key, if any. Raises ProblemError if it has another spec."""
    run = run_rows.by_idempotency_key(session, project, key)
    if run is None:
        return None
    if not _matches(spec, continuation.as_created(session, run)):
        raise ProblemError("conflict", f"Idempotency-Key {key} was used for run {run.id}, which has another spec")
    return show(session, run.id)


def _matches(asked: RunSpec, stored: RunSpec) -> bool:
    """Return whether a run created from `asked` has the spec `stored`: digests, the round of a start and the clients'
    encoders may have been filled in."""
    stored = starts.as_asked(asked, declared_encoders.as_asked(asked, stored))
    if asked.public_data is not None and stored.public_data is not None and asked.public_data.digest is None:
        without = stored.public_data.model_copy(update={"digest": None})
        stored = stored.model_copy(update={"public_data": without})
    return asked == stored


def _start(session: Session, run: Run) -> None:
    transition(session, run, RunState.RUNNING, "the run may start", started_at=func.now())
    enqueue.advance(session, run.id)


def _resume(session: Session, run: Run) -> None:
    transition(session, run, RunState.RUNNING, "work is given out again")
    retries.reset(session, run)  # a stalled run is tried again as soon as it is resumed
    run_rows.set_reason(session, run, None)
    distillation.resume(session, run)
    current = rounds.unclosed(session, run.id)
    if current is not None and current.state == RoundState.OPEN:  # the pause does not count against the round
        spec = spec_of(run)
        rounds.extend(session, current, spec.cohort.deadline_seconds, next_attempt=False)
        if spec.secure_aggregation is not None:
            secure_rounds.extend(session, current, spec.secure_aggregation.phase_seconds)
    enqueue.advance(session, run.id)
    enqueue.wake_workers(session)
