"""Makes and revokes tokens, and turns an enrolment into a worker's token, once."""

from uuid import UUID

from sqlalchemy.orm import Session

from fedssl.protocol.tokens import Role
from fedssl.protocol.views import EnrolmentCreate, TokenCreate, TokenCreated, TokenView
from fedssl.protocol.work import Enrol, Enrolled
from fedssl_coordinator.core import enqueue
from fedssl_coordinator.core.audit import record
from fedssl_coordinator.core.models import Token
from fedssl_coordinator.core.problems import AuditEvent, ProblemError
from fedssl_coordinator.identity import clients
from fedssl_coordinator.identity.authentication import Caller, hash_secret, new_secret, require_still
from fedssl_coordinator.identity.tokens import repository


def create(session: Session, request: TokenCreate) -> TokenCreated:
    """A new token; a worker's makes its client known. The secret is in this answer and nowhere else."""
    if (request.role == "worker") != (request.client_id is not None):
        raise ProblemError("invalid-request", "client_id: a worker's token needs one; every other has none")
    if request.client_id is not None:
        _require_welcome(session, request.client_id)
    token = Token(role=request.role, client_id=request.client_id, label=request.label)
    return _add(session, token, request.lifetime_seconds)


def enrol(session: Session, caller: Caller, request: EnrolmentCreate) -> TokenCreated:
    """A token that makes somebody the client's worker, once. It takes the place of an unused one of the client.

    Whoever is enrolled speaks for the client. So operators bring clients in, and only admins let somebody take over
    from a worker that there has been.
    """
    _require_welcome(session, request.client_id)
    if caller.role != Role.ADMIN and repository.has_worker(session, request.client_id):
        detail = f"client {request.client_id} has had a worker: only an admin's token may enrol another for it"
        raise ProblemError("forbidden", detail)
    repository.revoke_open_enrolments(session, request.client_id)
    token = Token(role=Role.ENROLMENT, client_id=request.client_id, label=request.label)
    return _add(session, token, request.lifetime_seconds)


def redeem(session: Session, caller: Caller, request: Enrol) -> tuple[Enrolled, bool]:
    """The worker's token that an enrolment becomes, and whether it is new.

    The worker has made the token's secret, so it may repeat itself when the answer was lost. Raises ProblemError for
    anybody else who shows the enrolment afterwards.
    """
    assert caller.client_id is not None, "an enrolment has a client"
    clients.locked(session, caller.client_id)
    require_still(session, caller)
    if repository.use(session, caller.token_id):
        token_id = repository.add_enrolled(session, session.get_one(Token, caller.token_id), request.token_hash)
        if token_id is None:
            raise ProblemError("conflict", "there is a token with this hash: make a new secret, and enrol with that")
        record(session, "client.enrolled", f"{caller.client_id} has a worker", client_id=caller.client_id,
               data={"token": str(token_id), "enrolment": str(caller.token_id)})  # fmt: skip
        return Enrolled(client_id=caller.client_id, token_id=token_id), True
    found = repository.enrolled(session, caller.token_id)
    if found is None or found.secret_hash != request.token_hash:
        raise _used_before(caller)
    return Enrolled(client_id=caller.client_id, token_id=found.id), False


def view(token: Token) -> TokenView:
    return TokenView.model_validate(token, from_attributes=True)


def revoke(session: Session, token_id: UUID) -> None:
    """From now on the token opens nothing; what was opened with it and waits, a claim or a stream, ends."""
    if not repository.revoke(session, token_id):
        raise ProblemError("not-found", f"no token {token_id}")
    record(session, "token.revoked", f"token {token_id} opens nothing any more")
    enqueue.wake_workers(session)
    enqueue.wake_watchers(session)


def _add(session: Session, token: Token, lifetime_seconds: int | None) -> TokenCreated:
    secret = new_secret()
    token.secret_hash = hash_secret(secret)
    token.expires_at = repository.expiry(lifetime_seconds)
    repository.add(session, token)
    session.refresh(token)  # the database's clock has set its times
    message = f"a token, {token.role}" + (f", for {token.client_id}" if token.client_id else "")
    record(session, "token.created", message, client_id=token.client_id, data={"token": str(token.id)})
    return TokenCreated(**view(token).model_dump(), secret=secret)


def _require_welcome(session: Session, client_id: str) -> None:
    clients.get_or_create(session, client_id)
    if clients.locked(session, client_id).revoked_at is not None:
        raise ProblemError("conflict", f"client {client_id} is revoked; enrol the owner under a new name")


def _used_before(caller: Caller) -> ProblemError:
    detail = (
        f"this enrolment token of {caller.client_id} has been used by another worker: ask for a new one, and if the "
        "other is none of yours, have its token revoked"
    )
    audit_event = AuditEvent(
        "enrolment.refused",
        f"somebody showed an enrolment token of {caller.client_id} that another worker had used",
        client_id=caller.client_id,
        data={"enrolment": str(caller.token_id)},
    )
    return ProblemError("conflict", detail, audit_event=audit_event)
