"""Around every request and every task: its numbers, its span, and what its log lines are about."""

import re
import time
from contextlib import ExitStack
from typing import Any

from celery.signals import task_postrun, task_prerun
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fedssl import tracing
from fedssl_coordinator.logs import about
from fedssl_coordinator.metrics import REQUEST_SECONDS, REQUESTS, TASK_SECONDS

_RUN = re.compile(r"/v1/runs/([0-9a-f-]{36})(?:/|$)")
_CLIENT = re.compile(r"/v1/clients/([a-z0-9-]{1,63})(?:/|$)")


class Observed:
    """The outermost part of the API."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.perf_counter(), 500

        async def note_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            with about(**_subject(scope["path"])), tracing.span(scope["path"], _headers(scope), kind="server") as span:
                try:
                    await self._app(scope, receive, note_status)
                finally:
                    if span is not None:
                        span.update_name(f"{scope['method']} {_route(scope)}")
                        span.set_attribute("http.response.status_code", status)
        finally:
            REQUESTS.labels(scope["method"], _route(scope), status).inc()
            REQUEST_SECONDS.labels(scope["method"], _route(scope)).observe(time.perf_counter() - began)


def _subject(path: str) -> dict[str, str]:
    found = {"run": _RUN.match(path), "client": _CLIENT.match(path)}
    return {name: match[1] for name, match in found.items() if match}


def _headers(scope: Scope) -> dict[str, str]:
    """The caller's place in its trace."""
    found = [value.decode("latin-1") for key, value in scope["headers"] if key == tracing.TRACEPARENT.encode()]
    return {tracing.TRACEPARENT: found[0]} if found else {}


def _route(scope: Scope) -> str:
    """As the API documents it: a path of somebody's making would be a series of its own."""
    return getattr(scope.get("route"), "path", "none")


_running: dict[str, tuple[float, ExitStack]] = {}


@task_prerun.connect  # type: ignore[untyped-decorator]
def _begin_task(task_id: str, task: Any, **_: object) -> None:
    stack = ExitStack()
    stack.enter_context(about())
    headers = {tracing.TRACEPARENT: value} if (value := task.request.get(tracing.TRACEPARENT)) else None
    stack.enter_context(tracing.span(task.name, headers, kind="consumer"))
    _running[task_id] = (time.perf_counter(), stack)


@task_postrun.connect  # type: ignore[untyped-decorator]
def _end_task(task_id: str, task: Any, **_: object) -> None:
    began, stack = _running.pop(task_id)
    stack.close()
    TASK_SECONDS.labels(task.name.removeprefix("fedssl.")).observe(time.perf_counter() - began)
