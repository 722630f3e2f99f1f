"""What a request is told that is still running when the process ends."""

import asyncio
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fedssl_coordinator.core.problems import ProblemError, problem_response


class GracefulShutdown:
    """Answers 503, and not 500, to those that the server cancels: sent again, the next process answers them."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def note(message: Any) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, note)
        except asyncio.CancelledError:
            if scope["type"] != "http" or has_begun:
                raise
            detail = "the coordinator is being stopped: send the request again shortly"
            problem = ProblemError("unavailable", detail, headers={"Retry-After": "1", "Connection": "close"})
            await problem_response(problem)(scope, _nothing, send)


async def _nothing() -> Message:
    return {"type": "http.disconnect"}
