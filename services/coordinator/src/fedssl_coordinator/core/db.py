"""The database: engine, sessions, and what may only happen after a commit."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Annotated, TypeVar

import psycopg
from fastapi import Depends
from sqlalchemy import (
    ARRAY,
    BigInteger,
    ColumnElement,
    Connection,
    Engine,
    ExceptionContext,
    any_,
    cast,
    column,
    create_engine,
    event,
    exists,
    func,
    literal,
    literal_column,
    select,
    table,
    text,
)
from sqlalchemy.exc import DatabaseError, IntegrityError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.orm import InstrumentedAttribute, Session, sessionmaker

from fedssl_coordinator.core.settings import settings

UNREACHABLE = (OperationalError, InterfaceError, PoolTimeout)
"""What the driver and the pool raise while Postgres is away, restarting or overrun: what passes by itself."""

# SQLSTATEs, or how they begin: of connections, of idle transactions that were ended, of deadlocks, of want of
# resources, of locks that were waited for in vain, and of whoever ended a statement or the server.
_PASSING = ("08", "25P03", "40", "53", "55P03", "57")

T = TypeVar("T")


class BrokenReference(IntegrityError):
    """A row refers to one that another transaction deleted in the meantime, or is deleted while others refer to it."""


_AFTER_COMMIT = "after_commit"
_PREFIX = "fedssl/"  # of every lock's name
_LOCKS = table("pg_locks", *map(column, ("locktype", "database", "classid", "objid", "objsubid")))
_DATABASES = table("pg_database", column("oid"), column("datname"))
_CONNECT = {"connect_timeout": 5, "keepalives_idle": 30}  # one that holds a lock may be silent for hours
_REQUESTS = 10  # the others are for work in a thread of its own: claims, streams, transfers, events of refused requests


@event.listens_for(Engine, "handle_error", retval=True)
def _tell_apart(context: ExceptionContext) -> DatabaseError | None:
    """What passes by itself is an OperationalError from here on, and nothing else is; a broken reference is BrokenReference.

    The driver calls by that name also what never passes: a statement of too many parameters, a limit of Postgres's.
    """
    found, error = context.sqlalchemy_exception, context.original_exception
    if not isinstance(error, psycopg.Error):
        return None
    has_passing_state = (error.sqlstate or "").startswith(_PASSING)
    passes = has_passing_state or context.is_disconnect or context.connection is None  # None: there was none to be had
    if isinstance(error, psycopg.errors.ForeignKeyViolation):
        return BrokenReference(context.statement, context.parameters, error)
    if isinstance(found, OperationalError) and not passes:
        return DatabaseError(context.statement, context.parameters, error)
    if has_passing_state and not isinstance(found, OperationalError):
        return OperationalError(context.statement, context.parameters, error)
    return None


@lru_cache
def engine() -> Engine:
    """The process's engine. Connections are tested before use, so a restarted Postgres costs no request."""
    config = settings()
    # A pooler gives each transaction another of its connections, on which a statement prepared before is not known.
    prepared = {} if config.database_direct_url is None else {"prepare_threshold": None}
    return create_engine(
        config.database_url.get_secret_value(),
        pool_pre_ping=True,
        pool_size=_REQUESTS,
        max_overflow=config.database_connections - _REQUESTS,
        pool_timeout=config.database_wait_seconds,
        connect_args={**_CONNECT, **prepared},
    )


@lru_cache
def direct_engine() -> Engine:
    """Past a pooler: what a connection is told here, and what it locks, lasts longer than a transaction."""
    url = settings().database_direct_url
    if url is None:
        return engine()
    return create_engine(url.get_secret_value(), pool_pre_ping=True, pool_size=1, connect_args=_CONNECT)


def bound_sessions() -> None:
    """For the API: Postgres ends what a session of this process keeps waiting, from its next connection on.

    Celery's processes do without: a lock that one holds for a job is silent for hours.
    """
    config = settings()
    limits = {
        "statement_timeout": config.statement_seconds,
        "lock_timeout": config.lock_seconds,
        "idle_in_transaction_session_timeout": config.idle_transaction_seconds,
    }

    values = [(name, f"{seconds * 1000:.0f}ms") for name, seconds in limits.items()]

    def bound_connection(connection: psycopg.Connection, record: object) -> None:
        for value in values:
            connection.execute("SELECT set_config(%s, %s, false)", value)
        connection.commit()

    def bound_transaction(connection: Connection) -> None:
        connection.execute(select(*[func.set_config(name, value, True) for name, value in values]))

    if config.database_direct_url is None:
        event.listen(engine(), "connect", bound_connection)
    else:  # a pooler's connection serves others next, and would bound them too
        event.listen(engine(), "begin", bound_transaction)


@lru_cache
def _factory() -> sessionmaker[Session]:
    return sessionmaker(engine(), expire_on_commit=False)


@contextmanager
def transaction(connection: Connection | None = None) -> Iterator[Session]:
    """A session that commits at the end of the block, and rolls back when the block raises; on `connection`, where one
    is given, which is in no transaction then."""
    with _factory()(bind=connection or engine()) as session, session.begin():
        yield session


def session_dependency() -> Iterator[Session]:
    """One transaction a request."""
    with transaction() as session:
        yield session


# scope="function": the commit happens before the response is sent, so nobody is told of what was not kept.
# max_concurrency: a request holds its connection while it waits for a thread for its next part. Were there as many such
# requests as connections, those that hold all threads would wait for a connection, and neither would ever go on.
DB = Annotated[Session, Depends(session_dependency, scope="function", max_concurrency=_REQUESTS)]


def after_commit(session: Session, action: Callable[..., None], *arguments: str) -> None:
    """Call `action` once the session has committed, and once however often it was asked for; never after a rollback."""
    actions: dict[tuple[Callable[..., None], tuple[str, ...]], None] = session.info.setdefault(_AFTER_COMMIT, {})
    actions[action, arguments] = None


@event.listens_for(Session, "after_commit")
def _run_actions(session: Session) -> None:
    for action, arguments in session.info.pop(_AFTER_COMMIT, {}):
        action(*arguments)


@event.listens_for(Session, "after_rollback")
def _drop_actions(session: Session) -> None:
    session.info.pop(_AFTER_COMMIT, None)


@contextmanager
def exclusive(name: str) -> Iterator[Connection | None]:
    """Hold the lock `name` against everybody else; yields the connection that holds it, None: somebody else has it.

    It is freed when the process dies or the connection breaks, so who writes on this connection still holds it: after a
    loss the next statement raises. It is not waited for: beat looks again soon.
    """
    with direct_engine().connect() as connection:
        key = {"key": _PREFIX + name}
        got = bool(connection.scalar(text("SELECT pg_try_advisory_lock(hashtextextended(:key, 0))"), key))
        connection.commit()  # the lock is the session's, not the transaction's
        try:
            yield connection if got else None
        finally:
            if got:
                with suppress(*UNREACHABLE):  # a lost connection has freed the lock already
                    connection.rollback()
                    connection.scalar(text("SELECT pg_advisory_unlock(hashtextextended(:key, 0))"), key)
                    connection.commit()


def among(column: InstrumentedAttribute[T], values: Sequence[T]) -> ColumnElement[bool]:
    """For queries: `column` is one of the values. One parameter, however many they are: a statement has 65,535."""
    return column == any_(literal(values, ARRAY(column.type)))


def is_held(name: ColumnElement[str]) -> ColumnElement[bool]:
    """For queries: whether somebody holds the lock `name` at this moment."""
    this_database = select(_DATABASES.c.oid).where(_DATABASES.c.datname == func.current_database())
    number = cast(_LOCKS.c.classid, BigInteger).op("<<")(literal_column("32")).op("|")(cast(_LOCKS.c.objid, BigInteger))
    return exists(
        select(literal(1)).where(
            _LOCKS.c.locktype == "advisory",
            _LOCKS.c.objsubid == 1,  # of one number, not of two
            _LOCKS.c.database == this_database.scalar_subquery(),
            number == func.hashtextextended(_PREFIX + name, 0),
        )
    )
