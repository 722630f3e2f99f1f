"""Cursors: our own are decoded unchanged, and all others are refused."""

import base64
import json
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedssl_coordinator.core.paging import client_id, database_id, decode_cursor, encode_cursor, page_of
from fedssl_coordinator.core.problems import ProblemError

KINDS: dict[str, tuple[Any, ...]] = {
    "row": (database_id,),
    "client": (client_id,),
    "run": (datetime.fromisoformat, UUID),
}


def _cursor(value: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).decode()


@given(st.integers(0, 2**63 - 1))
def test_a_row_id_is_decoded_unchanged(row_id: int) -> None:
    assert decode_cursor(encode_cursor(row_id), database_id) == (row_id,)


@given(st.datetimes(timezones=st.just(UTC)), st.uuids())
def test_a_time_and_an_id_are_decoded_unchanged(at: datetime, run_id: UUID) -> None:
    cursor = encode_cursor(at.isoformat(), str(run_id))
    assert decode_cursor(cursor, datetime.fromisoformat, UUID) == (at, run_id)
    assert len(cursor) <= 500


def test_a_client_name_is_decoded_unchanged() -> None:
    name = "a" * 63
    assert decode_cursor(encode_cursor(name), client_id) == (name,)


NONE = [
    *("", "x", "====", "%%%", "\x00", "é", "Ã" * 20),
    *(_cursor(value) for value in (None, 7, [], [[]], {}, [-1], [2**63], [True], [1.5], ["1 "], [1, 2], ["A"])),
    *(_cursor([text]) for text in ("\ud800", "a\x00", "a\n", "2026-")),
    *(_cursor(value) for value in (["2026-01-01", "x"], ["2026-01-01", 7], [{"a": 1}, [2]])),
    *(base64.urlsafe_b64encode(data).decode() for data in (b"[" * 300, b"\xff\xfe", b"[" + b"9" * 400 + b"]")),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cursor", NONE)
def test_foreign_cursors_are_refused(cursor: str, kind: str) -> None:
    with pytest.raises(ProblemError, match="use a page's next_cursor as it is, or leave it out") as caught:
        decode_cursor(cursor, *KINDS[kind])
    assert caught.value.status == 422


@given(st.text(max_size=60) | st.binary(max_size=40).map(lambda data: base64.urlsafe_b64encode(data).decode()))
def test_any_text_is_decoded_or_refused(cursor: str) -> None:
    for kinds in KINDS.values():
        try:
            decode_cursor(cursor, *kinds)
        except ProblemError:
            continue


@pytest.mark.parametrize(("num_rows", "shown", "more"), [(0, 0, False), (1, 1, False), (3, 3, False), (4, 3, True)])
def test_a_page_has_a_next_cursor_only_if_more_rows_follow(num_rows: int, shown: int, more: bool) -> None:  # noqa: FBT001
    page = page_of(list(range(num_rows)), 3, str, lambda row: (row,))
    assert page.items == [str(row) for row in range(shown)]
    assert page.next_cursor == (encode_cursor(2) if more else None)
