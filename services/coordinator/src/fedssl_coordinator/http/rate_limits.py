"""Limits the requests of each token, and of each address for requests without a token that is known to be valid.

A token that was recently valid is counted separately, so that two hundred workers behind one address do not limit one
another. Sessions of the web page count with the token that signed in. Everything else, such as guesses and floods, is
counted by address before the database is queried. If the address has reached a limit, a token that this process has not
seen yet is looked up before it is refused, so that the guesses of one caller do not refuse the workers behind the same
address. Only a few tokens are looked up at a time. All processes share the counts through Redis; while Redis is down,
each process counts separately.
"""

import hashlib
import math
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal
from uuid import UUID

import structlog
from fastapi.security.utils import get_authorization_scheme_param
from limits import RateLimitItem, RateLimitItemPerMinute
from limits.aio.storage import MemoryStorage, RedisStorage
from limits.aio.strategies import FixedWindowRateLimiter
from redis.exceptions import RedisError
from starlette.concurrency import run_in_threadpool
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fedssl_coordinator.core.db import UNREACHABLE
from fedssl_coordinator.core.problems import ProblemError, problem_response
from fedssl_coordinator.core.settings import settings
from fedssl_coordinator.http.addresses import address_key
from fedssl_coordinator.http.body_limit import IS_KNOWN, SESSION_COOKIE

log = structlog.get_logger(__name__)

# An orchestrator must neither restart a process nor send it no more requests because its address is flooded.
_UNCOUNTED = ("/healthz", "/readyz")
_MOST_LOOKUPS = 4
_TOKENS_KNOWN = 10_000
_SILENCE_SECONDS = 2.0
_REDIS = {"socket_timeout": 0.25, "socket_connect_timeout": 0.25}
_WINDOW_SECONDS = 60
_REPORT_SECONDS = 10.0
_MOST_UNREPORTED = 10  # reported with the tenth


class RateLimits:
    """Responds 429 with Retry-After to callers that send too many requests. 0 means no limit.

    `find_token` returns the id of the valid token with this secret, or None. It queries the database.
    """

    def __init__(self, app: ASGIApp, find_token: Callable[[str], UUID | None]) -> None:
        self._app = app
        self._find_token = find_token
        self._num_lookups = 0
        self._counts: RequestCounts | None = None
        self._known: OrderedDict[bytes, str] = OrderedDict()  # by credential, the id of the token that it belongs to

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _UNCOUNTED:
            await self._app(scope, receive, send)
            return
        if self._counts is None:  # created here, because the settings are read only once the process serves
            self._counts = RequestCounts(settings().redis_address)
        credential, address = _credential(scope), _address_key(scope)
        seconds = await self._seconds_to_wait(self._counts, credential, address)
        if seconds and credential is not None and await self._look_up(credential):
            seconds = await self._seconds_to_wait(self._counts, credential, address)
        if seconds:
            await _refuse(seconds, scope, receive, send)
            return
        state = scope.setdefault("state", {})
        state[IS_KNOWN] = None if credential is None else self._known.get(credential.digest)

        counts = self._counts

        async def record(message: Message) -> None:
            if message["type"] == "http.response.start":
                if message["status"] == 401:  # counted before it is sent, so that no caller is faster than the count
                    await counts.hit("failed", address, settings().failed_sign_ins_per_minute)
                    if credential is not None:
                        self._known.pop(credential.digest, None)
                elif credential is not None and (token_id := state.get(credential.state_key)) is not None:
                    self._remember(credential, str(token_id))
            await send(message)

        await self._app(scope, receive, record)

    async def _seconds_to_wait(self, counts: "RequestCounts", credential: "Credential | None", address: str) -> int:
        if credential is not None and (token_id := self._known.get(credential.digest)) is not None:
            return await counts.hit_soon("token", token_id, settings().token_requests_per_minute)
        if seconds := await counts.check("failed", address, settings().failed_sign_ins_per_minute):
            return seconds
        return await counts.hit("address", address, settings().address_requests_per_minute)

    async def _look_up(self, credential: "Credential") -> bool:
        """Return whether a token that this process has not seen is valid, and remember it if so.

        Returns False without a query while too many are looked up.
        """
        if credential.digest in self._known or not credential.secret or self._num_lookups >= _MOST_LOOKUPS:
            return False
        self._num_lookups += 1
        try:
            token_id = await run_in_threadpool(self._find_token, credential.secret)
        except UNREACHABLE:
            return False
        finally:
            self._num_lookups -= 1
        if token_id is not None:
            self._remember(credential, str(token_id))
        return token_id is not None

    def _remember(self, credential: "Credential", token_id: str) -> None:
        self._known[credential.digest] = token_id
        self._known.move_to_end(credential.digest)
        if len(self._known) > _TOKENS_KNOWN:
            self._known.popitem(last=False)


@dataclass(slots=True)
class _Unreported:
    """A caller's requests that were not reported to Redis yet, and the total that it knew at the last report."""

    num: int = 0
    num_reported: int = 0
    reported_at: float = -math.inf


class RequestCounts:
    """Counts of the current minute, in Redis while it answers."""

    def __init__(self, redis_url: str) -> None:
        storage = RedisStorage(
            f"async+{redis_url}", implementation="redispy", key_prefix="fedssl:limits", wrap_exceptions=False, **_REDIS
        )
        self._shared = FixedWindowRateLimiter(storage)
        self._own = FixedWindowRateLimiter(MemoryStorage())
        self._ahead = _wall_clock_ahead()
        self._silent_until = 0.0
        self._unreported: OrderedDict[str, _Unreported] = OrderedDict()

    async def hit_soon(self, what: str, who: str, per_minute: int) -> int:
        """Do the same as `hit`, but count the first half of the limit here, and report it to Redis later.

        It is reported with the tenth request, or with the first one after ten seconds.
        A message to Redis per request costs as much as a statement. With several processes, a caller may get up to nine
        more requests from each of them. With a single process there is no difference.
        """
        if not per_minute:
            return 0
        own = self._unreported.setdefault(who, _Unreported())
        self._unreported.move_to_end(who)
        if len(self._unreported) > _TOKENS_KNOWN:
            self._unreported.popitem(last=False)
        age = time.monotonic() - own.reported_at
        own.num = own.num + 1 if age < _WINDOW_SECONDS else 1
        is_new = age < _REPORT_SECONDS and own.num < _MOST_UNREPORTED
        if is_new and own.num_reported + own.num <= per_minute // 2:
            return 0
        num, own.num, own.reported_at = own.num, 0, time.monotonic()
        item = RateLimitItemPerMinute(per_minute, namespace=what)

        async def report(limiter: FixedWindowRateLimiter) -> int:
            own.num_reported = await limiter.storage.incr(item.key_for(who), item.get_expiry(), amount=num)
            return 0 if own.num_reported <= per_minute else await _seconds(limiter, item, who)

        return await self._ask(report)

    async def hit(self, what: str, who: str, per_minute: int) -> int:
        """Count a request. Returns 0, or the seconds to wait if it is one too many."""
        if not per_minute:
            return 0
        item = RateLimitItemPerMinute(per_minute, namespace=what)
        return await self._ask(lambda limiter: self._hit(limiter, item, who))

    async def check(self, what: str, who: str, per_minute: int) -> int:
        """Return 0 if another request is allowed, else the seconds to wait. Counts nothing."""
        if not per_minute:
            return 0
        item = RateLimitItemPerMinute(per_minute, namespace=what)
        return await self._ask(lambda limiter: self._check(limiter, item, who))

    async def _ask(self, ask: Callable[[FixedWindowRateLimiter], Awaitable[int]]) -> int:
        if time.monotonic() >= self._silent_until:
            try:
                return await ask(self._shared)
            except (RedisError, OSError) as error:
                self._silent_until = time.monotonic() + _SILENCE_SECONDS
                log.warning("redis.unreachable", error=type(error).__name__, consequence="counting requests separately")
        return await ask(self._own_counts())

    def _own_counts(self) -> FixedWindowRateLimiter:
        """Return this process's counts, without those of before the clock was set back: they would end too late."""
        ahead = _wall_clock_ahead()
        if ahead < self._ahead - 1:
            self._own = FixedWindowRateLimiter(MemoryStorage())
        self._ahead = ahead
        return self._own

    async def _hit(self, limiter: FixedWindowRateLimiter, item: RateLimitItem, who: str) -> int:
        return 0 if await limiter.hit(item, who) else await _seconds(limiter, item, who)

    async def _check(self, limiter: FixedWindowRateLimiter, item: RateLimitItem, who: str) -> int:
        return 0 if await limiter.test(item, who) else await _seconds(limiter, item, who)


def _wall_clock_ahead() -> float:
    """Return how far the wall clock, by which the storage in memory goes, is ahead of the monotonic one."""
    return time.time() - time.monotonic()


async def _seconds(limiter: FixedWindowRateLimiter, item: RateLimitItem, who: str) -> int:
    reset = (await limiter.get_window_stats(item, who)).reset_time
    return min(max(1, math.ceil(reset - time.time())), _WINDOW_SECONDS)


@dataclass(frozen=True, slots=True)
class Credential:
    """A hash of a request's token or session, and the key in the request's state for the id of the valid token.

    `secret` is the token itself, which only this request needs; it is empty for a session.
    """

    state_key: Literal["valid_token", "valid_session"]
    digest: bytes
    secret: str = field(default="", repr=False)


def _credential(scope: Scope) -> Credential | None:
    """Return the request's token or session, or None. The header is parsed as the endpoints parse it."""
    authorization = next((value for name, value in scope["headers"] if name == b"authorization"), None)
    if authorization is not None:
        scheme, secret = get_authorization_scheme_param(authorization.decode("latin-1"))
        return _credential_of("valid_token", secret, secret) if scheme.lower() == "bearer" and secret else None
    cookie = HTTPConnection(scope).cookies.get(SESSION_COOKIE)
    return _credential_of("valid_session", cookie) if cookie else None


def _credential_of(state_key: Literal["valid_token", "valid_session"], value: str, secret: str = "") -> Credential:
    digest = hashlib.sha256(f"{state_key} {value}".encode("utf-8", "surrogatepass")).digest()
    return Credential(state_key, digest, secret)


def _address_key(scope: Scope) -> str:
    return address_key(scope["client"][0] if scope.get("client") else "")


async def _refuse(seconds: int, scope: Scope, receive: Receive, send: Send) -> None:
    detail, headers = f"too many requests: try again in {seconds} s", {"Retry-After": str(seconds)}
    await problem_response(ProblemError("too-many-requests", detail, headers=headers))(scope, receive, send)
