"""Creates and revokes tokens, and exchanges an enrolment for a worker's token once."""

from uuid import UUID

from sqlalchemy.orm import Session

from fedssl.protocol.tokens import Role
from fedssl.protocol.views import EnrolmentCreate, TokenCreate, TokenCreated, TokenView
from fedssl.protocol.work import Enrol, Enrolled
from fedssl_coordinator.core import enqueue
from fedssl_coordinator.core.audit import record
from fedssl_coordinator.core.models import Client, Token
from fedssl_coordinator.core.problems import AuditEvent, ProblemError
from fedssl_coordinator.identity import clients
from fedssl_coordinator.identity.authentication import Caller, hash_secret, new_secret, require_valid
from fedssl_coordinator.identity.openid.people import Person
from fedssl_coordinator.identity.projects import service as projects
from fedssl_coordinator.identity.tokens import repository

_MAX_SIGN_INS = 20  # per person; a further one ends the oldest


def create(session: Session, request: TokenCreate) -> TokenCreated:
    """Create a token, and the client of a worker's token if it is new. Only the result contains the secret.

    A worker's token revokes an unused enrolment token of its client, which an operator may have created.
    """
    if (request.role == "worker") != (request.client_id is not None):
        raise ProblemError("invalid-request", "client_id: a worker's token needs one, other tokens must not have one")
    project = projects.resolved(session, request.project)
    if request.client_id is not None:
        _require_usable(session, request.client_id, project)
        repository.revoke_open_enrolments(session, request.client_id)
    token = Token(role=request.role, client_id=request.client_id, label=request.label)
    token.project = project if request.client_id is None else None
    return _add(session, token, request.lifetime_seconds)


def enrol(session: Session, caller: Caller, request: EnrolmentCreate) -> TokenCreated:
    """Create a single-use enrolment token for the client's worker. It replaces an unused one of the client.

    An enrolled worker acts for the client. So operators can enrol the first worker of a client, and only admins can
    enrol a worker that replaces an earlier one.
    """
    _require_usable(session, request.client_id, projects.resolved(session, request.project))
    if caller.role != Role.ADMIN and repository.has_worker(session, request.client_id):
        detail = f"client {request.client_id} has had a worker: only an admin's token may enrol another for it"
        raise ProblemError("forbidden", detail)
    repository.revoke_open_enrolments(session, request.client_id)
    token = Token(role=Role.ENROLMENT, client_id=request.client_id, label=request.label)
    return _add(session, token, request.lifetime_seconds)


def redeem(session: Session, caller: Caller, request: Enrol) -> tuple[Enrolled, bool]:
    """Return the worker's token that an enrolment becomes, and whether it is new.

    The worker has created the token's secret, so it can repeat the request if the response was lost. Raises
    ProblemError for every other worker that uses the enrolment afterwards.
    """
    assert caller.client_id is not None, "an enrolment has a client"
    clients.locked(session, caller.client_id)
    require_valid(session, caller.token_id)
    if repository.use(session, caller.token_id):
        token_id = repository.add_enrolled(session, repository.get(session, caller.token_id), request.token_hash)
        if token_id is None:
            raise ProblemError("conflict", "a token with this hash exists: create a new secret, and enrol with that")
        record(session, "client.enrolled", f"{caller.client_id} has a worker", client_id=caller.client_id,
               data={"token": str(token_id), "enrolment": str(caller.token_id)})  # fmt: skip
        return Enrolled(client_id=caller.client_id, token_id=token_id), True
    found = repository.enrolled(session, caller.token_id)
    if found is None or found.secret_hash != request.token_hash:
        raise _used_before(caller)
    return Enrolled(client_id=caller.client_id, token_id=found.id), False


def sign_in(session: Session, person: Person, lifetime_seconds: int) -> UUID:
    """Create the token of a person's session, and return its id. No one learns its secret."""
    repository.keep_newest(session, person.subject, _MAX_SIGN_INS - 1)
    token = Token(role=person.role, label=person.label, subject=person.subject)
    if person.role is None:
        projects.require_all(session, person.memberships)
        token.memberships = dict(person.memberships)
        token.project, token.role = min(person.memberships.items())
    token.secret_hash = hash_secret(new_secret())
    token.expires_at = repository.expiry(lifetime_seconds)
    repository.add(session, token)
    data = {"token": str(token.id), "subject": person.subject, "role": token.role, "project": token.project}
    where = f" of the project {token.project}" if token.project else ""
    record(session, "person.signed_in", f"{person.label} has signed in as {token.role}{where}", data=data)
    return token.id


def choose_project(session: Session, token_id: UUID, project: str) -> None:
    """Switch a person who has signed in to another of their projects. Raises ProblemError if it is not theirs."""
    token = repository.get(session, token_id)
    role = (token.memberships or {}).get(project)
    if role is None:
        raise projects.not_found(project)
    token.project, token.role = project, role
    session.flush()


def sign_out(session: Session, token_id: UUID) -> bool:
    """End the session of a person who has signed in at a provider. Returns False for other tokens, which stay valid."""
    if repository.get(session, token_id).subject is None:
        return False
    revoke(session, token_id)
    return True


def view(token: Token) -> TokenView:
    return TokenView.model_validate(token, from_attributes=True)


def revoke(session: Session, token_id: UUID) -> None:
    """Revoke a token with immediate effect. Claims and event streams that it has opened end."""
    if not repository.revoke(session, token_id):
        raise ProblemError("not-found", f"no token {token_id}")
    record(session, "token.revoked", f"token {token_id} was revoked")
    enqueue.wake_workers(session)
    enqueue.wake_watchers(session)


def _add(session: Session, token: Token, lifetime_seconds: int | None) -> TokenCreated:
    secret = new_secret()
    token.secret_hash = hash_secret(secret)
    token.expires_at = repository.expiry(lifetime_seconds)
    repository.add(session, token)
    message = f"a token, {token.role}" + (f", for {token.client_id}" if token.client_id else "")
    record(session, "token.created", message, client_id=token.client_id, data={"token": str(token.id)})
    return TokenCreated(**view(token).model_dump(), secret=secret)


def _require_usable(session: Session, client_id: str, project: str | None) -> Client:
    """Return a client, which is added to the project if it is new. Raises ProblemError if it cannot have a worker."""
    client = clients.locked_or_created(session, client_id, project or projects.DEFAULT)
    if client is None:
        raise ProblemError("conflict", f"the name {client_id} is taken: choose another name for the client")
    if project not in (None, client.project):
        raise ProblemError("conflict", f"client {client_id} belongs to the project {client.project}, not to {project}")
    if client.revoked_at is not None:
        raise ProblemError("conflict", f"client {client_id} is revoked; enrol the data owner under a new name")
    return client


def _used_before(caller: Caller) -> ProblemError:
    detail = (
        f"this enrolment token of {caller.client_id} has been used by another worker: ask for a new one, and if the "
        "other worker is not yours, have its token revoked"
    )
    audit_event = AuditEvent(
        "enrolment.refused",
        f"a request used an enrolment token of {caller.client_id} that another worker had already used",
        client_id=caller.client_id,
        data={"enrolment": str(caller.token_id)},
    )
    return ProblemError("conflict", detail, audit_event=audit_event)
