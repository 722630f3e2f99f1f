"""Statements that the driver executes directly give the rows and errors of SQLAlchemy."""

from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Double, bindparam, cast, func, select, text
from sqlalchemy.dialects.postgresql import ARRAY, JSONB
from sqlalchemy.exc import DataError, OperationalError, SQLAlchemyError

from fedssl_coordinator.core.db import BrokenReference, transaction
from fedssl_coordinator.core.statements import Statement
from support.coordinator import Coordinator

NOBODY = UUID(int=0)
FAILING: dict[str, tuple[str, dict[str, Any], type[SQLAlchemyError]]] = {
    "a number that is too large": ("SELECT cast(:given AS integer)", {"given": 2**40}, DataError),
    "a NUL": ("SELECT cast(:given AS text)", {"given": "\0"}, DataError),
    "a broken reference": (
        "INSERT INTO uploads (assignment_id, digest) VALUES (:given, 'a') RETURNING digest", {"given": NOBODY},
        BrokenReference),
    "a statement that was ended": ("DO $$ BEGIN RAISE query_canceled; END $$", {}, OperationalError),
    "a lost connection": ("SELECT pg_terminate_backend(pg_backend_pid() + :given)", {"given": 0}, OperationalError),
}  # fmt: skip


def test_parameters_and_rows_have_the_types_of_sqlalchemy(coordinator: Coordinator) -> None:
    numbers, document = bindparam("numbers", type_=ARRAY(Double)), bindparam("document", type_=JSONB(none_as_null=True))
    construct = select(numbers, document, func.now(), cast("of the statement", JSONB))
    for given in ({"numbers": [1.0], "document": {"a": "b"}}, {"numbers": [], "document": None}):
        with transaction() as session:
            assert Statement(construct).one_or_none(session, given) == tuple(session.execute(construct, given).one())
    chosen = Statement(select(1).where(bindparam("is_wanted") == 1))
    assert [chosen.alone({"is_wanted": number}) for number in (0, 1)] == [None, (1,)]


@pytest.mark.parametrize("case", FAILING)
def test_errors_are_those_of_sqlalchemy(coordinator: Coordinator, case: str) -> None:
    sql, given, expected = FAILING[case]
    with pytest.raises(expected) as by_sqlalchemy, transaction() as session:
        session.execute(text(sql), given)
    statement = Statement(text(sql))
    with pytest.raises(expected) as in_transaction, transaction() as session:
        statement.all(session, given)
    with pytest.raises(expected) as alone:
        statement.alone(given)
    assert {type(error.value) for error in (in_transaction, alone)} == {type(by_sqlalchemy.value)}
    with transaction() as session:  # the pool does not hand out a lost connection again
        assert session.scalar(text("SELECT 1")) == 1
