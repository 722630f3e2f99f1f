"""Shows clients and revokes them."""

from sqlalchemy.orm import Session

from fedssl.protocol.states import AssignmentState
from fedssl.protocol.views import ClientView
from fedssl_coordinator.clients import repository
from fedssl_coordinator.events.repository import record
from fedssl_coordinator.models import Client
from fedssl_coordinator.problems import ProblemError
from fedssl_coordinator.rounds import repository as rounds


def view(client: Client) -> ClientView:
    return ClientView.model_validate(client, from_attributes=True)


def show(session: Session, client_id: str) -> ClientView:
    """Raises ProblemError where there is no such client."""
    client = repository.get(session, client_id)
    if client is None:
        raise ProblemError("not-found", f"no client {client_id}")
    return view(client)


def revoke(session: Session, client_id: str) -> ClientView:
    """From now on the client's tokens open nothing, and no round counts on it."""
    show(session, client_id)
    repository.revoke(session, client_id)
    for assignment in rounds.live_assignments_of_client(session, client_id):
        rounds.end_assignment(session, assignment, AssignmentState.EXPIRED, "the client was revoked")
    record(session, "client.revoked", f"client {client_id} was revoked", client_id=client_id)
    session.expire_all()
    return show(session, client_id)
