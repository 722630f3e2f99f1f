"""Limits JSON bodies before they are read. Artifacts have limits of their own, from their plan.

A body is read before its sender is authenticated, and is parsed on the event loop. So the bodies of workers and unknown
callers must be small, and the total size of the bodies that a process holds is limited.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fedssl.protocol.secure_work import SECURE_BYTES
from fedssl.protocol.site_work import ANSWER_BYTES
from fedssl_coordinator.core.problems import ProblemError, problem_response
from fedssl_coordinator.core.settings import settings

IS_KNOWN = "is_known"
"""The key in a scope's state for the id of the caller's token, if it was valid on its last request. The rate limits set
it."""

SESSION_COOKIE = "fedssl_session"  # the cookie of the web page

_ARTIFACTS = {"PUT": "/v1/artifacts/", "PATCH": "/v1/uploads/", "POST": "/v1/work/deliver"}
_REGISTRATION = "/v1/work/register"
_WORKERS = ("/v1/work/", "/v1/enrolments")
_SITE_EVALUATION = "/v1/work/site-evaluations/submit"
_SECURE_MESSAGE = "/v1/work/secure/send"
_SMALL = 1 << 16
_POLICY = 1 << 17


class BodyLimit:
    """Responds 413 to a body above its limit, announced or streamed, and 503 while too many other bodies are held."""

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
        """Count the bytes that a request holds. Unknown callers share one half, so they cannot block known ones."""
        own = 0

        def count(num_bytes: int) -> None:
            nonlocal own
            if self._held[is_known] + num_bytes > settings().max_bodies_bytes // 2:
                detail = "too many bodies are being read at the moment: send the request again shortly"
                raise ProblemError("unavailable", detail, headers={"Retry-After": "2"})
            own += num_bytes
            self._held[is_known] += num_bytes

        try:
            yield count
        finally:
            self._held[is_known] -= own


async def _collected(scope: Scope, receive: Receive, count: Callable[[int], None]) -> bytes | None:
    """Return the whole body, or None if the sender disconnected before its end. Raises ProblemError."""
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
    if scope["path"] == _SITE_EVALUATION and _has_credentials(scope):
        return min(most, ANSWER_BYTES)
    if scope["path"] == _SECURE_MESSAGE and _has_credentials(scope):
        return min(most, SECURE_BYTES)
    if scope["path"].startswith(_WORKERS) or not _has_credentials(scope):
        return min(most, _SMALL)
    return most


def _has_credentials(scope: Scope) -> bool:
    """Return whether the request has a token or a session, valid or not.

    Run specs and the forms of the web page may be larger than 64 KiB.
    """
    caller = HTTPConnection(scope)
    return "authorization" in caller.headers or SESSION_COOKIE in caller.cookies


def _too_large(limit: int) -> ProblemError:
    return ProblemError("body-too-large", f"at most {limit} bytes are accepted: send less")
