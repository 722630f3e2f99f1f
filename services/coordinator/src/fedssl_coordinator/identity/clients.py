"""Reads and writes clients."""

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from pydantic import BaseModel, ValidationError
from sqlalchemy import ScalarSelect, func, or_, select, update
from sqlalchemy.dialects.postgresql import JSONB, insert
from sqlalchemy.orm import Session

from fedssl.protocol.data import ServedShapes
from fedssl.protocol.model import EncoderConfig
from fedssl.protocol.policy import AllowRule, PolicyNotice
from fedssl.protocol.work import CheckNumbers, Register
from fedssl_coordinator.core.db import among
from fedssl_coordinator.core.models import Client, Json, Run

M = TypeVar("M", bound=BaseModel)


def get(session: Session, client_id: str) -> Client | None:
    return session.get(Client, client_id)


def locked_or_created(session: Session, client_id: str, project: str) -> Client | None:
    """Return a client, locked as by `locked`, or None if the caller may not know it. It is added to the project if it
    is new."""
    session.execute(insert(Client).values(id=client_id, project=project).on_conflict_do_nothing())
    return session.get(Client, client_id, with_for_update={"key_share": True}, populate_existing=True)


def locked(session: Session, client_id: str) -> Client:
    """Return an existing client, locked until the transaction ends."""
    return session.get_one(Client, client_id, with_for_update={"key_share": True}, populate_existing=True)


class Earlier(NamedTuple):
    """The part of a client before a registration that may not change unnoticed."""

    num_images: int | None
    identity: str | None
    announced_identity: str | None


def owner_of_identity(session: Session, client: Client, key: str) -> str | None:
    """Return another client of the project that has this identity key, or whose worker announced it last; or None.

    Until the transaction ends, no other one can announce the key as new.
    """
    name = f"identity/{client.project}/{key}"
    session.execute(select(func.pg_advisory_xact_lock(func.hashtextextended(name, 0))))
    return session.scalar(
        select(Client.id)
        .where(Client.project == client.project, Client.id != client.id, Client.revoked_at.is_(None))
        .where(or_(Client.identity == key, Client.announced_identity == key))
        .order_by(Client.id)
        .limit(1)
    )


def register(session: Session, client_id: str, request: Register) -> Earlier:
    """Store what the worker declares about itself, and return what it declared before, if it did.

    The first registration sets `registered_at`, and the first identity key is the one by which others know it.
    """
    client = locked(session, client_id)
    before = Earlier(client.num_images, client.identity, client.announced_identity)
    declared = request.model_dump(exclude={"protocol_version", "anchor", "identity"})
    values = {"serves": None, "check": None, **declared}
    if request.identity is not None:
        values["announced_identity"] = request.identity
        values["identity"] = func.coalesce(Client.identity, request.identity)
    session.execute(
        update(Client)
        .where(Client.id == client_id)
        .values(**values, registered_at=func.coalesce(Client.registered_at, func.now()), last_seen_at=func.now())
    )
    return before


def eligible(session: Session, project: str, names: Sequence[str] | None) -> list[str]:
    """Return the project's clients that have registered and are not revoked, by name; if given, only those of `names`.

    Clients that are offline at the moment are included: otherwise a run's result would depend on chance.
    """
    if names is not None and not names:
        return []
    statement = select(Client.id).where(
        Client.project == project, Client.registered_at.is_not(None), Client.revoked_at.is_(None)
    )
    if names is not None:
        statement = statement.where(among(Client.id, names))
    return sorted(session.scalars(statement))


def declarations(client: Client) -> dict[str, BaseModel | None]:
    """Return what the client's worker declared in tables of its own, as far as this version understands it."""
    return {
        "serves": _understood(ServedShapes, client.serves),
        "encoder": _understood(EncoderConfig, client.encoder),
        "policy": None if client.policy is None else _notice(client.policy),
        "check": _understood(CheckNumbers, client.check),
    }


def _understood(model: type[M], declared: Json | None) -> M | None:
    """Return what a worker declared.

    None if it declared nothing, or if a newer version, since rolled back, stored it: the worker itself declines work
    that it cannot do.
    """
    try:
        return None if declared is None else model.model_validate(declared)
    except ValidationError:
        return None


def _notice(policy: Json) -> PolicyNotice:
    """Return what a stored policy allows: without rules that this version does not understand, it allows less."""
    known = [rule for rule in policy["allow"] if _understood(AllowRule, rule) is not None]
    nothing = PolicyNotice(digest=policy["digest"], allow=())
    return _understood(PolicyNotice, {**policy, "allow": known}) or nothing


class Registration(NamedTuple):
    """The part of a client's last registration that decides which work it can do."""

    client_id: str
    methods: dict[str, int] | None
    channels: int | None
    image_size: int | None
    serves: ServedShapes | None
    encoder: EncoderConfig | None


def registrations(session: Session, names: Sequence[str]) -> list[Registration]:
    """Return what the eligible ones of these clients declared, in name order."""
    declared = (Client.methods, Client.channels, Client.image_size, Client.serves, Client.encoder)
    statement = select(func.array_agg(Client.id), *declared).where(
        among(Client.id, names), Client.registered_at.is_not(None), Client.revoked_at.is_(None)
    )
    found = []
    for client_ids, methods, channels, image_size, serves, encoder in session.execute(statement.group_by(*declared)):
        shapes, network = _understood(ServedShapes, serves), _understood(EncoderConfig, encoder)
        found += [Registration(name, methods, channels, image_size, shapes, network) for name in client_ids]
    return sorted(found, key=lambda row: row.client_id)


def num_eligible() -> ScalarSelect[int]:
    """Return an SQL expression: how many clients of a run's project have registered and are not revoked."""
    eligible_ones = (Client.project == Run.project, Client.registered_at.is_not(None), Client.revoked_at.is_(None))
    return select(func.count()).select_from(Client).where(*eligible_ones).correlate(Run).scalar_subquery()


def in_other_projects(session: Session, project: str, names: Sequence[str]) -> dict[str, str]:
    """Return those of the clients that the caller knows and that belong to other projects, each with its project."""
    statement = select(Client.id, Client.project).where(among(Client.id, names), Client.project != project)
    return {row.id: row.project for row in session.execute(statement.order_by(Client.id))}


def declared_encoders(session: Session, project: str, names: Sequence[str] | None) -> dict[str, EncoderConfig | None]:
    """Return the encoder that each eligible client's worker last declared, or None if it declared none."""
    rows = session.execute(select(Client.id, Client.encoder).where(among(Client.id, eligible(session, project, names))))
    return dict(sorted((name, _understood(EncoderConfig, encoder)) for name, encoder in rows))


def identities(session: Session, names: Sequence[str]) -> dict[str, tuple[str | None, str | None]]:
    """Return each client's identity key, and the one that its worker announced last."""
    statement = select(Client.id, Client.identity, Client.announced_identity).where(among(Client.id, names))
    return {row.id: (row.identity, row.announced_identity) for row in session.execute(statement)}


def confirm_identity(session: Session, client: Client, identity: str) -> None:
    """Make the identity key that a client's worker announced last the one by which others know it."""
    client.identity = identity
    session.flush()


class SharedPolicy(NamedTuple):
    """A policy that some clients share, as their workers declared it. `notice` has the digest of one of them."""

    notice: PolicyNotice
    client_ids: list[str]


def policies(session: Session, names: Sequence[str]) -> list[SharedPolicy]:
    """Return what the clients' policies allow, each different policy once. Clients without a policy are left out.

    Thousands of clients have few different policies. Their digests always differ, because each names its client.
    """
    rules = Client.policy.op("-", return_type=JSONB())("digest").label("rules")
    one = func.min(Client.policy["digest"].astext)
    statement = select(rules, one, func.array_agg(Client.id)).where(among(Client.id, names), Client.policy.is_not(None))
    return [
        SharedPolicy(_notice({**allowed, "digest": digest}), sorted(client_ids))
        for allowed, digest, client_ids in session.execute(statement.group_by(rules))
    ]


def set_display_name(session: Session, client: Client, name: str) -> None:
    """Set the operators' name for a client."""
    client.display_name = name
    session.flush()


def by_name(session: Session, limit: int, after: str | None) -> Sequence[Client]:
    statement = select(Client).order_by(Client.id).limit(limit)
    if after is not None:
        statement = statement.where(Client.id > after)
    return session.scalars(statement).all()


def revoke(session: Session, client_id: str) -> Client:
    """Revoke a client. Its row stays locked until the transaction ends, so that it cannot claim work meanwhile."""
    statement = (
        update(Client)
        .where(Client.id == client_id)
        .values(revoked_at=func.coalesce(Client.revoked_at, func.now()))
        .returning(Client)
        .execution_options(populate_existing=True)
    )
    return session.scalars(statement).one()
