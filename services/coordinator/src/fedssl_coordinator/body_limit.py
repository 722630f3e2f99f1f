"""Bounds JSON bodies before they are read. Artifacts have limits of their own, from their plan."""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.responses import JSONResponse

from fedssl.protocol.errors import PROBLEM_MEDIA_TYPE
from fedssl_coordinator.problems import ProblemError
from fedssl_coordinator.settings import settings

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

_ARTIFACTS = {"PUT": "/v1/artifacts/", "PATCH": "/v1/uploads/"}


class BodyLimit:
    """Answers 413 to a body above `max_body_bytes`, announced or streamed."""

    def __init__(self, app: Application) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(_ARTIFACTS.get(scope["method"], "\0")):
            await self._app(scope, receive, send)
            return
        limit = settings().max_body_bytes
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if not announced.isdigit() or len(announced) > 18 or int(announced) > limit:
            await self._refuse(limit, scope, receive, send)
            return
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return  # half a body is no request
            body += message.get("body", b"")
            if len(body) > limit:
                await self._refuse(limit, scope, receive, send)
                return
            if not message.get("more_body"):
                break
        pending: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def replay() -> Message:
            return pending.pop() if pending else await receive()

        await self._app(scope, replay, send)

    async def _refuse(self, limit: int, scope: Scope, receive: Receive, send: Send) -> None:
        problem = ProblemError("body-too-large", f"at most {limit} bytes of JSON are read: send less")
        response = JSONResponse(problem.body(), status_code=problem.status, media_type=PROBLEM_MEDIA_TYPE)
        await response(scope, receive, send)
