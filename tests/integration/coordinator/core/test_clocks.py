"""Clocks that jump, or that differ between machines, do not stop the sweep."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from fedssl_coordinator.aggregator.beat import MOST_WAITING
from support.clocks import Clocks
from support.coordinator import Coordinator
from support.environment import coordinator_environment
from support.federation import tiny_spec
from support.servers import Servers

pytestmark = pytest.mark.full


@pytest.fixture
def clocks(tmp_path: Path) -> Clocks:
    return Clocks(tmp_path / "clocks")


@pytest.fixture
def broker(servers: Servers) -> Iterator[redis.Redis]:
    """Yield a connection to an empty database of Redis that no other test uses."""
    with redis.Redis.from_url(servers.redis_url.removesuffix("/0") + "/7") as connection:
        connection.flushdb()
        yield connection


def _await_sweeps(broker: redis.Redis, number: int) -> None:
    """Wait until the queue holds `number` more sweeps than now, for at most 30 s."""
    wanted, end = broker.llen("aggregate") + number, time.monotonic() + 30
    while broker.llen("aggregate") < wanted:
        assert time.monotonic() < end, "no sweep any more"
        time.sleep(0.02)


def test_beat_keeps_sweeping_when_its_clock_jumps(
    servers: Servers, broker: redis.Redis, clocks: Clocks, tmp_path: Path
) -> None:
    url = servers.redis_url.removesuffix("/0") + "/7"
    environment = coordinator_environment("postgresql://nobody", url, tmp_path, FEDSSL_SWEEP_SECONDS="0.2")
    command = [sys.executable, "-m", "fedssl_coordinator", "beat"]
    beat = subprocess.Popen(command, env=environment | clocks.environment("beat"))
    try:
        _await_sweeps(broker, 1)
        for offset in ("-1d", "+1d", "-3h"):
            clocks.jump("beat", offset)
            _await_sweeps(broker, 3)
    finally:
        beat.kill()
        beat.wait()
    # A worker whose clock is ahead of beat's would drop a message that expires.
    messages = [json.loads(message) for message in broker.lrange("aggregate", 0, -1)]
    assert {message["headers"]["expires"] for message in messages} == {None}


def test_beat_stops_sending_sweeps_when_the_queue_is_full(
    broker: redis.Redis, servers: Servers, tmp_path: Path
) -> None:
    url = servers.redis_url.removesuffix("/0") + "/7"
    environment = coordinator_environment("postgresql://nobody", url, tmp_path, FEDSSL_SWEEP_SECONDS="0.2")
    broker.rpush("aggregate", *["a message"] * (MOST_WAITING - 2))
    with subprocess.Popen([sys.executable, "-m", "fedssl_coordinator", "beat"], env=environment) as beat:
        try:
            _await_sweeps(broker, 2)
            time.sleep(1)
        finally:
            beat.kill()
    assert broker.llen("aggregate") == MOST_WAITING


def test_accumulated_sweeps_run_only_once(coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedssl_coordinator.aggregator import tasks

    asked: list[str] = []
    monkeypatch.setattr(tasks.advance_run, "delay", asked.append)
    run_id = str(coordinator.client.create_run(tiny_spec()).id)
    monkeypatch.setattr(tasks, "_last_sweep", float("-inf"))
    for _ in range(5):
        tasks.sweep.apply()
    assert asked == [run_id]
    monkeypatch.setattr(tasks, "_last_sweep", time.monotonic() - 10)
    tasks.sweep.apply()
    assert asked == [run_id, run_id]
