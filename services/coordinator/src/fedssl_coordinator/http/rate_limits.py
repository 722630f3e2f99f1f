"""How often somebody may ask: each token by itself, and each address for what carries no token that is known.

A token that was valid a moment ago is counted by itself, so that two hundred workers behind one address do not limit
one another; the web page's sessions count with the token that signed in. Everything else is counted by address before
the database is asked about it: strangers, guesses, floods.
All processes share the counts through Redis; while it is away, each counts for itself.
"""

import hashlib
import ipaddress
import math
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

import structlog
from fastapi.security.utils import get_authorization_scheme_param
from limits import RateLimitItem, RateLimitItemPerMinute
from limits.aio.storage import MemoryStorage, RedisStorage
from limits.aio.strategies import FixedWindowRateLimiter
from redis.exceptions import RedisError
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fedssl_coordinator.core.problems import ProblemError, problem_response
from fedssl_coordinator.core.settings import settings
from fedssl_coordinator.http.body_limit import IS_KNOWN, SESSION_COOKIE

log = structlog.get_logger(__name__)

_UNCOUNTED = "/healthz"  # an orchestrator must not take a process for dead because it is flooded
_TOKENS_KNOWN = 10_000
_SILENCE_SECONDS = 2.0
_REDIS = {"socket_timeout": 0.25, "socket_connect_timeout": 0.25}
_WINDOW_SECONDS = 60


class RateLimits:
    """Answers 429 with Retry-After to whoever asks too often. A limit of 0 is none."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._counts: Counts | None = None
        self._known: OrderedDict[Shown, str] = OrderedDict()  # what was shown, and the id of the token that it is

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] == _UNCOUNTED:
            await self._app(scope, receive, send)
            return
        if self._counts is None:  # here: the settings are read once the process serves
            self._counts = Counts(settings().redis_url.get_secret_value())
        shown, address = _shown(scope), _address_key(scope)
        seconds = await self._seconds_too_early(self._counts, shown, address)
        if seconds:
            await _refuse(seconds, scope, receive, send)
            return
        state = scope.setdefault("state", {})
        state[IS_KNOWN] = shown in self._known

        counts = self._counts

        async def note(message: Message) -> None:
            if message["type"] == "http.response.start":
                if message["status"] == 401:  # counted before it is told: nobody is quicker than the count
                    await counts.hit("failed", address, settings().failed_sign_ins_per_minute)
                    if shown is not None:
                        self._known.pop(shown, None)
                elif shown is not None and (token_id := state.get(shown.noted_as)) is not None:
                    self._learn(shown, str(token_id))
            await send(message)

        await self._app(scope, receive, note)

    async def _seconds_too_early(self, counts: "Counts", shown: "Shown | None", address: str) -> int:
        if shown is not None and (token_id := self._known.get(shown)) is not None:
            return await counts.hit("token", token_id, settings().token_requests_per_minute)
        if seconds := await counts.left("failed", address, settings().failed_sign_ins_per_minute):
            return seconds
        return await counts.hit("address", address, settings().address_requests_per_minute)

    def _learn(self, shown: "Shown", token_id: str) -> None:
        self._known[shown] = token_id
        self._known.move_to_end(shown)
        if len(self._known) > _TOKENS_KNOWN:
            self._known.popitem(last=False)


class Counts:
    """Counts of the running minute, in Redis where it answers."""

    def __init__(self, redis_url: str) -> None:
        storage = RedisStorage(
            f"async+{redis_url}", implementation="redispy", key_prefix="fedssl:limits", wrap_exceptions=False, **_REDIS
        )
        self._shared = FixedWindowRateLimiter(storage)
        self._own = FixedWindowRateLimiter(MemoryStorage())
        self._silent_until = 0.0

    async def hit(self, what: str, who: str, per_minute: int) -> int:
        """Count one; seconds to wait where that is one too many, else 0."""
        if not per_minute:
            return 0
        item = RateLimitItemPerMinute(per_minute, namespace=what)
        return await self._ask(lambda limiter: self._hit(limiter, item, who))

    async def left(self, what: str, who: str, per_minute: int) -> int:
        """Count nothing; seconds to wait where none is left, else 0."""
        if not per_minute:
            return 0
        item = RateLimitItemPerMinute(per_minute, namespace=what)
        return await self._ask(lambda limiter: self._left(limiter, item, who))

    async def _ask(self, ask: Callable[[FixedWindowRateLimiter], Awaitable[int]]) -> int:
        if time.monotonic() >= self._silent_until:
            try:
                return await ask(self._shared)
            except (RedisError, OSError) as error:
                self._silent_until = time.monotonic() + _SILENCE_SECONDS
                log.warning("redis.unreachable", error=type(error).__name__, consequence="counting requests by itself")
        return await ask(self._own)

    async def _hit(self, limiter: FixedWindowRateLimiter, item: RateLimitItem, who: str) -> int:
        return 0 if await limiter.hit(item, who) else await _seconds(limiter, item, who)

    async def _left(self, limiter: FixedWindowRateLimiter, item: RateLimitItem, who: str) -> int:
        return 0 if await limiter.test(item, who) else await _seconds(limiter, item, who)


async def _seconds(limiter: FixedWindowRateLimiter, item: RateLimitItem, who: str) -> int:
    reset = (await limiter.get_window_stats(item, who)).reset_time
    return min(max(1, math.ceil(reset - time.time())), _WINDOW_SECONDS)


@dataclass(frozen=True, slots=True)
class Shown:
    """A hash of what a request shows, and where its state says whose token that is, once it was found valid."""

    noted_as: Literal["valid_token", "valid_session"]
    digest: bytes


def _shown(scope: Scope) -> Shown | None:
    """The secret as the endpoints read it: it is one token, however it is spelt. None: neither token nor session."""
    caller = HTTPConnection(scope)
    authorization = caller.headers.get("authorization")
    if authorization is not None:
        scheme, secret = get_authorization_scheme_param(authorization)
        return Shown("valid_token", _hash(secret)) if scheme.lower() == "bearer" and secret else None
    cookie = caller.cookies.get(SESSION_COOKIE)
    return Shown("valid_session", _hash(cookie)) if cookie else None


def _hash(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()


def _address_key(scope: Scope) -> str:
    """The caller's address; of an IPv6 one the network, which its holder can choose addresses from."""
    host = scope["client"][0] if scope.get("client") else ""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return "unknown"
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.ip_network((address, 64), strict=False).network_address)
    return str(address)


async def _refuse(seconds: int, scope: Scope, receive: Receive, send: Send) -> None:
    detail, headers = f"too many requests: come back in {seconds} s", {"Retry-After": str(seconds)}
    await problem_response(ProblemError("too-many-requests", detail, headers=headers))(scope, receive, send)
