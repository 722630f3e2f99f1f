"""Bounds JSON bodies before they are read. Artifacts have limits of their own, from their plan.

A body is collected before anybody asks who sent it, and checked on the event loop: so those of workers and strangers
are small, and a process holds only so much of all of them at a time.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fedssl_coordinator.core.problems import ProblemError, problem_response
from fedssl_coordinator.core.settings import settings

IS_KNOWN = "is_known"
"""In a scope's state: whether the caller was valid when this process saw it last. The rate limits set it."""

SESSION_COOKIE = "fedssl_session"  # the web page's

_ARTIFACTS = {"PUT": "/v1/artifacts/", "PATCH": "/v1/uploads/"}
_REGISTRATION = "/v1/work/register"
_WORKERS = ("/v1/work/", "/v1/enrolments")
_SMALL = 1 << 16
_POLICY = 1 << 17


class BodyLimit:
    """Answers 413 to a body above its limit, announced or streamed, and 503 while too much of others is held."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._held = {True: 0, False: 0}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(_ARTIFACTS.get(scope["method"], "\0")):
            await self._app(scope, receive, send)
            return
        with self._counted(bool(scope.get("state", {}).get(IS_KNOWN))) as count:
            try:
                body = await _collected(scope, receive, count)
            except ProblemError as problem:
                await problem_response(problem)(scope, receive, send)
                return
            if body is None:
                return
            pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

            async def replay() -> Message:
                return pending.pop() if pending else await receive()

            await self._app(scope, replay, send)

    @contextmanager
    def _counted(self, is_known: bool) -> Iterator[Callable[[int], None]]:  # noqa: FBT001
        """Counts what one request holds while it lasts. Strangers share one half, so that they get in nobody's way."""
        own = 0

        def count(num_bytes: int) -> None:
            nonlocal own
            if self._held[is_known] + num_bytes > settings().max_bodies_bytes // 2:
                detail = "too many bodies are being read at the moment: send it again shortly"
                raise ProblemError("unavailable", detail, headers={"Retry-After": "2"})
            own += num_bytes
            self._held[is_known] += num_bytes

        try:
            yield count
        finally:
            self._held[is_known] -= own


async def _collected(scope: Scope, receive: Receive, count: Callable[[int], None]) -> bytes | None:
    """The whole body; None: the sender hung up, and half a body is no request. Raises ProblemError."""
    limit = _limit(scope)
    announced = dict(scope["headers"]).get(b"content-length", b"0")
    if not announced.isdigit() or len(announced) > 18 or int(announced) > limit:
        raise _too_large(limit)
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        part = message.get("body", b"")
        if len(body) + len(part) > limit:
            raise _too_large(limit)
        count(len(part))
        body += part
        if not message.get("more_body"):
            return bytes(body)


def _limit(scope: Scope) -> int:
    most = settings().max_body_bytes
    if scope["path"] == _REGISTRATION:
        return min(most, _POLICY)
    if scope["path"].startswith(_WORKERS) or not _shows_something(scope):
        return min(most, _SMALL)
    return most


def _shows_something(scope: Scope) -> bool:
    """Whether a token or a session is shown, valid or not: specs and the page's forms may be longer than 64 KiB."""
    caller = HTTPConnection(scope)
    return "authorization" in caller.headers or SESSION_COOKIE in caller.cookies


def _too_large(limit: int) -> ProblemError:
    return ProblemError("body-too-large", f"at most {limit} bytes of JSON are read: send less")
