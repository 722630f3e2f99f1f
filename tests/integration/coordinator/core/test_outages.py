"""Outages of Redis and Postgres, with real processes that are not restarted."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import redis

from fedssl.client import Client, Retry, Unavailable, WorkerClient
from fedssl.protocol.states import Outcome
from fedssl.protocol.work import Register
from fedssl_coordinator.dashboard.session import COOKIE
from fedssl_local import Postgres, Valkey
from support.environment import coordinator_environment, migrate
from support.federation import tiny_spec, upload_and_submit
from support.processes import Federation, federation

pytestmark = pytest.mark.full


QUICKLY = 1.5  # seconds; on a busy machine


@pytest.fixture(scope="module")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Postgres]:
    with Postgres(tmp_path_factory.mktemp("outages") / "postgres", durable=False) as running:
        yield running


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Valkey]:
    with Valkey(tmp_path_factory.mktemp("outages") / "valkey") as running:
        yield running


@pytest.fixture(scope="module")
def running(postgres: Postgres, valkey: Valkey, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """Yield a federation of an API, an aggregator and beat."""
    folder = tmp_path_factory.mktemp("federation")
    migrate(coordinator_environment(postgres.url, valkey.url, folder / "store"))
    with federation(postgres.url, valkey.url, folder, {}) as federated:
        yield federated


@pytest.fixture(scope="module")
def worker(running: Federation) -> WorkerClient:
    token = running.client.create_token("worker", "a").secret
    client = WorkerClient(running.url, token, retry=Retry(seconds=0))
    client.register(
        Register(
            worker_version="test",
            methods={"fedalignuniform": 1},
            device="cpu",
            num_images=1000,
            channels=1,
            image_size=8,
        )
    )
    return client


def _client_without_retries(running: Federation) -> Client:
    return Client(running.url, running._operator_token, retry=Retry(seconds=0))


def test_without_redis_all_requests_succeed_and_the_sweep_catches_up(
    running: Federation, valkey: Valkey, worker: WorkerClient, tmp_path: Path
) -> None:
    client = _client_without_retries(running)
    valkey.stop()
    times = []
    for act in (
        lambda: client.create_run(tiny_spec(num_rounds=1, cohort={"clients": ["a"]}, name="without-redis")),
        lambda: client.create_token("operator"),
        lambda: worker.heartbeat(),
        lambda: worker.claim(0),
        lambda: list(client.runs()),
        client.ready,
    ):
        started = time.monotonic()
        act()
        times.append(time.monotonic() - started)
    assert max(times) < QUICKLY, times
    [run] = [run for run in client.runs() if run.name == "without-redis"]
    assert client.run(run.id).current_round is None  # no message reached the aggregator
    valkey.start()
    # The sweep finds what was missed, although no more requests come.
    opened = running.wait_for(lambda: client.run(run.id).current_round, "the sweep", 30)
    assert opened.number == 1

    valkey.stop()
    item = worker.claim(5)  # waits by polling, if it waits at all
    assert item is not None
    started = time.monotonic()
    upload_and_submit(worker, item, tmp_path)
    assert time.monotonic() - started < 2 * QUICKLY
    valkey.start()
    done = running.wait_for(lambda: client.run(run.id).outcome, "the sweep", 30)
    assert done == Outcome.COMPLETED


def test_a_redis_that_does_not_answer_delays_no_request(running: Federation, valkey: Valkey) -> None:
    client = _client_without_retries(running)
    assert valkey.pid is not None
    os.kill(valkey.pid, signal.SIGSTOP)
    try:
        started = time.monotonic()
        run = client.create_run(tiny_spec(cohort={"clients": ["a"]}))
        took = time.monotonic() - started
    finally:
        os.kill(valkey.pid, signal.SIGCONT)
    client.stop(run.id)
    assert took < 2 * QUICKLY


def test_the_processes_and_a_stream_survive_a_restart_of_postgres(
    running: Federation, postgres: Postgres, worker: WorkerClient, tmp_path: Path
) -> None:
    client = _client_without_retries(running)
    run = client.create_run(tiny_spec(num_rounds=1, cohort={"clients": ["a"]}))
    running.wait_for(lambda: client.run(run.id).current_round, "the first round", 30)
    item = worker.claim(0)
    assert item is not None
    seen: list[str] = []

    def watch() -> None:
        with _client_without_retries(running) as watching:  # the stream itself survives the outage
            for event in watching.events(run.id):
                seen.append(event.kind)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    running.wait_for(lambda: "assignment.leased" in seen, "the stream", 10)
    postgres.stop()
    _assert_unavailable(running, client, worker)
    postgres.start()

    assert client.run(run.id).rounds_closed == 0  # the very next request succeeds
    upload_and_submit(worker, item, tmp_path)
    running.wait_for(lambda: client.run(run.id).outcome, "the run's end", 30)
    watcher.join(15)
    assert not watcher.is_alive()
    assert seen[-1] == "run.finished"
    assert len(seen) == len(list(client.event_log(run.id)))


def _assert_unavailable(running: Federation, client: Client, worker: WorkerClient) -> None:
    assert client.ready().status == "unavailable"
    for act in (lambda: list(client.runs()), lambda: worker.claim(0), worker.heartbeat):
        started = time.monotonic()
        with pytest.raises(Unavailable) as caught:
            act()  # type: ignore[operator]
        assert time.monotonic() - started < 2 * QUICKLY
        assert caught.value.slug == "unavailable"
        assert caught.value.retry_after == 2
    with httpx.Client(base_url=running.url, verify=False, trust_env=False) as http:
        assert http.get("/healthz").status_code == 200  # the process itself is healthy
        assert http.get("/readyz").json()["status"] == "unavailable"
        malformed = http.post("/v1/runs", content="{", headers={"Content-Type": "application/json"})
        assert malformed.status_code in (401, 503)
        authorised = {"Authorization": "Bearer fedssl_x", "Content-Type": "application/json"}
        assert http.get("/metrics", headers=authorised).status_code == 503
        assert http.post("/v1/runs", content="{", headers=authorised).status_code == 503
        page = http.get("/runs", headers={"Accept": "text/html", "Cookie": f"{COOKIE}=a.b.c"})
        assert (page.status_code, page.headers["retry-after"]) == (503, "2")
        assert "The database is not answering." in page.text


def test_beat_logs_no_traceback_while_redis_is_full(running: Federation, valkey: Valkey) -> None:
    log = running.folder / "beat.log"
    num_before = len(log.read_text())
    with redis.Redis.from_url(valkey.url) as connection:
        connection.config_set("maxmemory", "1kb")  # the default policy is noeviction
        try:
            running.wait_for(lambda: "maxmemory" in _said(log, num_before), "a line about a message")
        finally:
            connection.config_set("maxmemory", "0")
    assert "Traceback" not in _said(log, num_before)


def _said(log: Path, num_before: int) -> str:
    return log.read_text()[num_before:]
