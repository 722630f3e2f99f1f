"""Migrated databases that are emptied and reused, because copying the template takes Postgres longer than most
tests."""

import itertools
from collections import deque
from typing import Any, LiteralString

import psycopg

from fedssl_local import Postgres
from support.tables import delete_all_rows

_RESTING = 8
"""How many other tests start before a database is reused. A request that outlives its test may still write."""

_CATALOGS = (
    "pg_attrdef", "pg_attribute", "pg_class", "pg_constraint", "pg_depend", "pg_index", "pg_proc", "pg_trigger",
    "pg_type",
)  # fmt: skip
_OTHERS: LiteralString = (
    "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
)


class Databases:
    """Copies of a migrated template, without rows. No process may be connected to the template."""

    def __init__(self, postgres: Postgres, template: str) -> None:
        self._postgres = postgres
        self._template = template
        self._numbers = itertools.count()
        self._used: deque[str] = deque()
        with self._connect(template) as connection:
            self._schema = _schema(connection)

    def take(self) -> str:
        """Return the name of an empty database: the one that was returned first, or a new one."""
        if len(self._used) > _RESTING and self._empty(name := self._used.popleft()):
            return name
        self._postgres.create_database(name := f"test_{next(self._numbers)}", self._template)
        return name

    def give_back(self, name: str) -> None:
        """End every connection to a database, which may then be reused."""
        with self._connect("postgres") as connection:
            connection.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [name])
        self._used.append(name)

    def _empty(self, name: str) -> bool:
        """Delete all rows and return True. Drop the database if more than rows changed, or if a test still uses it."""
        try:
            with self._connect(name) as connection:
                connection.execute("SET lock_timeout = '5s'")
                if connection.execute(_OTHERS).fetchall() == [] and _schema(connection) == self._schema:
                    delete_all_rows(connection)
                    return True
        except psycopg.OperationalError:  # it accepts no connections, or a lock was not released
            pass
        self._postgres.drop_database(name)
        return False

    def _connect(self, name: str) -> psycopg.Connection[tuple[Any, ...]]:
        return psycopg.connect(self._postgres.database_url(name).replace("+psycopg", "", 1), autocommit=True)


def _schema(connection: psycopg.Connection[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Return what changes with the tables, functions and settings of the database, and with the version in it."""
    parts: list[LiteralString] = [
        f"SELECT '{name}', count(*)::text, sum(xmin::text::bigint)::text FROM {name}" for name in _CATALOGS
    ]
    parts.append("SELECT 'version', version_num, NULL FROM alembic_version")
    parts.append(
        "SELECT 'setting', setconfig::text, NULL FROM pg_db_role_setting AS s JOIN pg_database AS d "
        "ON d.oid = s.setdatabase WHERE datname = current_database()"
    )
    return sorted(connection.execute(" UNION ALL ".join(parts)).fetchall())
