"""Leases: granted, renewed, turned into an accepted update, or returned."""

import functools
from typing import Any
from uuid import UUID

from sqlalchemy import func
from sqlalchemy.orm import Session

from fedssl.protocol.base import PROTOCOL_VERSION
from fedssl.protocol.measures import MEASURES
from fedssl.protocol.plan import ArtifactPlan
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.states import AssignmentState, RoundState
from fedssl.protocol.work import (
    AcceptedUpdate,
    Decline,
    EndedQuery,
    EndedRuns,
    Heartbeat,
    HeartbeatReply,
    Register,
    Registered,
    Submit,
    Submitted,
    WorkItem,
)
from fedssl_coordinator.core import audit as events
from fedssl_coordinator.core import enqueue
from fedssl_coordinator.core.audit import record
from fedssl_coordinator.core.logs import say_about
from fedssl_coordinator.core.models import Assignment, Run
from fedssl_coordinator.core.problems import AuditEvent, ProblemError, printable
from fedssl_coordinator.federation import run_rows
from fedssl_coordinator.federation.dimensions import repository as dimensions
from fedssl_coordinator.federation.rounds import repository as rounds
from fedssl_coordinator.federation.transitions import transition
from fedssl_coordinator.federation.work import repository
from fedssl_coordinator.identity import clients
from fedssl_coordinator.storage.artifacts import repository as artifacts
from fedssl_coordinator.storage.artifacts.service import own_assignment


def register(session: Session, client_id: str, request: Register) -> Registered:
    """Store the worker's description of itself, and advance runs that may have waited for it. Raises ProblemError."""
    if request.protocol_version != PROTOCOL_VERSION:
        detail = f"the worker uses protocol {request.protocol_version}, the coordinator {PROTOCOL_VERSION}: update one"
        raise ProblemError(
            "invalid-request", detail, audit_event=AuditEvent("client.refused", detail, client_id=client_id)
        )
    before = clients.register(session, client_id, request)
    if before is not None and before != request.num_images:
        message = f"{client_id} registered with {request.num_images} images, and with {before} before"
        data = {"before": before, "after": request.num_images}
        record(session, "client.images_changed", message, client_id=client_id, data=data)
    repository.end_pauses(session, client_id)  # a worker that starts again may now have what it lacked
    encoder = "" if request.encoder is None else f", encoder {request.encoder}"
    message = f"{request.num_images} images, {request.device}, worker {request.worker_version}{encoder}"
    record(session, "client.registered", message, client_id=client_id)
    for run_id in run_rows.awaiting_clients(session, clients.num_eligible()):
        enqueue.advance(session, run_id)
    return Registered(client_id=client_id)


def claim(session: Session, client_id: str) -> WorkItem | None:
    """Lease the client's next assignment. A restarted worker gets the one that it still holds."""
    clients.seen(session, client_id)
    assignment = repository.claimable(session, client_id)
    if assignment is None:
        return None
    say_about(run=str(assignment.run_id), round=assignment.round_number)
    run = run_rows.get_one(session, assignment.run_id)
    spec = RunSpec.model_validate(run.spec)
    if assignment.state == AssignmentState.LEASED:
        repository.renew(session, assignment.id, spec.cohort.lease_seconds, None)
        _record(session, "assignment.resumed", f"{client_id} has resumed the assignment", assignment)
    else:
        end = repository.lease_end(spec.cohort.lease_seconds)
        message = f"{client_id} has claimed the assignment"
        won = transition(
            session, assignment, AssignmentState.LEASED, message, leased_at=func.now(), lease_expires_at=end
        )
        assert won, "the row is locked"
    enqueue.wake_watchers(session)
    return _work_item(session, assignment, run, spec)


def heartbeat(session: Session, client_id: str, request: Heartbeat) -> HeartbeatReply:
    """Renew the lease. The reply stops the worker if its assignment has ended. Raises ProblemError."""
    clients.seen(session, client_id)
    if request.assignment_id is None:
        return HeartbeatReply()
    assignment = own_assignment(session, request.assignment_id, client_id)
    if (run := run_rows.get(session, assignment.run_id)) is not None:
        seconds = RunSpec.model_validate(run.spec).cohort.lease_seconds
        if repository.renew(session, assignment.id, seconds, request.progress):
            return HeartbeatReply()
    session.expire(assignment)
    assignment = own_assignment(session, request.assignment_id, client_id)  # it may have ended since it was read
    return HeartbeatReply(carry_on=False, reason=assignment.reason or f"the assignment is {assignment.state}")


def submit(session: Session, client_id: str, request: Submit) -> Submitted:
    """Accept an uploaded update. The same submission again gets the same answer. Raises ProblemError."""
    assignment = _locked_own(session, request.assignment_id, client_id)
    if assignment.state == AssignmentState.ACCEPTED:
        return _accepted_before(session, assignment, request)
    _require_open(session, assignment)
    _require_own_numbers(session, assignment, request)
    if not artifacts.is_uploaded(session, assignment.id, request.update):
        detail = f"artifact {request.update} has not been uploaded for this assignment: upload it with PUT first"
        raise ProblemError("conflict", detail, audit_event=_refused(assignment, detail))
    _require_wanted(session, assignment)
    _accept(session, assignment, request)
    events.once_written(session, functools.partial(_advance_if_last, assignment.run_id, assignment.round_id))
    enqueue.wake_watchers(session)
    return Submitted(assignment_id=assignment.id, state=AssignmentState.ACCEPTED)


def decline(session: Session, client_id: str, request: Decline) -> Submitted:
    """Take an assignment back from a worker that cannot do it. The run's spec decides whether it is offered again."""
    assignment = _locked_own(session, request.assignment_id, client_id)
    if assignment.state == AssignmentState.DECLINED:
        return Submitted(assignment_id=assignment.id, state=AssignmentState.DECLINED)
    _require_open(session, assignment)
    reason = printable(request.reason)
    transition(
        session,
        assignment,
        AssignmentState.DECLINED,
        f"{client_id}: {reason}",
        reason=reason,
        closed_at=func.now(),
    )
    enqueue.advance(session, assignment.run_id)
    enqueue.wake_watchers(session)
    return Submitted(assignment_id=assignment.id, state=AssignmentState.DECLINED)


def ended_runs(session: Session, client_id: str, request: EndedQuery) -> EndedRuns:
    """Return which of the runs have finished or were deleted, without those whose method sends nothing: the state that
    a client keeps of such a run is its result.
    """
    finished = repository.finished_with(session, client_id, request.run_ids)
    return EndedRuns(run_ids=tuple(sorted({*finished, *events.deleted_runs(session, client_id, request.run_ids)})))


def _accept(session: Session, assignment: Assignment, request: Submit) -> None:
    values = {"update_digest": request.update, "num_examples": request.num_examples}
    client_id = assignment.client_id
    transition(session, assignment, AssignmentState.SUBMITTED, f"{client_id}: update submitted", data=values, **values)
    message = f"{client_id}: update of {request.num_examples} images accepted"
    won = transition(session, assignment, AssignmentState.ACCEPTED, message, closed_at=func.now())
    assert won, "the row is locked and was seen leased"
    rounds.replace_metrics(session, assignment.run_id, assignment.round_number, assignment.client_id, request.metrics)


def _advance_if_last(run_id: UUID, round_id: UUID, session: Session) -> None:
    """Advance the run only at the update that its round has waited for: a check per update would find the same."""
    if rounds.has_all_or_enough(session, round_id):
        enqueue.advance(session, run_id)


def _locked_own(session: Session, assignment_id: UUID, client_id: str) -> Assignment:
    """Return the client's assignment, locked. Raises ProblemError like `own_assignment`, also if it is deleted now."""
    assignment = own_assignment(session, assignment_id, client_id)
    if repository.locked(session, assignment_id) is None:
        session.expire(assignment)
    return own_assignment(session, assignment_id, client_id)


def _accepted_before(session: Session, assignment: Assignment, request: Submit) -> Submitted:
    """Return the answer to a submission that was accepted before. Raises ProblemError if this is another one."""
    client_id = assignment.client_id
    by_client = rounds.metrics_by_client(session, assignment.run_id, assignment.round_number, [client_id])
    metrics = {name: value for name, value in by_client[client_id].items() if name not in MEASURES}
    if assignment.update_digest != request.update:
        difference = "another update"
    elif assignment.num_examples != request.num_examples:
        difference = f"this update with num_examples {assignment.num_examples}, not {request.num_examples},"
    elif metrics != request.metrics:
        names = sorted(
            name for name in metrics.keys() | request.metrics if metrics.get(name) != request.metrics.get(name)
        )
        difference = f"this update with other metrics ({', '.join(names)})"
    else:
        return Submitted(assignment_id=assignment.id, state=AssignmentState.ACCEPTED)
    number = assignment.round_number
    detail = f"round {number} has already accepted {difference} of {client_id}, and keeps it: claim new work"
    raise ProblemError("duplicate-update", detail, audit_event=_refused(assignment, detail))


def _require_own_numbers(session: Session, assignment: Assignment, request: Submit) -> None:
    """Raise ProblemError if the client claims more images than it registered, or reports what only the coordinator
    measures."""
    client = clients.get(session, assignment.client_id)
    if client is not None and client.num_images is not None and request.num_examples > client.num_images:
        detail = (
            f"num_examples is {request.num_examples}, and {client.id} registered {client.num_images} images: an update "
            "weighs at most as much. Register again if there are more images now"
        )
        data = {"num_examples": request.num_examples, "num_images": client.num_images}
        raise ProblemError(
            "invalid-request", detail, audit_event=_refused(assignment, detail, "update.weight_refused", data)
        )
    if reserved := sorted(request.metrics.keys() & set(MEASURES)):
        detail = f"the coordinator itself measures {', '.join(reserved)}: submit without them"
        raise ProblemError("invalid-request", detail, audit_event=_refused(assignment, detail))


def _require_open(session: Session, assignment: Assignment) -> None:
    """Raises ProblemError unless the assignment is leased in an open round."""
    current = rounds.get_one(session, assignment.round_id)
    if assignment.state == AssignmentState.LEASED and current.state == RoundState.OPEN:
        return
    if current.state != RoundState.OPEN:
        detail = f"round {current.number} is no longer open: this came too late and changes nothing; claim new work"
        raise ProblemError("round-closed", detail, audit_event=_refused(assignment, detail))
    detail = f"the assignment is {assignment.state}" + (f" ({assignment.reason})" if assignment.reason else "")
    raise ProblemError("lease-lost", f"{detail}: claim again", audit_event=_refused(assignment, detail))


def _require_wanted(session: Session, assignment: Assignment) -> None:
    """Raise ProblemError if the round has as many updates as it closes with, and the aggregator has not closed it yet.

    If two updates at once would be the last, one waits here for the other.
    """
    current = rounds.get_one(session, assignment.round_id)
    if current.num_wanted is not None and rounds.has_enough(session, rounds.locked(session, current.id)):
        detail = (
            f"round {current.number} closes with the first {current.num_wanted} updates, and has them: this one came "
            "too late and changes nothing; claim new work"
        )
        raise ProblemError("round-closed", detail, audit_event=_refused(assignment, detail))


def _work_item(session: Session, assignment: Assignment, run: Run, spec: RunSpec) -> WorkItem:
    current = rounds.get_one(session, assignment.round_id)
    newest = repository.newest_accepted(session, run.id, assignment.client_id)
    return WorkItem(
        assignment_id=assignment.id,
        run_id=run.id,
        round_number=assignment.round_number,
        client_id=assignment.client_id,
        spec=spec,
        method_version=run.method_version,
        plan=ArtifactPlan.model_validate(run.plan),
        broadcast=current.broadcast,
        last_accepted=AcceptedUpdate(round_number=newest.round_number, update=newest.update_digest)
        if newest is not None and newest.update_digest is not None
        else None,
        dimensions=dimensions.of_client(session, run.id, assignment.client_id),
        lease_seconds=spec.cohort.lease_seconds,
        round_deadline=current.deadline,
    )


def _refused(
    assignment: Assignment, detail: str, kind: str = "assignment.refused", data: dict[str, Any] | None = None
) -> AuditEvent:
    return AuditEvent(kind, detail, assignment.run_id, assignment.round_number, assignment.client_id, data or {})


def _record(session: Session, kind: str, message: str, assignment: Assignment) -> None:
    record(
        session,
        kind,
        message,
        run_id=assignment.run_id,
        round_number=assignment.round_number,
        client_id=assignment.client_id,
        data={"assignment": str(assignment.id)},
    )
