"""Metrics, and the subject of log lines, for every request and task, and a span for every task.

FastAPI creates the spans of requests.
"""

import functools
import re
import time
from contextlib import ExitStack
from typing import Any

from celery.signals import task_postrun, task_prerun
from prometheus_client import Counter, Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fedssl import tracing
from fedssl_coordinator.core.logs import about
from fedssl_coordinator.core.metrics import REQUEST_SECONDS, REQUESTS, TASK_SECONDS

_RUN = re.compile(r"/v1/runs/([0-9a-f-]{36})(?:/|$)")
_CLIENT = re.compile(r"/v1/clients/([a-z0-9-]{1,63})(?:/|$)")

SUBJECT = "fedssl.subject"
"""The key of the subject in a request's scope, for what is logged after the request has ended."""


class Telemetry:
    """Measures requests, as the outermost middleware of the API."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.perf_counter(), 500

        async def record_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            with about(**_subject(scope["path"])) as subject:
                scope[SUBJECT] = subject
                await self._app(scope, receive, record_status)
        finally:
            requests, request_seconds = _series(scope["method"], _route(scope), status)
            requests.inc()
            request_seconds.observe(time.perf_counter() - began)


@functools.lru_cache(maxsize=1000)
def _series(method: str, route: str, status: int) -> tuple[Counter, Histogram]:
    """Return the two series that count such requests. They are cached: finding them takes longer than counting."""
    return REQUESTS.labels(method, route, status), REQUEST_SECONDS.labels(method, route)


def _subject(path: str) -> dict[str, str]:
    found = {"run": _RUN.match(path), "client": _CLIENT.match(path)}
    return {name: match[1] for name, match in found.items() if match}


def _route(scope: Scope) -> str:
    """Return the route as the API documents it: with the requested path, every unknown path would create a series."""
    return getattr(scope.get("route"), "path", "none")


_running: dict[str, tuple[float, ExitStack]] = {}


@task_prerun.connect  # type: ignore[untyped-decorator]
def _begin_task(task_id: str, task: Any, **_: object) -> None:
    stack = ExitStack()
    stack.enter_context(about())
    # The headers of a message are attributes of the request. Those of a task that runs in place are in a dict.
    sent = task.request.get(tracing.TRACEPARENT) or (task.request.headers or {}).get(tracing.TRACEPARENT)
    stack.enter_context(tracing.span(task.name, {tracing.TRACEPARENT: sent} if sent else None, kind="consumer"))
    _running[task_id] = (time.perf_counter(), stack)


@task_postrun.connect  # type: ignore[untyped-decorator]
def _end_task(task_id: str, task: Any, **_: object) -> None:
    began, stack = _running.pop(task_id)
    stack.close()
    TASK_SECONDS.labels(task.name.removeprefix("fedssl.")).observe(time.perf_counter() - began)
