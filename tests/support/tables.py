"""Access to the database and the store from outside, to check whether a request changed them."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, LiteralString, Self

import psycopg
from psycopg import sql

from fedssl.protocol.views import EventView

_DEADLOCKS = 5


def delete_all_rows(connection: psycopg.Connection[Any]) -> None:
    """Empty every table, once open transactions have ended. TRUNCATE creates new files, and takes ten times as long."""
    tables = [sql.Identifier(name) for name in _names(connection)]
    sequences = connection.execute("SELECT sequencename FROM pg_sequences WHERE schemaname = 'public'").fetchall()
    statements = [
        sql.SQL("SET LOCAL session_replication_role = replica"),  # neither foreign keys nor triggers
        sql.SQL("LOCK TABLE {}").format(sql.SQL(", ").join(tables)),
        *(sql.SQL("DELETE FROM {}").format(table) for table in tables),
        sql.SQL("INSERT INTO projects (name) VALUES ('default')"),  # as the migrations do
        *(sql.SQL("SELECT setval({}, 1, false)").format(sql.Literal(name)) for (name,) in sequences),
    ]
    with connection.transaction():
        connection.execute(sql.SQL("; ").join(statements))


def _names(connection: psycopg.Connection[Any]) -> list[str]:
    rows = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public' ORDER BY 1").fetchall()
    return [name for (name,) in rows if name != "alembic_version"]


@lru_cache
def _all_rows(names: tuple[str, ...]) -> bytes:
    """Return one statement for the rows of all tables, because one per table takes seven times as long."""
    each = "SELECT {} AS name, (to_jsonb(t) - 'touched_at')::text AS row FROM {} AS t"
    parts = [sql.SQL(each).format(sql.Literal(name), sql.Identifier(name)) for name in names]
    return (sql.SQL(" UNION ALL ").join(parts) + sql.SQL(" ORDER BY name, row")).as_bytes()


class Tables:
    """A separate connection, which sees only committed rows."""

    def __init__(self, url: str) -> None:
        self._connection = psycopg.connect(url.replace("+psycopg", "", 1), autocommit=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def query(self, statement: LiteralString, *values: Any) -> list[tuple[Any, ...]]:
        """Return the rows of a statement's result."""
        return self._connection.execute(statement, values).fetchall()

    def one(self, statement: LiteralString, *values: Any) -> Any:
        """Return the only value of the only row."""
        [(value,)] = self.query(statement, *values)
        return value

    def execute(self, statement: LiteralString, *values: Any) -> int:
        """Run a statement, and return how many rows it affected."""
        return self._connection.execute(statement, values).rowcount

    def execute_named(self, statement: LiteralString, values: dict[str, Any]) -> int:
        """Run a statement with named values, and return how many rows it affected."""
        return self._connection.execute(statement, values).rowcount

    def names(self) -> list[str]:
        """Return the names of all tables except Alembic's."""
        return _names(self._connection)

    def dump(self, *, but: tuple[str, ...] = ()) -> dict[str, list[str]]:
        """Return every row of every table as text, without the times of the artifacts' last requests."""
        found: dict[str, list[str]] = {name: [] for name in self.names() if name not in but}
        for name, text in self._connection.execute(_all_rows(tuple(found))):
            found[name].append(text)
        return found

    def clear(self) -> None:
        """Empty every table."""
        for _ in range(_DEADLOCKS):  # the deadlock is with a query of an earlier test's claim
            with suppress(psycopg.errors.DeadlockDetected):
                delete_all_rows(self._connection)
                return
        delete_all_rows(self._connection)

    def last_event(self) -> int:
        found = self.one("SELECT coalesce(max(id), 0) FROM events")
        assert isinstance(found, int)
        return found

    def events_after(self, last_id: int) -> list[EventView]:
        """Return the newer events, whether they belong to a run or not."""
        columns = ("id", "at", "kind", "run_id", "round_number", "client_id", "message", "data")
        rows = self.query(
            "SELECT id, at, kind, run_id, round_number, client_id, message, data FROM events WHERE id > %s ORDER BY id",
            last_id,
        )
        return [EventView.model_validate(dict(zip(columns, row, strict=True))) for row in rows]


@dataclass(frozen=True)
class ChangeWatcher:
    """Watches tables and the store's folder while requests are refused."""

    tables: Tables
    store: Path

    @contextmanager
    def nothing_changes(self) -> Iterator[list[EventView]]:
        """Assert that the block changes only the audit log. Yields a list, which has the new events after the block."""
        before, last = self._everything(), self.tables.last_event()
        events: list[EventView] = []
        yield events
        assert self._everything() == before
        events += self.tables.events_after(last)

    def _everything(self) -> tuple[dict[str, list[str]], set[str]]:
        files = {str(path.relative_to(self.store)) for path in self.store.rglob("*") if path.is_file()}
        return self.tables.dump(but=("events",)), files
