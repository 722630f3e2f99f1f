"""The database: engine, transactions, locks, and actions that run after a commit."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from functools import lru_cache, partial
from typing import Annotated, TypeVar

import psycopg
from fastapi import Depends
from sqlalchemy import (
    ARRAY,
    BigInteger,
    ColumnElement,
    Connection,
    Dialect,
    Engine,
    ExceptionContext,
    any_,
    bindparam,
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
from sqlalchemy.exc import DatabaseError, IntegrityError, InterfaceError, InvalidatePoolError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.orm import InstrumentedAttribute, Session, sessionmaker
from sqlalchemy.pool import ConnectionPoolEntry

from fedssl_coordinator.core.settings import settings

UNREACHABLE = (OperationalError, InterfaceError, PoolTimeout)
"""The temporary errors that the driver and the pool raise while Postgres is down, restarting or overloaded."""

# SQLSTATEs or their first digits: connection errors, idle transactions that were ended, deadlocks, insufficient
# resources, lock timeouts, and statements or servers that an operator ended.
_TEMPORARY = ("08", "25P03", "40", "53", "55P03", "57")

T = TypeVar("T")


class DatabaseReadOnly(OperationalError):
    """Postgres takes no writes on this connection: the server is a standby, or writing was switched off."""


class BrokenReference(IntegrityError):
    """A row refers to one that another transaction deleted in the meantime, or is deleted while others refer to it."""


_AFTER_COMMIT = "after_commit"
_PREFIX = "fedssl/"  # the beginning of each lock's name
_LOCKS = table("pg_locks", *map(column, ("locktype", "database", "classid", "objid", "objsubid")))
_DATABASES = table("pg_database", column("oid"), column("datname"))
_CONNECT = {"connect_timeout": 5, "keepalives_idle": 30}  # a connection that holds a lock may be idle for hours
_TESTED_SECONDS = 1.0  # after its last use a connection is used again without a test
_USED_AT = "used_at"
_REQUESTS = 10  # the others are for work in threads: claims, streams, transfers, and events about refused requests


@event.listens_for(Engine, "handle_error", retval=True)
def classify_error(context: ExceptionContext) -> DatabaseError | None:
    """Raise OperationalError for temporary errors only, BrokenReference for broken foreign keys, and DatabaseReadOnly.

    The driver also raises OperationalError for permanent errors, such as a statement with too many parameters.
    """
    found, error = context.sqlalchemy_exception, context.original_exception
    if not isinstance(error, psycopg.Error):
        return None
    has_temporary_state = (error.sqlstate or "").startswith(_TEMPORARY)
    # Without a connection, none could be opened.
    is_temporary = has_temporary_state or context.is_disconnect or context.connection is None
    if isinstance(error, psycopg.errors.ForeignKeyViolation):
        return BrokenReference(context.statement, context.parameters, error)
    if isinstance(error, psycopg.errors.ReadOnlySqlTransaction):
        # As after a lost connection, the pool opens new ones: those that it has stay read-only after a failover, or
        # after writing was switched on again.
        context.is_disconnect = True
        return DatabaseReadOnly(context.statement, context.parameters, error)
    if isinstance(found, OperationalError) and not is_temporary:
        return DatabaseError(context.statement, context.parameters, error)
    if has_temporary_state and not isinstance(found, OperationalError):
        return OperationalError(context.statement, context.parameters, error)
    return None


@lru_cache
def engine() -> Engine:
    """Return the process's engine.

    Connections that were idle are tested before use, so that no request fails because Postgres was restarted meanwhile.
    """
    config = settings()
    # A pooler may use another connection for each transaction, where earlier prepared statements are unknown.
    prepared = {} if config.database_direct_url is None else {"prepare_threshold": None}
    created = create_engine(
        config.database_url.get_secret_value(),
        pool_size=_REQUESTS,
        max_overflow=config.database_connections - _REQUESTS,
        pool_timeout=config.database_wait_seconds,
        connect_args={**_CONNECT, **prepared},
    )
    event.listen(created, "checkin", _settle)
    event.listen(created, "checkout", partial(_test_if_idle, created.dialect))
    return created


def _settle(connection: psycopg.Connection | None, entry: ConnectionPoolEntry) -> None:
    """Record when a connection was used, and end its use without transactions. A lost connection is None."""
    entry.info[_USED_AT] = time.monotonic()
    if connection is not None and connection.autocommit:
        connection.autocommit = False


def _test_if_idle(dialect: Dialect, connection: psycopg.Connection, entry: ConnectionPoolEntry, proxy: object) -> None:
    """Test a connection before its use, as `pool_pre_ping` does, but only if it was idle: a test is a round trip."""
    used_at = entry.info.get(_USED_AT)
    if used_at is None or time.monotonic() - used_at < _TESTED_SECONDS:
        return
    try:
        dialect.do_ping(connection)  # type: ignore[arg-type]
    except psycopg.Error as error:
        raise InvalidatePoolError from error  # the pool opens new connections


@lru_cache
def direct_engine() -> Engine:
    """Return an engine that bypasses a pooler, so that a connection's settings and locks outlive a transaction."""
    url = settings().database_direct_url
    if url is None:
        return engine()
    return create_engine(url.get_secret_value(), pool_pre_ping=True, pool_size=1, connect_args=_CONNECT)


def bound_sessions() -> None:
    """Set time limits for statements, locks and idle transactions on this process's connections from now on.

    This is for the API. Celery's processes have no limits, because they hold a job's lock for hours.
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
    else:  # a pooler shares connections, and the limits of a connection would also apply to others
        event.listen(engine(), "begin", bound_transaction)


@lru_cache
def _factory() -> sessionmaker[Session]:
    return sessionmaker(engine(), expire_on_commit=False)


@contextmanager
def transaction(connection: Connection | None = None) -> Iterator[Session]:
    """Yield a session that commits at the end of the block, or rolls back if the block raises.

    It uses `connection` if one is given, which must not be in a transaction.
    """
    with _factory()(bind=connection or engine()) as session, session.begin():
        yield session


@contextmanager
def without_transactions() -> Iterator[Connection]:
    """Yield a connection for statements of the driver outside of transactions: each is a transaction by itself."""
    with engine().connect() as connection:
        driver = connection.connection.dbapi_connection
        assert isinstance(driver, psycopg.Connection)
        driver.autocommit = True  # until the connection is returned: see `_settle`
        yield connection


def session_dependency() -> Iterator[Session]:
    """Yield the session of a request, which is one transaction."""
    with transaction() as session:
        yield session


# scope="function": the commit happens before the response is sent, so a response never reports what was not stored.
# max_concurrency: a request holds its connection while it waits for a thread for its next step. If as many such
# requests as connections were allowed, the requests that hold all threads could wait for a connection: a deadlock.
DB = Annotated[Session, Depends(session_dependency, scope="function", max_concurrency=_REQUESTS)]


def after_commit(session: Session, action: Callable[..., None], *arguments: str) -> None:
    """Call `action` after the session has committed. Equal calls run once; after a rollback none runs."""
    actions: dict[tuple[Callable[..., None], tuple[str, ...]], None] = session.info.setdefault(_AFTER_COMMIT, {})
    actions[action, arguments] = None


@event.listens_for(Session, "after_commit")
def _run_actions(session: Session) -> None:
    for action, arguments in session.info.pop(_AFTER_COMMIT, {}):
        action(*arguments)


@event.listens_for(Session, "after_rollback")
def _discard_actions(session: Session) -> None:
    session.info.pop(_AFTER_COMMIT, None)


@contextmanager
def exclusive(name: str) -> Iterator[Connection | None]:
    """Hold the lock `name` exclusively. Yields the connection that holds it, or None if another process holds the lock.

    The lock is released when the process dies or the connection breaks. So a statement on this connection proves that
    the lock is still held: after a loss it raises. This does not wait for the lock, because beat soon tries again.
    """
    with direct_engine().connect() as connection:
        key = {"key": _PREFIX + name}
        got = bool(connection.scalar(text("SELECT pg_try_advisory_lock(hashtextextended(:key, 0))"), key))
        connection.commit()  # the lock belongs to the session, not to the transaction
        try:
            yield connection if got else None
        finally:
            if got:
                with suppress(*UNREACHABLE):  # a lost connection has already released the lock
                    connection.rollback()
                    connection.scalar(text("SELECT pg_advisory_unlock(hashtextextended(:key, 0))"), key)
                    connection.commit()


def from_now(seconds: float) -> ColumnElement[datetime]:
    """Return an SQL expression for the moment in `seconds` from now, by the database's clock."""
    return func.now() + timedelta(seconds=seconds)


def among(column: InstrumentedAttribute[T], values: Sequence[T]) -> ColumnElement[bool]:
    """Return the SQL condition that `column` is one of the values, as one parameter: a statement has at most 65,535."""
    return column == any_(literal(values, ARRAY(column.type)))


def among_named(column: InstrumentedAttribute[T], name: str) -> ColumnElement[bool]:
    """Return the same condition for a statement that is built once: the parameter `name` has the values."""
    return column == any_(bindparam(name, type_=ARRAY(column.type)))


def is_held(name: ColumnElement[str]) -> ColumnElement[bool]:
    """Return the SQL condition that a process holds the lock `name` at this moment."""
    this_database = select(_DATABASES.c.oid).where(_DATABASES.c.datname == func.current_database())
    number = cast(_LOCKS.c.classid, BigInteger).op("<<")(literal_column("32")).op("|")(cast(_LOCKS.c.objid, BigInteger))
    return exists(
        select(literal(1)).where(
            _LOCKS.c.locktype == "advisory",
            _LOCKS.c.objsubid == 1,  # locks with one 64-bit key, not with two keys
            _LOCKS.c.database == this_database.scalar_subquery(),
            number == func.hashtextextended(_PREFIX + name, 0),
        )
    )
