"""Statements that are compiled once and that the driver executes: SQLAlchemy's execution takes several times as long.

They are for the statements that every update needs. The ORM does not see them: they flush nothing, and no project
restricts them.
"""

import contextlib
from collections.abc import Mapping
from typing import Any, cast

import psycopg
from psycopg.sql import Literal
from sqlalchemy import Connection, Executable
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg
from sqlalchemy.orm import Session

from fedssl_coordinator.core.db import transaction, without_transactions
from fedssl_coordinator.core.settings import settings

_DIALECT = PGDialect_psycopg()  # type: ignore[no-untyped-call]


class Statement:
    """A statement on tables. Its parameters are named by `bindparam`, and its rows are the driver's tuples.

    Its constants are a part of its text, so that they are sent once per connection, and Postgres plans with them.
    """

    def __init__(self, construct: Executable) -> None:
        compiled = construct.compile(dialect=_DIALECT)  # type: ignore[attr-defined]
        processors = {
            name: bind.type.dialect_impl(_DIALECT).bind_processor(_DIALECT)
            for bind, name in compiled.bind_names.items()
        }
        self._processors = {name: process for name, process in processors.items() if process is not None}
        constants = {name: bind.value for bind, name in compiled.bind_names.items() if not bind.required}
        self._sql = str(compiled)
        for name, value in self._processed(constants).items():
            self._sql = self._sql.replace(f"%({name})s", Literal(value).as_string().replace("%", "%%"))

    def all(self, session: Session, values: Mapping[str, object]) -> list[tuple[Any, ...]]:
        """Return the rows. Raises the errors that SQLAlchemy raises."""
        return self._rows(session.connection(), values)

    def one_or_none(self, session: Session, values: Mapping[str, object]) -> tuple[Any, ...] | None:
        """Return the only row, or None if there is none. Raises the errors that SQLAlchemy raises."""
        return _only(self.all(session, values))

    def alone(self, values: Mapping[str, object]) -> tuple[Any, ...] | None:
        """Do the same as `one_or_none`, outside of a transaction, which saves BEGIN and COMMIT, two round trips.

        Behind a pooler it is a transaction, because time limits are set in each.
        """
        if settings().database_direct_url is not None:
            with transaction() as session:
                return self.one_or_none(session, values)
        with without_transactions() as connection:
            return _only(self._rows(connection, values))

    def _rows(self, connection: Connection, values: Mapping[str, object]) -> list[tuple[Any, ...]]:
        sql, parameters = self._sql, self._processed(values)
        with contextlib.closing(connection.connection.cursor()) as cursor:
            for listener in connection.engine.dispatch.before_cursor_execute:  # as SQLAlchemy calls them
                sql, parameters = listener(connection, cursor, sql, parameters, None, False)
            try:
                cursor.execute(sql, parameters)
                return cast("list[tuple[Any, ...]]", cursor.fetchall())
            except psycopg.Error as error:
                # No public function classifies an error, calls the listeners and gives up lost connections.
                connection._handle_dbapi_exception(error, sql, parameters, cursor, None)

    def _processed(self, values: Mapping[str, object]) -> dict[str, object]:
        processors = self._processors
        return {name: processors[name](value) if name in processors else value for name, value in values.items()}


def _only(rows: list[tuple[Any, ...]]) -> tuple[Any, ...] | None:
    assert len(rows) <= 1, "the statement finds at most one row"
    return rows[0] if rows else None
