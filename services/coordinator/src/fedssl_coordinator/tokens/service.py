"""Makes and revokes tokens."""

from uuid import UUID

from sqlalchemy.orm import Session

from fedssl.protocol.views import TokenCreate, TokenCreated, TokenView
from fedssl_coordinator.auth import hash_secret, new_secret
from fedssl_coordinator.clients import repository as clients
from fedssl_coordinator.events.repository import record
from fedssl_coordinator.models import Token
from fedssl_coordinator.problems import ProblemError
from fedssl_coordinator.tokens import repository


def create(session: Session, request: TokenCreate) -> TokenCreated:
    """A new token; a worker's makes its client known. The secret is in this answer and nowhere else."""
    if (request.role == "worker") != (request.client_id is not None):
        raise ProblemError("invalid-request", "a worker's token needs a client_id; an operator's has none")
    if request.client_id is not None:
        client = clients.get_or_create(session, request.client_id)
        if client.revoked_at is not None:
            raise ProblemError("conflict", f"client {client.id} is revoked; enrol the owner under a new name")
    secret = new_secret()
    token = Token(role=request.role, client_id=request.client_id, label=request.label, secret_hash=hash_secret(secret))
    repository.add(session, token)
    record(session, "token.created", f"a token for {request.client_id or 'an operator'}", client_id=request.client_id)
    return TokenCreated(**view(token).model_dump(), secret=secret)


def view(token: Token) -> TokenView:
    return TokenView.model_validate(token, from_attributes=True)


def revoke(session: Session, token_id: UUID) -> None:
    """From now on the token opens nothing."""
    if not repository.revoke(session, token_id):
        raise ProblemError("not-found", f"no token {token_id}")
    record(session, "token.revoked", f"token {token_id} opens nothing any more")
