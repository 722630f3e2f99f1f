"""The statements of the ordinary case of claims, heartbeats and deliveries: each does as much as it can at once.

They are built once, on tables: the ORM takes three times as long. A statement that finds another case changes only what
the request would change anyway, and the caller then decides with the queries of `repository`.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from sqlalchemy import (
    ARRAY,
    BigInteger,
    Double,
    Integer,
    String,
    Text,
    Uuid,
    bindparam,
    cast,
    func,
    literal,
    select,
    true,
    update,
)
from sqlalchemy.dialects.postgresql import JSONB, insert
from sqlalchemy.orm import Session

from fedssl.protocol.ledger import LedgerAnchor
from fedssl.protocol.states import WITHOUT_WEIGHTS, AssignmentState, RoundState
from fedssl.protocol.work import Progress, Resources, Submit
from fedssl_coordinator.core.audit import appended
from fedssl_coordinator.core.models import Artifact, Assignment, Client, Metric, Round, Run, Token, Upload, table_of
from fedssl_coordinator.core.statements import Statement
from fedssl_coordinator.federation.ledger_anchors import repository as anchors
from fedssl_coordinator.federation.ledger_anchors.repository import Extension
from fedssl_coordinator.federation.work.repository import is_open
from fedssl_coordinator.identity.tokens.repository import SEEN, SeenWorker, is_workers

_assignments, _rounds, _runs = table_of(Assignment), table_of(Round), table_of(Run)
_a, _r, _run = _assignments.c, _rounds.c, _runs.c
_token, _client, _upload = table_of(Token).c, table_of(Client).c, table_of(Upload).c

_end = func.now() + func.make_interval(0, 0, 0, 0, 0, 0, _run.spec["cohort"]["lease_seconds"].as_float())
"""When a lease that begins now ends, from the run's spec."""

_num_uploads = (
    select(func.count()).select_from(table_of(Upload)).where(_upload.assignment_id == _a.id).correlate(_assignments)
).scalar_subquery()


class Offer(NamedTuple):
    """The assignment that a claim finds. It is leased now if `was_offered`; if not, it was leased before.

    `newest_round`, `newest_update`: the client's newest accepted update in the run, if there is one.
    """

    assignment_id: UUID
    run_id: UUID
    round_number: int
    broadcast: str
    frozen: str | None
    deadline: datetime
    was_offered: bool
    num_rounds: int
    newest_round: int | None
    newest_update: str | None


def lease(secret_hash: str, events: Sequence[Mapping[str, object]]) -> tuple[SeenWorker, Offer | None] | None:
    """Record that a worker was seen, and lease its oldest offer, with its `events`, if it has no lease.

    Returns None without a worker. The offer is None if there is nothing to claim. Claims of the same client wait for
    each other at its row. `events`: see `audit.appended`.
    """
    row = _LEASE.alone({"secret": secret_hash, "events": events})
    return None if row is None else (SeenWorker(row[0], row[1]), None if row[2] is None else Offer(*row[2:]))


class Renewal(NamedTuple):
    """A heartbeat's worker, and the run and the round of the lease that it has renewed."""

    worker: SeenWorker
    run_id: UUID
    round_number: int


def renew(
    secret_hash: str, assignment_id: UUID, progress: Progress | None, resources: Resources | None
) -> Renewal | None:
    """Renew a worker's lease, and record that it was seen. Returns None, and records neither, if it has no lease."""
    values = {
        "secret": secret_hash,
        "assignment": assignment_id,
        "reported": None if progress is None else progress.model_dump(mode="json"),
        "held": None if resources is None else resources.model_dump(mode="json"),
    }
    row = _RENEW.alone(values)
    return None if row is None else Renewal(SeenWorker(row[0], row[1]), *row[2:])


class Awaited(NamedTuple):
    """A worker that may send the update of its assignment."""

    worker: SeenWorker
    num_images: int | None
    run_id: UUID
    round_number: int


def awaited(secret_hash: str, assignment_id: UUID, digest: str, most: int) -> Awaited | None:
    """Return the worker with this token if its assignment is leased in an open round, and awaits this update's bytes.

    Returns None also if `most` other updates were sent for the assignment.
    """
    values = {"secret": secret_hash, "assignment": assignment_id, "sent": digest, "most": most}
    row = _AWAITED.alone(values)
    return None if row is None else Awaited(SeenWorker(row[0], row[1]), *row[2:])


class Accepted(NamedTuple):
    """A worker, the run and the round that have accepted its update, and the broadcast that it had received."""

    worker: SeenWorker
    run_id: UUID
    round_id: UUID
    round_number: int
    broadcast: str


def accept(session: Session, secret_hash: str, request: Submit, num_bytes: int, most: int) -> Accepted | None:
    """Record an update that is in the store, and accept it: its assignment passes from leased to accepted.

    The transaction then holds the lock of the client's anchors.

    Returns None, and records only the artifact of a valid worker, if the assignment is not leased by it in an open
    round that waits for all its clients, is not the first attempt, has `most` updates, or claims too many images.
    """
    names: Mapping[str, float] = dict(sorted(request.metrics.items()))
    values = {
        "secret": secret_hash,
        "assignment": request.assignment_id,
        "sent": request.update,
        "size": num_bytes,
        "most": most,
        "examples": request.num_examples,
        "names": list(names),
        "numbers": list(names.values()),
    }
    row = _ACCEPT.one_or_none(session, values)
    return None if row is None else Accepted(SeenWorker(row[0], row[1]), *row[2:-1])


def append(
    session: Session,
    assignment_id: UUID,
    accepted: Accepted,
    events: Sequence[Mapping[str, object]],
    anchor: LedgerAnchor | None,
) -> Extension | None:
    """Append the events of an accepted update, and do the same as `anchors.extend`, in one statement.

    The transaction holds the lock of the run's events from here on. `events`: see `audit.appended`.
    """
    client_id = accepted.worker.client_id
    about = {"assignment": assignment_id, "run": accepted.run_id, "round": accepted.round_number, "events": events}
    if anchor is None:
        _APPEND.all(session, {**about, "client": client_id})
        return None
    row = _APPEND_AND_EXTEND.one_or_none(session, {**about, **anchors.values_of(client_id, anchor)})
    return None if row is None else Extension(*row)


def _lease() -> Any:
    seen = SEEN.cte("seen")
    found = (
        select(
            _a.id, _a.run_id, _a.round_number, _a.state, _r.broadcast, _r.deadline, _run.num_rounds, _run.frozen,
            func.coalesce(_run.restart_round, 0).label("restart_round"),
        )
        .select_from(_assignments)
        .join(seen, seen.c.client_id == _a.client_id)
        .join(_runs, _run.id == _a.run_id)
        .join(_rounds, _r.id == _a.round_id)
        .where(is_open)
        .order_by(_a.state != AssignmentState.LEASED, _a.offered_at, _a.id)
        .limit(1)
        .with_for_update(of=_assignments, key_share=True, skip_locked=True)
        .cte("found")
    )  # fmt: skip
    leased = (
        update(_assignments)
        .where(_a.id == found.c.id, _a.state == AssignmentState.OFFERED, _run.id == _a.run_id)
        .values(state=AssignmentState.LEASED, leased_at=func.now(), lease_expires_at=_end)
        .returning(_a.id, _a.run_id, _a.round_number, _a.client_id)
        .cte("leased")
    )
    earlier, of = _assignments.alias("earlier"), _rounds.alias("earlier_round")
    newest = (
        select(earlier.c.round_number, earlier.c.update_digest)
        .join(of, of.c.id == earlier.c.round_id)
        .where(
            found.c.round_number > 1,
            earlier.c.run_id == found.c.run_id,
            earlier.c.client_id == seen.c.client_id,
            earlier.c.state == AssignmentState.ACCEPTED,
            earlier.c.round_number > found.c.restart_round,
            *(of.c.verdict.is_distinct_from(each) for each in WITHOUT_WEIGHTS),
        )
        .order_by(earlier.c.round_number.desc())
        .limit(1)
        .lateral("newest")
    )
    columns = (found.c.id, found.c.run_id, found.c.round_number, found.c.broadcast, found.c.frozen, found.c.deadline)
    theirs = (found.c.num_rounds, newest.c.round_number, newest.c.update_digest)
    done = select(seen.c.token_id, seen.c.client_id, *columns, leased.c.id.is_not(None), *theirs).select_from(
        seen.outerjoin(found, true()).outerjoin(leased, true()).outerjoin(newest, true())
    )
    return done.add_cte(appended(leased))


def _renew() -> Any:
    wanted = (_a.id == bindparam("assignment", type_=Uuid), _a.state == AssignmentState.LEASED)
    # A request about another lease leaves no trace of its worker: it may be refused. The client's row is locked first,
    # as by a claim and by a revocation, so that they cannot wait for each other.
    has_lease = select(_a.id).where(*wanted, _a.client_id == _client.id).correlate(table_of(Client)).exists()
    seen = SEEN.where(has_lease).cte("seen")
    reported, held = (bindparam(name, type_=JSONB(none_as_null=True)) for name in ("reported", "held"))
    renewed = (
        update(_assignments)
        .where(*wanted, _a.client_id == seen.c.client_id, _run.id == _a.run_id)
        .values(
            lease_expires_at=_end,
            progress=func.coalesce(reported, _a.progress),
            resources=func.coalesce(held, _a.resources),
        )
        .returning(seen.c.token_id, _a.client_id, _a.run_id, _a.round_number)
        .cte("renewed")
    )
    return select(renewed)


_leased = (
    is_workers,
    _a.id == bindparam("assignment", type_=Uuid),
    _a.client_id == _client.id,
    _a.state == AssignmentState.LEASED,
    _r.id == _a.round_id,
    _r.state == RoundState.OPEN,
)
"""An SQL expression: the worker holds the assignment's lease, and its round is open.

If the assignment is locked, both remain true: a round that ends first locks and ends its leased assignments.
"""


def _awaited() -> Any:
    is_sent = select(_upload.digest).where(_upload.assignment_id == _a.id, _upload.digest == bindparam("sent"))
    columns = (_token.id, _client.id, _client.num_images, _a.run_id, _a.round_number)
    return select(*columns).where(*_leased, ~is_sent.correlate(_assignments).exists(), _num_uploads < bindparam("most"))


def _accept() -> Any:
    digest = cast(bindparam("sent"), Text)
    size, examples = cast(bindparam("size"), BigInteger), cast(bindparam("examples"), BigInteger)
    # The artifact's row is locked first, as by an upload, so that the two cannot wait for each other.
    stored = (
        insert(table_of(Artifact))
        .from_select(["digest", "num_bytes"], select(digest, size).where(is_workers))
        .on_conflict_do_update(index_elements=["digest"], set_={"touched_at": func.now(), "collected_at": None})
        .returning(table_of(Artifact).c.digest)
        .cte("stored")
    )
    held = (
        select(_a.id, _token.id.label("token_id"), _r.broadcast)
        .select_from(_assignments.join(stored, true()))
        .where(
            *_leased,
            _r.num_wanted.is_(None),
            _a.attempt == 1,
            _client.num_images >= examples,
            _num_uploads < bindparam("most"),
        )
        .with_for_update(of=_assignments, key_share=True)
        .cte("held")
    )
    sent = insert(table_of(Upload)).from_select(["assignment_id", "digest"], select(held.c.id, digest))
    accepted = (
        update(_assignments)
        .where(_a.id == held.c.id, _a.state == AssignmentState.LEASED)
        .values(state=AssignmentState.ACCEPTED, update_digest=digest, num_examples=examples, closed_at=func.now())
        .returning(held.c.token_id, _a.client_id, _a.run_id, _a.round_id, _a.round_number, held.c.broadcast)
        .cte("accepted")
    )
    names, numbers = bindparam("names", type_=ARRAY(String)), bindparam("numbers", type_=ARRAY(Double))
    metric = func.unnest(names, numbers).table_valued("name", "value").render_derived()
    about = (accepted.c.run_id, accepted.c.round_number, accepted.c.client_id)
    measured = insert(table_of(Metric)).from_select(
        ["run_id", "round_number", "client_id", "name", "value"],
        select(*about, metric.c.name, metric.c.value).select_from(accepted.join(metric, true())),
    )
    columns = (accepted.c.token_id, accepted.c.client_id, accepted.c.run_id, accepted.c.round_id)
    done = select(*columns, accepted.c.round_number, accepted.c.broadcast, anchors.taken_lock(accepted.c.client_id))
    return done.add_cte(sent.on_conflict_do_nothing().cte("sent"), measured.cte("measured"))


def _append() -> Any:
    """Build the part of a statement that appends events about one assignment."""
    about = select(
        cast(bindparam("assignment"), Uuid).label("id"),
        cast(bindparam("run"), Uuid).label("run_id"),
        cast(bindparam("round"), Integer).label("round_number"),
        cast(bindparam("client"), Text).label("client_id"),
    )
    return appended(about.cte("about"))


_LEASE, _RENEW, _AWAITED, _ACCEPT = map(Statement, (_lease(), _renew(), _awaited(), _accept()))
_APPEND = Statement(select(literal(1)).add_cte(_append()))
_APPEND_AND_EXTEND = Statement(anchors.extension().add_cte(_append()))
