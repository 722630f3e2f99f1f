"""The limit on JSON bodies, one ASGI message at a time."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from fedssl_coordinator.body_limit import BodyLimit

LIMIT = 100
Message = dict[str, Any]


@pytest.fixture(autouse=True)
def small_limit(change_settings: Callable[..., None]) -> None:
    change_settings(DATABASE_URL="x", REDIS_URL="x", STORE_PATH="x", MAX_BODY_BYTES=str(LIMIT))


def _exchange(messages: list[Message], *, method: str = "POST", path: str = "/v1/runs", **headers: str) -> Any:
    """What an application behind the limit receives, or the status that it is spared."""
    sent: list[Message] = []
    got: list[bytes] = []
    queue = [*messages]

    async def receive() -> Message:
        return queue.pop(0) if queue else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    async def application(scope: Any, receive: Any, send: Any) -> None:
        while (message := await receive())["type"] == "http.request":
            got.append(message["body"])
            if not message.get("more_body"):
                break
        assert (await receive())["type"] == "http.disconnect"  # and never the body again
        await send({"type": "done"})

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "headers": [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()],
    }
    asyncio.run(BodyLimit(application)(scope, receive, send))
    if not sent:
        return None
    if sent[0]["type"] == "http.response.start":
        return sent[0]["status"], json.loads(sent[1]["body"])["type"]
    return b"".join(got)


def _body(*parts: bytes) -> list[Message]:
    more = [True] * (len(parts) - 1) + [False]
    return [{"type": "http.request", "body": body, "more_body": m} for body, m in zip(parts, more, strict=True)]


TOO_LARGE = (413, "urn:fedssl:problem:body-too-large")


def test_a_body_within_the_limit() -> None:
    assert _exchange(_body(b"x" * LIMIT), content_length=str(LIMIT)) == b"x" * LIMIT
    assert _exchange(_body(b"x" * 40, b"", b"y" * 60)) == b"x" * 40 + b"y" * 60
    assert _exchange(_body(b"")) == b""


@pytest.mark.parametrize("length", [str(LIMIT + 1), "9" * 30, "9" * 5000, "-1", "1e3", "x", ""])
def test_an_announced_length_beyond_it_is_not_even_read(length: str) -> None:
    assert _exchange([], content_length=length) == TOO_LARGE


def test_a_body_that_grows_beyond_it() -> None:
    assert _exchange(_body(b"x" * LIMIT, b"y")) == TOO_LARGE
    assert _exchange(_body(*[b"x"] * (LIMIT + 1)), content_length="10") == TOO_LARGE


def test_half_a_body_is_no_request() -> None:
    """A truncated body could be valid JSON: what was not sent whole was not asked for."""
    messages = [{"type": "http.request", "body": b"1", "more_body": True}, {"type": "http.disconnect"}]
    assert _exchange(messages, content_length="2") is None


def test_artifacts_have_a_limit_of_their_own() -> None:
    large = b"x" * (3 * LIMIT)
    assert _exchange(_body(large), method="PUT", path="/v1/artifacts/abc") == large
    assert _exchange(_body(large), method="POST", path="/v1/artifacts/abc") == TOO_LARGE
    assert _exchange(_body(large), method="PUT", path="/v1/artifactsX") == TOO_LARGE
