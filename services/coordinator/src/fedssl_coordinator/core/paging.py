"""Pages and their cursors. A cursor is opaque to the client and contains a sort key."""

import base64
import binascii
import json
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar

from fastapi import Query
from pydantic import TypeAdapter

from fedssl.protocol.base import ClientId, RegisteredName
from fedssl.protocol.views import Page
from fedssl_coordinator.core.problems import ProblemError

Limit = Annotated[int, Query(ge=1, le=500, description="Items on one page.")]
LargeItemsLimit = Annotated[int, Query(ge=1, le=100, description="Items on one page. Each contains a whole cohort.")]
Cursor = Annotated[str | None, Query(max_length=500, description="`next_cursor` of the previous page.")]

_CLIENT_ID = TypeAdapter(ClientId)
_REGISTERED_NAME = TypeAdapter(RegisteredName)

Row = TypeVar("Row")
View = TypeVar("View")


def encode_cursor(*key: Any) -> str:
    """Return a cursor that contains `key`."""
    return base64.urlsafe_b64encode(json.dumps(key).encode()).decode()


def decode_cursor(cursor: str, *kinds: Callable[[Any], Any]) -> tuple[Any, ...]:
    """Return the key in a cursor, with each part converted by its kind. Raises ProblemError for invalid cursors."""
    try:
        parts = json.loads(base64.b64decode(cursor, altchars=b"-_", validate=True))
        return tuple(kind(part) for kind, part in zip(kinds, parts, strict=True))
    except (binascii.Error, ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        raise ProblemError("invalid-request", "cursor: use a page's next_cursor as it is, or leave it out") from None


def page_of(
    rows: Sequence[Row], limit: int, view: Callable[[Row], View], key: Callable[[Row], tuple[Any, ...]]
) -> Page[View]:
    """Return a page from up to `limit + 1` rows. The extra row only shows that there are more."""
    shown = rows[:limit]
    more = len(rows) > limit
    return Page(items=[view(row) for row in shown], next_cursor=encode_cursor(*key(shown[-1])) if more else None)


def client_id(value: Any) -> str:
    """Validate a client's name from a cursor."""
    return _CLIENT_ID.validate_python(value)


def registered_name(value: Any) -> str:
    """Validate the name of a registered data set, or of registered weights, from a cursor."""
    return _REGISTERED_NAME.validate_python(value)


def round_number(value: Any) -> int:
    """Validate a round's number from a cursor. It fits an integer column."""
    if database_id(value) >= 2**31:
        raise ValueError("not a round's number")
    return int(value)


def database_id(value: Any) -> int:
    """Validate a bigint from a cursor."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63:
        raise ValueError("not a row's id")
    return value
