"""A worker's messages in a secure round, and what it needs for the next one."""

from uuid import UUID

from sqlalchemy.orm import Session

from fedssl.protocol.secure_work import SecureStatus, SecureSubmission, SecureVector
from fedssl.protocol.states import AssignmentState, RoundState
from fedssl_coordinator.core.models import Assignment, Round
from fedssl_coordinator.federation.secure_rounds import service as secure_rounds
from fedssl_coordinator.federation.work.refusals import lease_lost, not_uploaded, refused, round_closed
from fedssl_coordinator.storage.artifacts import repository as artifacts
from fedssl_coordinator.storage.artifacts.service import own_assignment


def send(session: Session, client_id: str, request: SecureSubmission) -> SecureStatus:
    """Store a message, and return the phase. The same message again gets the same answer. Raises ProblemError."""
    assignment, current = _own(session, request.assignment_id, client_id)
    if current.state != RoundState.OPEN:
        raise round_closed(assignment)
    if assignment.state == AssignmentState.EXPIRED:
        detail = f"this came too late and changes nothing: {assignment.reason or 'the lease has ended'}; claim new work"
        raise refused(assignment, "round-closed", detail)
    _require_leased(assignment)
    message = request.message
    if isinstance(message, SecureVector) and not artifacts.is_uploaded(session, assignment.id, message.update):
        raise not_uploaded(assignment, message.update)
    secure_rounds.receive(session, current, assignment, message)
    return secure_rounds.status(session, current.id, client_id)


def status(session: Session, client_id: str, assignment_id: UUID) -> SecureStatus:
    """Return the phase of the assignment's round. Raises ProblemError."""
    assignment, current = _own(session, assignment_id, client_id)
    if current.state == RoundState.OPEN:
        _require_leased(assignment)
    return secure_rounds.status(session, current.id, client_id, is_open=current.state == RoundState.OPEN)


def _own(session: Session, assignment_id: UUID, client_id: str) -> tuple[Assignment, Round]:
    assignment, current, run = own_assignment(session, assignment_id, client_id)
    if not run.spec.get("secure_aggregation"):
        raise refused(assignment, "conflict", "the run has no secure aggregation: submit the update")
    return assignment, current


def _require_leased(assignment: Assignment) -> None:
    if assignment.state != AssignmentState.LEASED:
        raise lease_lost(assignment)
