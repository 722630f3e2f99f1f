"""Reads and writes the audit log."""

from collections.abc import Callable, Sequence
from typing import Any
from uuid import UUID

from sqlalchemy import CTE, Text, bindparam, cast, event, func, literal, select, text, true
from sqlalchemy.dialects.postgresql import JSONB, insert
from sqlalchemy.orm import Session, aliased

from fedssl_coordinator.core import outbox
from fedssl_coordinator.core.models import Event, table_of
from fedssl_coordinator.core.problems import printable
from fedssl_coordinator.core.statements import Statement

RUN_DELETED, HAD_UPDATES = "run.deleted", "had_updates"  # this event is read again: workers are notified of it
NUM_ROUNDS_BEFORE = "num_rounds_before"  # in the data of run.resumed, if the run was continued for further rounds
_PENDING, _AFTERWARDS = "events", "after_events"
_NO_RUN = "events/None"
_COLUMNS = ("kind", "round_number", "client_id", "message", "data")

_LOCK = Statement(text("SELECT pg_advisory_xact_lock(hashtextextended(:key, 0))"))
# The lock comes first: a row of the join, and with it an id, exists only once the function has returned.
_LOCK_AND_WRITE = Statement(
    text(
        "INSERT INTO events (kind, run_id, round_number, client_id, message, data) "
        "SELECT kind, run_id, round_number, client_id, message, data "
        "FROM (SELECT pg_advisory_xact_lock(hashtextextended(:key, 0))) AS lock, "
        "ROWS FROM (jsonb_to_recordset(:rows) AS (kind text, run_id uuid, round_number integer, client_id text, "
        "message text, data jsonb)) WITH ORDINALITY AS written "
        "(kind, run_id, round_number, client_id, message, data, position) "
        "ORDER BY position RETURNING id, at"
    ).bindparams(bindparam("rows", type_=JSONB))
)


def record(
    session: Session,
    kind: str,
    message: str,
    *,
    run_id: UUID | None = None,
    round_number: int | None = None,
    client_id: str | None = None,
    data: dict[str, Any] | None = None,
) -> None:
    """Append an event in this transaction. Events are written at the commit, in the order of the calls."""
    row = Event(
        kind=kind,
        message=printable(message),
        run_id=run_id,
        round_number=round_number,
        client_id=client_id,
        data=data or {},
    )
    session.info.setdefault(_PENDING, []).append(row)


def appended(of: CTE) -> CTE:
    """Return the part of a statement that appends events about the assignments of an earlier part.

    `of` has the columns id, run_id, round_number and client_id. The parameter `events` lists the events of each row, in
    their order, with `kind`, `message` and `data`; a message continues the client's id. As at the commit, the lock of
    the run's events is taken after all others of the statement but those of foreign keys, and before an id is drawn.
    No event of such a statement may be of interest to destinations of notifications: see `outbox`.
    """
    key = literal("events/").concat(cast(of.c.run_id, Text))
    locked = (
        select(of.c.id, of.c.run_id, of.c.round_number, of.c.client_id)
        .add_columns(func.pg_advisory_xact_lock(func.hashtextextended(key, 0)).label("lock"))
        .cte("locked")
        .prefix_with("MATERIALIZED")
    )
    given = func.jsonb_array_elements(bindparam("events", type_=JSONB))
    each = given.table_valued("event", with_ordinality="position").render_derived("given")
    field = each.c.event.op("->>", return_type=Text())
    rows = (
        select(
            field("kind"),
            locked.c.run_id,
            locked.c.round_number,
            locked.c.client_id,
            locked.c.client_id + field("message"),
            func.jsonb_build_object("assignment", locked.c.id).op("||")(each.c.event.op("->")("data")),
        )
        .select_from(locked.join(each, true()))
        .order_by(each.c.position)
    )
    columns = ["kind", "run_id", "round_number", "client_id", "message", "data"]
    return insert(table_of(Event)).from_select(columns, rows).returning(table_of(Event).c.id).cte("appended")


def once_written(session: Session, action: Callable[[Session], None]) -> None:
    """Call `action` at the end of this transaction, after its events are written.

    At that point earlier transactions that wrote events of the same run have committed, and later ones wait. So
    `action` sees everything that the earlier ones did, and of several simultaneous transactions the last sees all.
    """
    session.info.setdefault(_AFTERWARDS, []).append(action)


@event.listens_for(Session, "before_commit")
def _write(session: Session) -> None:
    rows: list[Event] = session.info.pop(_PENDING, [])
    # Identity values are drawn before the commit: without the lock, a reader that has seen event 8 could miss event 7
    # of a slower transaction forever. The lock is taken last, so it cannot be part of a deadlock.
    session.flush()
    if rows:
        # Events about no run come last: a statement with `appended` has locked a run's before.
        *others, last = sorted({f"events/{row.run_id}" for row in rows}, key=lambda key: (key == _NO_RUN, key))
        for key in others:
            _LOCK.all(session, {"key": key})
        values = [{name: getattr(row, name) for name in _COLUMNS} | {"run_id": _text(row.run_id)} for row in rows]
        written = _LOCK_AND_WRITE.all(session, {"key": last, "rows": values})
        for row, (event_id, at) in zip(rows, written, strict=True):
            row.id, row.at = event_id, at
        outbox.add(session, rows)
    for action in session.info.pop(_AFTERWARDS, []):
        action(session)


def _text(run_id: UUID | None) -> str | None:
    return None if run_id is None else str(run_id)


@event.listens_for(Session, "after_rollback")
def _drop(session: Session) -> None:
    session.info.pop(_PENDING, None)
    session.info.pop(_AFTERWARDS, None)


def after(session: Session, run_id: UUID, last_id: int, limit: int, kind: str | None = None) -> Sequence[Event]:
    """Return a run's events with an id above `last_id`, oldest first, and only those of `kind` if it is given."""
    statement = select(Event).where(Event.run_id == run_id, Event.id > last_id).order_by(Event.id).limit(limit)
    if kind is not None:
        statement = statement.where(Event.kind == kind)
    return session.scalars(statement).all()


def deleted_runs(session: Session, client_id: str, run_ids: Sequence[UUID]) -> Sequence[UUID]:
    """Return those of the runs that included this client, and were deleted after a client had sent an update."""
    had_updates = Event.data[HAD_UPDATES].as_boolean()
    own = aliased(Event)
    took_part = select(own.id).where(own.run_id == Event.run_id, own.client_id == client_id)
    found = select(Event.run_id).where(
        Event.run_id.in_(run_ids), Event.kind == RUN_DELETED, had_updates, took_part.exists()
    )
    return [run_id for run_id in session.scalars(found) if run_id is not None]


def has(session: Session, run_id: UUID, kind: str, client_id: str, data: dict[str, Any]) -> bool:
    """Return whether the run has an event of this kind about this client whose data includes `data`."""
    found = select(Event.id).where(
        Event.run_id == run_id, Event.kind == kind, Event.client_id == client_id, Event.data.contains(data)
    )
    return session.scalar(select(found.exists())) or False


def was_deleted(session: Session, run_id: UUID) -> bool:
    """Return whether a run with this id existed and was deleted."""
    found = select(Event.id).where(Event.run_id == run_id, Event.kind == RUN_DELETED)
    return session.scalar(select(found.exists())) or False


def first_num_rounds(session: Session, run_id: UUID) -> int | None:
    """Return the number of rounds that a run was created with if it was continued since, and None if it was not."""
    before = Event.data[NUM_ROUNDS_BEFORE].as_integer()
    return session.scalar(select(func.min(before)).where(Event.run_id == run_id, Event.kind == "run.resumed"))


def clients_told_of(session: Session, run_id: UUID, kind: str) -> set[str]:
    """Return the clients for which the run has an event of this kind."""
    found = session.scalars(select(Event.client_id).where(Event.run_id == run_id, Event.kind == kind).distinct())
    return {client_id for client_id in found if client_id is not None}
