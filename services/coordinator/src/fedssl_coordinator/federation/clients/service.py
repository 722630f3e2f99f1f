"""Shows clients and revokes them."""

from sqlalchemy import func
from sqlalchemy.orm import Session

from fedssl.protocol.states import AssignmentState
from fedssl.protocol.views import ClientEdit, ClientView
from fedssl_coordinator.core import enqueue
from fedssl_coordinator.core.audit import record
from fedssl_coordinator.core.models import Client
from fedssl_coordinator.core.problems import ProblemError
from fedssl_coordinator.federation.rounds import repository as rounds
from fedssl_coordinator.federation.site_evaluations import service as site_evaluations
from fedssl_coordinator.federation.transitions import transition
from fedssl_coordinator.identity import clients


def view(client: Client) -> ClientView:
    found = {name: getattr(client, name) for name in ClientView.model_fields}
    return ClientView.model_validate(found | clients.declarations(client))


def show(session: Session, client_id: str) -> ClientView:
    """Return the view of a client. Raises ProblemError if it does not exist."""
    client = clients.get(session, client_id)
    if client is None:
        raise _not_found(client_id)
    return view(client)


def edit(session: Session, client_id: str, request: ClientEdit) -> ClientView:
    """Change a client's display name. Raises ProblemError if it does not exist."""
    if (client := clients.get(session, client_id)) is None:
        raise _not_found(client_id)
    if client.display_name != request.display_name:
        clients.set_display_name(session, client, request.display_name)
        data = {"display_name": request.display_name}
        record(session, "client.edited", f"{client_id}: new display name", client_id=client_id, data=data)
    return view(client)


def confirm_identity(session: Session, client_id: str, identity: str) -> ClientView:
    """Allow a client to take part in secure rounds with its new identity key.

    Raises ProblemError if its worker has announced another one.
    """
    if (client := clients.get(session, client_id)) is None:
        raise _not_found(client_id)
    if client.announced_identity != identity:
        announced = client.announced_identity or "none"
        raise ProblemError("conflict", f"the worker of {client_id} has announced {announced}: confirm that key")
    if client.identity != identity:
        data = {"identity": identity, "before": client.identity}
        clients.confirm_identity(session, client, identity)
        record(session, "client.identity_confirmed", f"{client_id}: {identity}", client_id=client_id, data=data)
        enqueue.wake_watchers(session)
    return view(client)


def revoke(session: Session, client_id: str) -> ClientView:
    """Revoke a client: its tokens become invalid, and no round waits for it. Its accepted updates stay."""
    if (shown := show(session, client_id)).revoked_at is not None:
        return shown
    client = clients.revoke(session, client_id)
    record(session, "client.revoked", f"client {client_id} was revoked", client_id=client_id)
    reason = "the client was revoked"
    for assignment in rounds.locked_live(session, client_id=client_id):
        message = f"{client_id}: {reason}"
        transition(session, assignment, AssignmentState.EXPIRED, message, reason=reason, closed_at=func.now())
        enqueue.advance(session, assignment.run_id)
    site_evaluations.expire_of_client(session, client_id, reason)
    enqueue.wake_watchers(session)
    enqueue.wake_workers(session)  # ends a claim that waits for work
    return view(client)


def _not_found(client_id: str) -> ProblemError:
    return ProblemError("not-found", f"no client {client_id}: the list of clients has all that you may see")
