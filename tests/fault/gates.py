"""Locks that the tests hold in Postgres, so that a process waits exactly between two of its steps."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from uuid import UUID

import psycopg

from fault.federation import FaultFederation

_EVENTS = "hashtextextended('events/' || %s, 0)"


class CommitGate:
    """A lock for which each transaction with an event of this run waits, after its last write and before its commit.

    It is the lock that keeps a run's events in order, and the last one that a transaction acquires.
    """

    def __init__(self, federation: FaultFederation, run_id: UUID) -> None:
        self._federation = federation
        self._run_id = str(run_id)
        self._holder = self._connect()
        self._lock(self._holder)

    def close(self) -> None:
        self._holder.close()

    def wait(self, what: str) -> None:
        """Wait until a transaction waits at the gate."""
        _until_blocked(self._federation, what)

    def let_one_pass(self) -> None:
        """Let the transaction that waits commit, and none after it."""
        successor = self._connect()
        queued = threading.Thread(target=self._lock, args=(successor,))
        queued.start()
        _until_blocked(self._federation, "the gate's successor in its queue", successor.info.backend_pid)
        self._holder.close()
        queued.join()
        self._holder = successor

    def _connect(self) -> psycopg.Connection:
        return psycopg.connect(self._federation.postgres.url.replace("+psycopg", "", 1), autocommit=True)

    def _lock(self, connection: psycopg.Connection) -> None:
        connection.execute(f"SELECT pg_advisory_lock({_EVENTS})", (self._run_id,))


@contextmanager
def commits_held(federation: FaultFederation, run_id: UUID) -> Iterator[CommitGate]:
    """Yield a closed gate, which opens at the end of the block."""
    gate = CommitGate(federation, run_id)
    try:
        yield gate
    finally:
        gate.close()


@contextmanager
def artifacts_held(federation: FaultFederation) -> Iterator[Callable[[str], None]]:
    """Block the insertion of artifacts' rows. Yields a function that waits until a process tries to insert one."""
    with _locked(federation, "LOCK TABLE artifacts IN SHARE MODE"):
        yield lambda what: _until_blocked(federation, what)


@contextmanager
def jobs_held(federation: FaultFederation) -> Iterator[Callable[[str], None]]:
    """Block updates of a distillation's progress. Yields a function that waits until a process tries to write it."""
    with _locked(federation, "SELECT 1 FROM distillation_jobs WHERE state = 'running' FOR UPDATE"):
        yield lambda what: _until_blocked(federation, what)


@contextmanager
def _locked(federation: FaultFederation, statement: str) -> Iterator[None]:
    connection = psycopg.connect(federation.postgres.url.replace("+psycopg", "", 1))
    try:
        connection.execute(statement)  # type: ignore[arg-type]
        yield
    finally:
        connection.close()


def _until_blocked(federation: FaultFederation, what: str, pid: int | None = None) -> None:
    federation.until(
        lambda: federation.query(
            "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock' "
            "AND pid = coalesce(%s, pid)",
            pid,
        ),
        what,
        30,
    )
