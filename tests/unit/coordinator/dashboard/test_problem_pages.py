"""For each problem that a middleware or an API endpoint reports as JSON, a browser gets a page."""

import asyncio

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from fedssl.protocol.errors import PROBLEM_MEDIA_TYPE
from fedssl_coordinator.core.problems import ProblemError, problem_response
from fedssl_coordinator.dashboard.layout.page import ProblemPages
from fedssl_coordinator.http.shutdown import GracefulShutdown

BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


async def _too_many(scope: Scope, receive: Receive, send: Send) -> None:
    problem = ProblemError("too-many-requests", "try again in 7 s", headers={"Retry-After": "7"})
    await problem_response(problem)(scope, receive, send)


async def _cancelled(scope: Scope, receive: Receive, send: Send) -> None:
    raise asyncio.CancelledError


async def _without_token(scope: Scope, receive: Receive, send: Send) -> None:
    await problem_response(ProblemError("unauthenticated", "no token"))(scope, receive, send)


def _answer(app: object, method: str, path: str, headers: dict[str, str]) -> httpx.Response:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(ProblemPages(app))  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://coordinator") as http:
            return await http.request(method, path, headers=headers)

    return asyncio.run(ask())


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_browser_gets_a_page_with_the_status_and_the_headers(method: str) -> None:
    answer = _answer(_too_many, method, "/runs", BROWSER)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "7")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["cache-control"] == "no-store"
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "<h1>Too many requests</h1>" in answer.text
    assert "try again in 7 s" in answer.text


def test_a_request_cancelled_by_the_shutdown_gets_a_page() -> None:
    answer = _answer(GracefulShutdown(_cancelled), "POST", "/runs/new", BROWSER)
    assert (answer.status_code, answer.headers["retry-after"], answer.headers["connection"]) == (503, "1", "close")
    assert "the coordinator is stopping" in answer.text
    assert answer.text.startswith("<!doctype html>")


def test_a_problem_outside_the_web_page_does_not_redirect_to_the_sign_in() -> None:
    assert _answer(_without_token, "GET", "/metrics", BROWSER).status_code == 401


@pytest.mark.parametrize(
    ("path", "headers"),
    [("/v1/runs", BROWSER), ("/static/x.css", BROWSER), ("/runs", {"Accept": "*/*"}), ("/runs", {})],
)
def test_programs_get_json(path: str, headers: dict[str, str]) -> None:
    answer = _answer(_too_many, "GET", path, headers)
    assert (answer.status_code, answer.headers["content-type"]) == (429, PROBLEM_MEDIA_TYPE)
    assert answer.json()["detail"] == "try again in 7 s"
