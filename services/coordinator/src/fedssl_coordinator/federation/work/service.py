"""Leases: granted, renewed, turned into an accepted update, or returned."""

import functools
from typing import Any
from uuid import UUID

from sqlalchemy import func
from sqlalchemy.orm import Session

from fedssl.protocol.base import PROTOCOL_VERSION
from fedssl.protocol.measures import MEASURES
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.states import AssignmentState, RoundState, RunState
from fedssl.protocol.work import (
    Decline,
    EndedQuery,
    EndedRuns,
    Heartbeat,
    HeartbeatReply,
    Register,
    Registered,
    StateLost,
    Submit,
    Submitted,
    WorkItem,
)
from fedssl_coordinator.core import audit as events
from fedssl_coordinator.core import enqueue
from fedssl_coordinator.core.audit import record
from fedssl_coordinator.core.db import from_now
from fedssl_coordinator.core.logs import say_about
from fedssl_coordinator.core.models import Assignment, Client, Round, Run
from fedssl_coordinator.core.problems import AuditEvent, ProblemError, printable
from fedssl_coordinator.core.run_documents import spec_of
from fedssl_coordinator.federation import run_rows
from fedssl_coordinator.federation.rounds import repository as rounds
from fedssl_coordinator.federation.rounds import round_metrics
from fedssl_coordinator.federation.transitions import about, pause, transition
from fedssl_coordinator.federation.work import ordinary, repository
from fedssl_coordinator.federation.work.ordinary_repository import Offer
from fedssl_coordinator.federation.work.refusals import lease_lost, not_uploaded, refused, round_closed
from fedssl_coordinator.identity import clients
from fedssl_coordinator.identity.clients import Earlier
from fedssl_coordinator.storage.artifacts import repository as artifacts
from fedssl_coordinator.storage.artifacts import service as uploads
from fedssl_coordinator.storage.artifacts.service import UpdatePermit, foreign_assignment, own_assignment

STATE_LOST = "client.state_lost"


def register(session: Session, client_id: str, request: Register) -> Registered:
    """Store the worker's description of itself, and advance runs that may have waited for it. Raises ProblemError."""
    if request.protocol_version != PROTOCOL_VERSION:
        detail = f"the worker uses protocol {request.protocol_version}, the coordinator {PROTOCOL_VERSION}: update one"
        raise ProblemError(
            "invalid-request", detail, audit_event=AuditEvent("client.refused", detail, client_id=client_id)
        )
    _require_own_identity(session, client_id, request.identity)
    before = clients.register(session, client_id, request)
    _record_identity(session, client_id, request.identity, before)
    if None not in (before.num_images, request.num_images) and before.num_images != request.num_images:
        message = f"{client_id} registered with {request.num_images} images, and with {before.num_images} before"
        data = {"before": before.num_images, "after": request.num_images}
        record(session, "client.images_changed", message, client_id=client_id, data=data)
    repository.end_pauses(session, client_id)  # a restarted worker may now have what it lacked
    encoder = "" if request.encoder is None else f", encoder {request.encoder}"
    images = "number of images kept" if request.num_images is None else f"{request.num_images} images"
    message = f"{images}, {request.device}, worker {request.worker_version}{encoder}"
    record(session, "client.registered", message, client_id=client_id)
    for run_id in run_rows.awaiting_clients(session, clients.num_eligible()):
        enqueue.advance(session, run_id)
    return Registered(client_id=client_id)


def pause_run(session: Session, run_id: UUID, reason: str) -> None:
    """Pause a run if it is running."""
    run = run_rows.locked(session, run_id)
    if run is not None and run.state == RunState.RUNNING:
        pause(session, run, reason)
        enqueue.wake_watchers(session)


def _require_own_identity(session: Session, client_id: str, announced: str | None) -> None:
    """Raise ProblemError if the key is new for this client and another one has it: it would keep both of them out of
    secure rounds. A key that this client has already announced stays its own."""
    if announced is None:
        return
    client = clients.locked(session, client_id)
    if announced in (client.identity, client.announced_identity):
        return
    if (other := clients.owner_of_identity(session, client, announced)) is not None:
        message = f"{client_id} announced the identity key of {other}, {announced}: its registration was refused"
        data = {"identity": announced, "client": other}
        raise ProblemError(
            "conflict",
            "another client of this project has the identity key of this worker: each client needs a state folder of "
            "its own. If this one was copied, delete its file identity.pem and start the worker again",
            audit_event=AuditEvent("client.identity_refused", message, client_id=client_id, data=data),
        )


def _record_identity(session: Session, client_id: str, announced: str | None, before: Earlier) -> None:
    if announced is None or announced in (before.identity, before.announced_identity):
        return
    if before.identity is None:
        message, data = f"{client_id} has the identity key {announced}", {"identity": announced}
        record(session, "client.identity", message, client_id=client_id, data=data)
        return
    message = (
        f"{client_id} announced another identity key, {announced}: it takes part in no secure round until an "
        "administrator has confirmed the key with its owner"
    )
    data = {"identity": announced, "before": before.identity}
    record(session, "client.identity_changed", message, client_id=client_id, data=data)


def claim(session: Session, client_id: str) -> WorkItem | None:
    """Lease the client's next assignment. A restarted worker gets the one that it still holds."""
    found = repository.claimable(session, client_id)
    if found is None:
        return None
    assignment, run, current = found
    say_about(run=str(run.id), round=current.number)
    spec = spec_of(run)
    if assignment.state == AssignmentState.LEASED:
        repository.renew(session, assignment.id, client_id)
        assignment.lost_round = None  # the worker reports the loss again if the state was not restored
        _record(session, "assignment.resumed", f"{client_id} has resumed the assignment", assignment)
    else:
        end = from_now(spec.cohort.lease_seconds)
        message = f"{client_id} has claimed the assignment"
        won = transition(
            session, assignment, AssignmentState.LEASED, message, leased_at=func.now(), lease_expires_at=end
        )
        assert won, "the row is locked"
    enqueue.wake_watchers(session)
    return _work_item(session, assignment, run, current, spec.num_rounds)


def heartbeat(session: Session, client_id: str, request: Heartbeat) -> HeartbeatReply:
    """Renew the lease. The reply stops the worker if its assignment has ended. Raises ProblemError."""
    if request.assignment_id is None:
        return HeartbeatReply()
    if request.state_lost is not None:
        assignment, *_ = own_assignment(session, request.assignment_id, client_id)
        if (reply := _record_loss(session, assignment, request.state_lost)) is not None:
            return reply
    renewed = repository.renew(session, request.assignment_id, client_id, request.progress, request.resources)
    if renewed is not None:
        say_about(run=str(renewed.run_id), round=renewed.round_number)
        return HeartbeatReply()
    assignment, *_ = own_assignment(session, request.assignment_id, client_id)
    return HeartbeatReply(carry_on=False, reason=assignment.reason or f"the assignment is {assignment.state}")


def check_before_delivery(session: Session, permit: UpdatePermit, request: Submit) -> None:
    """Raise ProblemError if `submit` would refuse the numbers, so that the update's bytes are not read.

    Bytes whose submission is refused are in the store already, and nothing would limit how many.
    """
    _require_plain(session, permit)
    _require_own_numbers(permit, repository.num_images(session, permit.client_id), request)


def submit(session: Session, client_id: str, request: Submit, num_bytes: int | None = None) -> Submitted:
    """Accept an uploaded update. The same submission again gets the same answer. Raises ProblemError.

    `num_bytes`: the size of the update if it arrived with the submission, and is in the store.
    """
    if num_bytes is not None:
        uploads.record_arrival(session, request.update, num_bytes)
    assignment, client = _locked_own(session, request.assignment_id, client_id)
    if assignment.state == AssignmentState.ACCEPTED:
        return _accepted_before(session, assignment, request)
    current = _require_open(session, assignment)
    _require_plain(session, assignment)
    _require_own_numbers(assignment, client.num_images, request)
    if num_bytes is not None:
        uploads.add_upload(session, assignment.id, request.update)
    elif not artifacts.is_uploaded(session, assignment.id, request.update):
        raise not_uploaded(assignment, request.update)
    _require_wanted(session, assignment, current)
    _accept(session, assignment, request)
    follow = ordinary.advance_if_last if num_bytes is not None else ordinary.advance_or_begin
    events.once_written(session, functools.partial(follow, assignment.run_id, assignment.round_id))
    enqueue.wake_watchers(session)
    return Submitted(assignment_id=assignment.id, state=AssignmentState.ACCEPTED)


def decline(session: Session, client_id: str, request: Decline) -> Submitted:
    """Take an assignment back from a worker that cannot do it. The run's spec decides whether it is offered again."""
    assignment, _ = _locked_own(session, request.assignment_id, client_id)
    if assignment.state == AssignmentState.DECLINED:
        return Submitted(assignment_id=assignment.id, state=AssignmentState.DECLINED)
    _require_open(session, assignment)
    reason = printable(request.reason)
    transition(
        session,
        assignment,
        AssignmentState.DECLINED,
        f"{client_id}: {reason}",
        data=None if request.cause is None else {"cause": request.cause},
        reason=reason,
        cause=request.cause,
        closed_at=func.now(),
    )
    enqueue.advance(session, assignment.run_id)
    enqueue.wake_watchers(session)
    return Submitted(assignment_id=assignment.id, state=AssignmentState.DECLINED)


def _record_loss(session: Session, assignment: Assignment, lost: StateLost) -> HeartbeatReply | None:
    """Record that a client has lost its state. Returns None if it may train without it, or the reply that stops it.

    A loss that was reported before does not pause the run again: by resuming it, the operator has accepted the loss.
    """
    run = run_rows.locked(session, assignment.run_id)
    newest = None if run is None else run_rows.newest_accepted(session, run, assignment.client_id)
    if run is None or newest is None or newest.round_number != lost.round_number:
        return None
    if not repository.set_lost_round(session, assignment.id, lost.round_number):
        return None
    client_id, data = assignment.client_id, {"accepted_round": lost.round_number}
    if events.has(session, run.id, STATE_LOST, client_id, data):
        return None
    spec = spec_of(run)
    is_pausing = spec.cohort.on_lost_state == "pause"
    consequence = "the run is paused" if is_pausing else _consequence(spec, run)
    message = f"{client_id}: its client state of round {lost.round_number} is {lost.reason}; {consequence}"
    found = {**data, "reason": lost.reason, "consequence": consequence}
    record(session, STATE_LOST, message, **about(assignment, found))
    enqueue.wake_watchers(session)
    if not is_pausing:
        return None
    what_next = f"restore it at the client and resume the run, or resume it without: {_consequence(spec, run)}"
    pause(session, run, f"{client_id}: its client state of round {lost.round_number} is {lost.reason}; {what_next}")
    return HeartbeatReply(carry_on=False, reason=f"the run is paused: {message}")


def _consequence(spec: RunSpec, run: Run) -> str:
    """Return the consequence for the run if a client starts cold. docs/operations/runs.md explains it per method."""
    if spec.method.restarts_states:
        return (
            "it starts cold, and in the round that uses its update the control variates of all clients restart from 0"
        )
    if run.plan is not None and not run.plan["update"]:
        return "it starts again from the weights before training, because this method keeps them only at the client"
    return "it starts cold, from the broadcast"


def ended_runs(session: Session, client_id: str, request: EndedQuery) -> EndedRuns:
    """Return which of the runs have finished or were deleted, without those whose method sends nothing: the state that
    a client keeps of such a run is its result.
    """
    finished = repository.finished_with(session, client_id, request.run_ids)
    return EndedRuns(run_ids=tuple(sorted({*finished, *events.deleted_runs(session, client_id, request.run_ids)})))


def _accept(session: Session, assignment: Assignment, request: Submit) -> None:
    submitted, accepted = ordinary.steps_to_acceptance(assignment.client_id, request)
    values: dict[str, Any] = {"update_digest": request.update, "num_examples": request.num_examples}
    values["closed_at"] = func.now()
    won = transition(session, assignment, AssignmentState.ACCEPTED, accepted.message, via=submitted, **values)
    assert won, "the row is locked and was seen leased"
    store = round_metrics.insert if assignment.attempt == 1 else round_metrics.replace
    store(session, assignment.run_id, assignment.round_number, assignment.client_id, request.metrics)


def _locked_own(session: Session, assignment_id: UUID, client_id: str) -> tuple[Assignment, Client]:
    """Return the client's assignment, locked, and the client. Raises ProblemError like `own_assignment`."""
    found = repository.locked(session, assignment_id, client_id)
    if found is None:
        raise foreign_assignment(assignment_id, client_id)
    say_about(run=str(found[0].run_id), round=found[0].round_number)
    return found


def _accepted_before(session: Session, assignment: Assignment, request: Submit) -> Submitted:
    """Return the answer to a submission that was accepted before. Raises ProblemError if this is another one."""
    client_id = assignment.client_id
    by_client = round_metrics.by_client(session, assignment.run_id, assignment.round_number, [client_id])
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
    raise refused(assignment, "duplicate-update", detail)


def _require_own_numbers(subject: Assignment | UpdatePermit, num_images: int | None, request: Submit) -> None:
    """Raise ProblemError if the client claims more images than it registered, or reports what only the coordinator
    measures."""
    if num_images is None or request.num_examples > num_images:
        registered = "keeps its number of images" if num_images is None else f"registered {num_images} images"
        detail = (
            f"num_examples is {request.num_examples}, and {subject.client_id} {registered}: an update weighs at most "
            "as much as was registered. Register again, with the number of images"
        )
        data = {"num_examples": request.num_examples, "num_images": num_images}
        raise refused(subject, "invalid-request", detail, "update.weight_refused", data)
    if reserved := sorted(request.metrics.keys() & set(MEASURES)):
        detail = f"the coordinator itself measures {', '.join(reserved)}: submit without them"
        raise refused(subject, "invalid-request", detail)


def _require_plain(session: Session, subject: Assignment | UpdatePermit) -> None:
    """Raise ProblemError if the update may only be sent as a masked vector."""
    if run_rows.definition(session, subject.run_id).spec.secure_aggregation is not None:
        detail = "the run has secure aggregation: send a masked vector with POST /v1/work/secure/send, and no update"
        raise refused(subject, "conflict", detail)


def _require_open(session: Session, assignment: Assignment) -> Round:
    """Return the assignment's round. Raises ProblemError unless it is open, and the assignment is leased."""
    current = rounds.get_one(session, assignment.round_id)
    if current.state != RoundState.OPEN:
        raise round_closed(assignment)
    if assignment.state != AssignmentState.LEASED:
        raise lease_lost(assignment)
    return current


def _require_wanted(session: Session, assignment: Assignment, current: Round) -> None:
    """Raise ProblemError if the round has as many updates as it closes with, and the aggregator has not closed it yet.

    If either of two simultaneous updates would be the last, one waits here for the other.
    """
    if current.num_wanted is not None and rounds.has_enough(session, rounds.locked(session, current.id)):
        detail = (
            f"round {current.number} closes with the first {current.num_wanted} updates, and has them: this one came "
            "too late and changes nothing; claim new work"
        )
        raise refused(assignment, "round-closed", detail)


def _work_item(session: Session, assignment: Assignment, run: Run, current: Round, num_rounds: int) -> WorkItem:
    newest = run_rows.newest_accepted(session, run, assignment.client_id) if current.number > 1 else None
    offer = Offer(
        assignment_id=assignment.id,
        run_id=run.id,
        round_number=assignment.round_number,
        broadcast=current.broadcast,
        frozen=run.frozen,
        deadline=current.deadline,
        was_offered=False,
        num_rounds=num_rounds,
        newest_round=None if newest is None else newest.round_number,
        newest_update=None if newest is None else newest.update,
    )
    return ordinary.work_item(session, assignment.client_id, offer, run_rows.definition(session, run.id, num_rounds))


def _record(session: Session, kind: str, message: str, assignment: Assignment) -> None:
    record(session, kind, message, **about(assignment))
