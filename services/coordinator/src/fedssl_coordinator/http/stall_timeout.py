"""A deadline by progress: a body may take hours, but one that stalls is cut off. `protocol` has one for responses."""

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fedssl_coordinator.core.problems import ProblemError, problem_response
from fedssl_coordinator.core.settings import settings


class StallTimeout:
    """Responds 408 to a body that stalls."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            await self._app(scope, _Body(receive, settings().stall_seconds, settings().stall_bytes), send)
        except _TooSlow as problem:
            await problem_response(problem)(scope, receive, send)


class _TooSlow(ProblemError):
    """The body stalls."""

    def __init__(self, num_bytes: int, seconds: float) -> None:
        detail = (
            f"less than {num_bytes} bytes came in {seconds:g} seconds: check the connection and send the body again; a "
            "large artifact can be resumed if it is sent to /v1/uploads"
        )
        super().__init__("too-slow", detail, headers={"Connection": "close"})


class _Body:
    """Receives a body with a deadline. Only the time spent waiting for the sender counts."""

    def __init__(self, receive: Receive, seconds: float, num_bytes: int) -> None:
        self._receive = receive
        self._seconds = self._left = seconds
        self._num_bytes = num_bytes
        self._came = 0
        self._is_whole = False

    async def __call__(self) -> Message:
        if self._is_whole:
            return await self._receive()
        clock = asyncio.get_running_loop().time
        asked = clock()
        try:
            async with asyncio.timeout(self._left):
                message = await self._receive()
        except TimeoutError:
            raise _TooSlow(self._num_bytes, self._seconds) from None
        self._left -= clock() - asked
        self._came += len(message.get("body", b""))
        self._is_whole = message["type"] != "http.request" or not message.get("more_body", False)
        if self._came >= self._num_bytes:
            self._left, self._came = self._seconds, 0
        elif not self._is_whole and self._left <= 0:
            raise _TooSlow(self._num_bytes, self._seconds)
        return message
