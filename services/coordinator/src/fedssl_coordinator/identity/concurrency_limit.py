"""Limits how many requests of one token may wait at a time: claims that are held open, and event streams."""

from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Annotated
from uuid import UUID

from fastapi import Depends

from fedssl_coordinator.core.problems import ProblemError
from fedssl_coordinator.core.settings import settings
from fedssl_coordinator.identity.authentication import Caller, WaitingViewer

_waiting: Counter[UUID] = Counter()


@contextmanager
def place_of(token_id: UUID) -> Iterator[None]:
    """Hold one of the token's places in this process while the block runs. Raises ProblemError if none is free."""
    limit = settings().max_waiting_per_token
    if _waiting[token_id] >= limit:
        detail = f"{limit} requests of this token wait already: end one, or use a token for each program"
        raise ProblemError("too-many-requests", detail, headers={"Retry-After": "5"})
    _waiting[token_id] += 1
    try:
        yield
    finally:
        _waiting[token_id] -= 1
        if not _waiting[token_id]:
            del _waiting[token_id]


async def _placed_viewer(caller: WaitingViewer) -> AsyncIterator[Caller]:
    with place_of(caller.token_id):
        yield caller


# It holds a place until the response has been sent.
PlacedViewer = Annotated[Caller, Depends(_placed_viewer)]
