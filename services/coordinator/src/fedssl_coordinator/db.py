"""The database: engine, sessions, and what may only happen after a commit."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Annotated

from fastapi import Depends
from sqlalchemy import Engine, create_engine, event, text
from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.orm import Session, sessionmaker

from fedssl_coordinator.settings import settings

UNREACHABLE = (OperationalError, InterfaceError, PoolTimeout)
"""What the driver and the pool raise while Postgres is away, restarting or overrun."""

_AFTER_COMMIT = "after_commit"
_REQUESTS = 10
_OTHERS = 20  # work in a thread of its own: waiting claims, streams, downloads, events of refused requests


@lru_cache
def engine() -> Engine:
    """The process's engine. Connections are tested before use, so a restarted Postgres costs no request."""
    url = settings().database_url.get_secret_value()
    return create_engine(
        url, pool_pre_ping=True, pool_size=_REQUESTS, max_overflow=_OTHERS, connect_args={"connect_timeout": 5}
    )


@lru_cache
def _factory() -> sessionmaker[Session]:
    return sessionmaker(engine(), expire_on_commit=False)


@contextmanager
def transaction() -> Iterator[Session]:
    """A session that commits at the end of the block, and rolls back when the block raises."""
    with _factory()() as session, session.begin():
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
def run_lock(run_id: object) -> Iterator[bool]:
    """Hold a run against other aggregators; yields whether this caller got it. Freed when the process dies.

    Another aggregator's task on a run is not waited for: beat looks again soon.
    """
    with engine().connect() as connection:
        key = {"key": f"fedssl/run/{run_id}"}
        got = bool(connection.scalar(text("SELECT pg_try_advisory_lock(hashtextextended(:key, 0))"), key))
        connection.commit()  # the lock is the session's, not the transaction's
        try:
            yield got
        finally:
            if got:
                with suppress(*UNREACHABLE):  # a lost connection has freed the lock already
                    connection.scalar(text("SELECT pg_advisory_unlock(hashtextextended(:key, 0))"), key)
                    connection.commit()
