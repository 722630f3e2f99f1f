"""The response to requests that are still running when the process stops."""

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fedssl_coordinator.core.problems import ProblemError, problem_response


class GracefulShutdown:
    """Responds 503 instead of 500 to requests that the server cancels, so that clients send them again."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def record(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, record)
        except asyncio.CancelledError:
            if scope["type"] != "http" or has_begun:
                raise
            detail = "the coordinator is stopping: send the request again shortly"
            problem = ProblemError("unavailable", detail, headers={"Retry-After": "1", "Connection": "close"})
            await problem_response(problem)(scope, _nothing, send)


async def _nothing() -> Message:
    return {"type": "http.disconnect"}
