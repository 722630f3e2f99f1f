"""The size limit on JSON bodies, with one ASGI message at a time."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError

from fedssl_coordinator.core.settings import settings
from fedssl_coordinator.http.body_limit import BodyLimit

LIMIT = 100
TOKEN = {"authorization": "Bearer x"}
Message = dict[str, Any]


@pytest.fixture(autouse=True)
def small_limit(change_settings: Callable[..., None]) -> None:
    change_settings(
        DATABASE_URL="postgresql+psycopg://x", REDIS_URL="redis://x", STORE_PATH="x", MAX_BODY_BYTES=str(LIMIT)
    )


def _exchange(messages: list[Message], *, method: str = "POST", path: str = "/v1/runs", **headers: str) -> Any:
    """Return the body that an application behind the limit receives, or the status and type of the refusal."""
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
        assert (await receive())["type"] == "http.disconnect"  # and the body is not sent again
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


def test_a_body_within_the_limit_is_accepted() -> None:
    assert _exchange(_body(b"x" * LIMIT), content_length=str(LIMIT)) == b"x" * LIMIT
    assert _exchange(_body(b"x" * 40, b"", b"y" * 60)) == b"x" * 40 + b"y" * 60
    assert _exchange(_body(b"")) == b""


@pytest.mark.parametrize("length", [str(LIMIT + 1), "9" * 30, "9" * 5000, "-1", "1e3", "x", ""])
def test_an_announced_length_above_the_limit_is_refused_without_reading(length: str) -> None:
    assert _exchange([], content_length=length) == TOO_LARGE


def test_a_body_that_grows_above_the_limit_is_refused() -> None:
    assert _exchange(_body(b"x" * LIMIT, b"y")) == TOO_LARGE
    assert _exchange(_body(*[b"x"] * (LIMIT + 1)), content_length="10") == TOO_LARGE


def test_a_truncated_body_is_not_passed_on() -> None:
    """A truncated body could be valid JSON, but the caller did not send the request completely."""
    messages = [{"type": "http.request", "body": b"1", "more_body": True}, {"type": "http.disconnect"}]
    assert _exchange(messages, content_length="2") is None


def test_artifacts_have_their_own_limit() -> None:
    large = b"x" * (3 * LIMIT)
    assert _exchange(_body(large), method="PUT", path="/v1/artifacts/abc") == large
    assert _exchange(_body(large), method="POST", path="/v1/artifacts/abc") == TOO_LARGE
    assert _exchange(_body(large), method="PUT", path="/v1/artifactsX") == TOO_LARGE


@pytest.fixture
def larger(change_settings: Callable[..., None]) -> None:
    change_settings(
        DATABASE_URL="postgresql+psycopg://x", REDIS_URL="redis://x", STORE_PATH="x", MAX_BODY_BYTES=str(1 << 20)
    )


@pytest.mark.usefixtures("larger")
@pytest.mark.parametrize(
    ("path", "shown", "most"),
    [
        ("/v1/runs", TOKEN, 1 << 20),
        ("/runs/new", {"cookie": "a=b; fedssl_session=x"}, 1 << 20),
        ("/sign-in", {}, 1 << 16),
        ("/sign-in", {"cookie": "other=x"}, 1 << 16),
        ("/v1/runs", {}, 1 << 16),
        ("/v1/work/submit", TOKEN, 1 << 16),
        ("/v1/enrolments", TOKEN, 1 << 16),
        ("/v1/work/register", TOKEN, 1 << 17),
    ],
)
def test_workers_and_callers_without_a_token_have_smaller_limits(path: str, shown: dict[str, str], most: int) -> None:
    assert _exchange(_body(b"x" * most), path=path, **shown) == b"x" * most
    assert _exchange(_body(b"x" * most, b"y"), path=path, **shown) == TOO_LARGE
    assert _exchange([], path=path, content_length=str(most + 1), **shown) == TOO_LARGE


class _Unfinished:
    """Sends requests with bodies that do not end, through one BodyLimit."""

    def __init__(self, limit: BodyLimit) -> None:
        self._limit = limit
        self._end = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def send(self, num_bytes: int, *, is_known: bool = False) -> list[Message]:
        """Return the messages that are sent immediately."""
        sent: list[Message] = []
        parts = [{"type": "http.request", "body": b"x" * num_bytes, "more_body": True}]

        async def receive() -> Message:
            if parts:
                return parts.pop()
            await self._end.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/x", "headers": [(b"authorization", b"x")],
                 "state": {"is_known": is_known}}  # fmt: skip
        self._tasks.append(asyncio.create_task(self._limit(scope, receive, send)))
        await asyncio.sleep(0)
        return sent

    async def hang_up(self) -> None:
        self._end.set()
        await asyncio.gather(*self._tasks)
        self._end.clear()
        self._tasks.clear()


def test_bodies_in_memory_are_limited_and_unknown_callers_get_half_of_the_limit(
    change_settings: Callable[..., None],
) -> None:
    change_settings(
        DATABASE_URL="postgresql+psycopg://x",
        REDIS_URL="redis://x",
        STORE_PATH="x",
        MAX_BODY_BYTES="100",
        MAX_BODIES_BYTES="400",
    )

    async def exchange() -> None:
        async def application(scope: Any, receive: Any, send: Any) -> None:
            raise AssertionError("no body is whole")

        unfinished = _Unfinished(BodyLimit(application))
        for _ in range(2):  # the memory of cancelled requests is released
            assert [await unfinished.send(100) for _ in range(2)] == [[], []]
            refused = await unfinished.send(1)
            assert refused[0]["status"] == 503
            assert (b"retry-after", b"2") in refused[0]["headers"]
            assert await unfinished.send(100, is_known=True) == []
            await unfinished.hang_up()

    asyncio.run(exchange())


def test_a_process_that_could_not_hold_two_bodies_does_not_start(change_settings: Callable[..., None]) -> None:
    change_settings(
        DATABASE_URL="postgresql+psycopg://x",
        REDIS_URL="redis://x",
        STORE_PATH="x",
        MAX_BODY_BYTES="100",
        MAX_BODIES_BYTES="199",
    )
    with pytest.raises(ValidationError, match="FEDSSL_MAX_BODIES_BYTES must be at least twice"):
        settings()
