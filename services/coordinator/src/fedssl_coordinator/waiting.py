"""How many requests of one token may wait at a time: claims that are held open, and event streams."""

from collections import Counter
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import Depends

from fedssl_coordinator.auth import Credentials, hash_secret
from fedssl_coordinator.problems import ProblemError
from fedssl_coordinator.settings import settings

_waiting: Counter[str] = Counter()


async def _place(credentials: Credentials) -> AsyncIterator[None]:
    """One of the token's places in this process, until the answer has been sent. Raises ProblemError."""
    token = hash_secret(credentials.credentials) if credentials else ""
    most = settings().max_waiting_per_token
    if _waiting[token] >= most:
        detail = f"{most} requests of this token wait already: end one, or use a token for each program"
        raise ProblemError("too-many-requests", detail, headers={"Retry-After": "5"})
    _waiting[token] += 1
    try:
        yield
    finally:
        _waiting[token] -= 1
        if not _waiting[token]:
            del _waiting[token]


Place = Annotated[None, Depends(_place)]
