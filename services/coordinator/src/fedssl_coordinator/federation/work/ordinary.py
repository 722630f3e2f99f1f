"""The ordinary case of a worker's requests, in few statements. `service` decides every other case.

Each function returns None if the case is not ordinary. The answers, rows and events are those of `service`.
"""

from typing import NamedTuple
from uuid import UUID

from sqlalchemy.exc import NoResultFound
from sqlalchemy.orm import Session

from fedssl.protocol.ledger import SentBroadcast
from fedssl.protocol.measures import MEASURES
from fedssl.protocol.secure_work import SECURE_PROTOCOL
from fedssl.protocol.states import AssignmentState
from fedssl.protocol.work import AcceptedUpdate, Heartbeat, Submit, Submitted, WorkItem
from fedssl_coordinator.core import enqueue
from fedssl_coordinator.core.db import transaction
from fedssl_coordinator.core.logs import say_about
from fedssl_coordinator.core.models import Assignment
from fedssl_coordinator.federation import run_rows
from fedssl_coordinator.federation.dimensions import repository as dimensions
from fedssl_coordinator.federation.ledger_anchors import service as anchors
from fedssl_coordinator.federation.ledger_anchors.repository import Extension
from fedssl_coordinator.federation.rounds import repository as rounds
from fedssl_coordinator.federation.run_rows import Definition
from fedssl_coordinator.federation.secure_rounds import service as secure_rounds
from fedssl_coordinator.federation.transitions import Passed, kinds_of
from fedssl_coordinator.federation.work import ordinary_repository as repository
from fedssl_coordinator.federation.work.ordinary_repository import Offer
from fedssl_coordinator.identity.tokens.repository import SeenWorker
from fedssl_coordinator.storage.artifacts.service import MAX_UPLOADS, UpdatePermit, require_stored


def claim(secret_hash: str) -> tuple[SeenWorker, WorkItem | None] | None:
    """Lease a worker's oldest offer, and return the worker and the work, which is None if there is nothing to claim.

    Needs no transaction: it is one statement. If its answer is lost, or cannot be made, the worker's next claim resumes
    the lease.
    """
    [kind] = kinds_of(Assignment, AssignmentState.OFFERED, AssignmentState.LEASED)
    leased = repository.lease(secret_hash, [{"kind": kind, "message": " has claimed the assignment", "data": {}}])
    if leased is None:
        return None
    worker, offer = leased
    if offer is None:
        return worker, None
    if not offer.was_offered:  # a worker that has started again resumes its lease
        return None
    client_id = worker.client_id
    say_about(client=client_id, run=str(offer.run_id), round=offer.round_number)
    enqueue.wake_watchers_now()
    return worker, _offered(client_id, offer)


def heartbeat(secret_hash: str, request: Heartbeat) -> SeenWorker | None:
    """Renew a lease, and return its worker. Needs no transaction: it is one statement."""
    if request.assignment_id is None or request.state_lost is not None or request.anchor is not None:
        return None
    renewal = repository.renew(secret_hash, request.assignment_id, request.progress, request.resources)
    if renewal is None:
        return None
    say_about(client=renewal.worker.client_id, run=str(renewal.run_id), round=renewal.round_number)
    return renewal.worker


def permit(secret_hash: str, request: Submit) -> tuple[SeenWorker, UpdatePermit] | None:
    """Return the worker and what it may send, if the assignment awaits this update's bytes. Needs no transaction."""
    awaited = repository.awaited(secret_hash, request.assignment_id, request.update, MAX_UPLOADS)
    if awaited is None or not _has_own_metrics(request):
        return None
    if awaited.num_images is None or request.num_examples > awaited.num_images:
        return None
    client_id = awaited.worker.client_id
    say_about(client=client_id, run=str(awaited.run_id), round=awaited.round_number)
    definition = run_rows.known_definition(awaited.run_id)
    if definition.spec.secure_aggregation is not None:
        return None
    about = (request.assignment_id, awaited.run_id, awaited.round_number, client_id)
    return awaited.worker, UpdatePermit(*about, definition.update_form)


class Accepted(NamedTuple):
    """A worker whose update was accepted, what it had received, and its anchor, if that has extended its ledger."""

    worker: SeenWorker
    sent: SentBroadcast
    extension: Extension | None
    submitted: Submitted


def accept(session: Session, secret_hash: str, request: Submit, num_bytes: int) -> Accepted | None:
    """Accept an update that has arrived and is in the store. Raises ProblemError if it was removed meanwhile."""
    if not _has_own_metrics(request):
        return None
    accepted = repository.accept(session, secret_hash, request, num_bytes, MAX_UPLOADS)
    if accepted is None:
        return None
    require_stored(request.update)
    client_id = accepted.worker.client_id
    say_about(client=client_id, run=str(accepted.run_id), round=accepted.round_number)
    steps = steps_to_acceptance("", request)
    kinds = kinds_of(Assignment, AssignmentState.LEASED, *[step.state for step in steps])
    events = [
        {"kind": kind, "message": message, "data": data or {}}
        for kind, (_, message, data) in zip(kinds, steps, strict=True)
    ]
    anchor = request.anchor if anchors.has_room(client_id) else None
    extension = repository.append(session, request.assignment_id, accepted, events, anchor)
    advance_if_last(accepted.run_id, accepted.round_id, session)  # once events are written: see `audit.once_written`
    enqueue.wake_watchers(session)
    sent = SentBroadcast(run=accepted.run_id, round=accepted.round_number, broadcast=accepted.broadcast)
    submitted = Submitted(assignment_id=request.assignment_id, state=AssignmentState.ACCEPTED)
    return Accepted(accepted.worker, sent, extension, submitted)


def steps_to_acceptance(client_id: str, request: Submit) -> tuple[Passed, Passed]:
    """Return the states that an assignment passes when its update is accepted, each with its event."""
    data = {"update_digest": request.update, "num_examples": request.num_examples}
    return (
        Passed(AssignmentState.SUBMITTED, f"{client_id}: update submitted", data),
        Passed(AssignmentState.ACCEPTED, f"{client_id}: update of {request.num_examples} images accepted"),
    )


def advance_if_last(run_id: UUID, round_id: UUID, session: Session) -> None:
    """Advance the run only with the update that its round has waited for: more checks would find nothing else."""
    if rounds.has_all_or_enough(session, round_id):
        enqueue.advance(session, run_id)


def advance_or_begin(run_id: UUID, round_id: UUID, session: Session) -> None:
    """Advance the run if this was the last update, or have it added to the round's mean.

    This is for updates that arrive without their submission, which are so large that reading them takes longer than a
    message.
    """
    if rounds.has_all_or_enough(session, round_id):
        enqueue.advance(session, run_id)
    else:
        enqueue.begin_mean(session, run_id)


def _has_own_metrics(request: Submit) -> bool:
    """Return whether the client reports nothing that only the coordinator measures."""
    return not request.metrics.keys() & set(MEASURES)


def _offered(client_id: str, offer: Offer) -> WorkItem | None:
    """Return the work that was leased, or None if its run was deleted since."""
    try:
        definition = run_rows.known_definition(offer.run_id, offer.num_rounds)
        spec = definition.spec
        if spec.method.dimensions_wanted(spec.model) is None and spec.secure_aggregation is None:
            return work_item(None, client_id, offer, definition)
        with transaction() as session:
            return work_item(session, client_id, offer, definition)
    except NoResultFound:
        return None


def work_item(session: Session | None, client_id: str, offer: Offer, definition: Definition) -> WorkItem:
    """Return the work that was leased. A run with dimensions or secure rounds needs a session."""
    own_dimensions = context = newest = None
    spec = definition.spec
    if session is not None:
        if spec.method.dimensions_wanted(spec.model) is not None:
            own_dimensions = dimensions.of_client(session, offer.run_id, client_id)
        if spec.secure_aggregation is not None:
            context = secure_rounds.context_of(session, offer.run_id, offer.round_number)
    if offer.newest_round is not None and offer.newest_update is not None:
        newest = AcceptedUpdate(round_number=offer.newest_round, update=offer.newest_update)
    return WorkItem(
        assignment_id=offer.assignment_id,
        run_id=offer.run_id,
        round_number=offer.round_number,
        client_id=client_id,
        spec=spec,
        method_version=definition.method_version,
        plan=definition.plan,
        broadcast=offer.broadcast,
        frozen=offer.frozen,
        last_accepted=newest,
        dimensions=own_dimensions,
        secure_cohort=None if context is None else secure_rounds.cohort(context),
        secure_protocol=None if context is None else SECURE_PROTOCOL,
        total_bits=None if context is None else context.total_bits,
        lease_seconds=spec.cohort.lease_seconds,
        round_deadline=offer.deadline,
    )
