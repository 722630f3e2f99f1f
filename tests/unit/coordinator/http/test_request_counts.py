"""The counts of requests while Redis does not answer."""

import asyncio
import time

import pytest

from fedssl_coordinator.http.rate_limits import RequestCounts


def test_a_clock_that_is_set_back_refuses_no_caller_for_longer_than_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    wall = time.time

    async def hits(counts: RequestCounts) -> list[bool]:
        return [bool(await counts.hit("address", "203.0.113.7", 2)) for _ in range(3)]

    async def before_and_after() -> tuple[list[bool], list[bool]]:
        counts = RequestCounts("redis://127.0.0.1:1/0")
        before = await hits(counts)
        monkeypatch.setattr(time, "time", lambda: wall() - 3600)
        return before, await hits(counts)

    assert asyncio.run(before_and_after()) == ([False, False, True], [False, False, True])
