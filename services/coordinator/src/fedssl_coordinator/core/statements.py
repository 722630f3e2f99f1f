"""Statements that are compiled once and that the driver executes: SQLAlchemy's execution takes several times as long.

They are for what every update sends. The ORM does not see them: they flush nothing, and no project restricts them.
"""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import psycopg
from sqlalchemy import Connection, ExceptionContext, Executable
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from fedssl_coordinator.core.db import classify_error

_DIALECT = PGDialect_psycopg()


class Statement:
    """A statement on tables. Its parameters are named by `bindparam`, and its rows are the driver's tuples."""

    def __init__(self, construct: Executable) -> None:
        compiled = construct.compile(dialect=_DIALECT)  # type: ignore[attr-defined]
        self._sql = str(compiled)
        processors = {
            name: bind.type.dialect_impl(_DIALECT).bind_processor(_DIALECT)
            for bind, name in compiled.bind_names.items()
        }
        self._processors = {name: process for name, process in processors.items() if process is not None}
        constants = {name: bind.value for bind, name in compiled.bind_names.items() if not bind.required}
        self._constants = self._processed(constants)

    def all(self, session: Session, values: Mapping[str, object]) -> list[tuple[Any, ...]]:
        """Return the rows. Raises the errors that SQLAlchemy raises."""
        connection = session.connection()
        sql, parameters = self._sql, self._constants | self._processed(values)
        try:
            with connection.connection.cursor() as cursor:
                for listener in connection.engine.dispatch.before_cursor_execute:  # as SQLAlchemy calls them
                    sql, parameters = listener(connection, cursor, sql, parameters, None, False)
                cursor.execute(sql, parameters)
                return cast("list[tuple[Any, ...]]", cursor.fetchall())
        except psycopg.Error as error:
            raise _translated(error, connection, sql, parameters) from error

    def one_or_none(self, session: Session, values: Mapping[str, object]) -> tuple[Any, ...] | None:
        """Return the only row, or None if there is none. Raises the errors that SQLAlchemy raises."""
        rows = self.all(session, values)
        assert len(rows) <= 1, "the statement finds at most one row"
        return rows[0] if rows else None

    def _processed(self, values: Mapping[str, object]) -> dict[str, object]:
        processors = self._processors
        return {name: processors[name](value) if name in processors else value for name, value in values.items()}


def _translated(error: psycopg.Error, connection: Connection, sql: str, parameters: dict[str, object]) -> DBAPIError:
    """Return SQLAlchemy's error for one of the driver, and give up a connection that is lost."""
    driver = cast("psycopg.Connection", connection.connection.dbapi_connection)
    is_lost = driver.closed
    found = DBAPIError.instance(sql, parameters, error, psycopg.Error, connection_invalidated=is_lost, dialect=_DIALECT)
    about = SimpleNamespace(
        sqlalchemy_exception=found,
        original_exception=error,
        is_disconnect=is_lost,
        connection=connection,
        statement=sql,
        parameters=parameters,
    )
    if is_lost:
        connection.invalidate(error)
    return classify_error(cast("ExceptionContext", about)) or cast("DBAPIError", found)
