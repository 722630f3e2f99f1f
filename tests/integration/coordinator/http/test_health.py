"""Health checks without a token, and metrics for Prometheus with one."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import redis
from anyio import to_thread
from sqlalchemy import event

from fedssl_coordinator.app import create_app
from fedssl_coordinator.core.db import engine
from support.coordinator import Coordinator, clear_caches
from support.environment import coordinator_environment
from support.federation import tiny_spec
from support.servers import Servers


@pytest.fixture
def statements(coordinator: Coordinator) -> Iterator[list[str]]:
    """Yield a list that collects the statements that this process sends to Postgres."""
    sent: list[str] = []

    def note(connection: object, cursor: object, statement: str, *_: object) -> None:
        sent.append(statement)

    event.listen(engine(), "before_cursor_execute", note)
    yield sent
    event.remove(engine(), "before_cursor_execute", note)


def test_metrics_count_runs_without_naming_them(
    coordinator: Coordinator, servers: Servers, statements: list[str]
) -> None:
    with redis.Redis.from_url(servers.redis_url) as broker:
        waiting = broker.llen("distill")  # messages of other tests, which no process takes
    for name in ("secret-study", "second"):
        coordinator.client.create_run(tiny_spec(name=name), start=name == "second")
    viewer = coordinator.client.create_token("viewer").secret
    statements.clear()
    with coordinator.http(viewer) as http:
        answer = http.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain")
    lines = [line.rpartition(" ") for line in answer.text.splitlines() if not line.startswith("#")]
    shown = {name: float(value) for name, _, value in lines}
    counted = {name: value for name, value in shown.items() if name.startswith("fedssl_runs")}
    assert counted == {
        'fedssl_runs{state="created"}': 1,
        'fedssl_runs{state="running"}': 1,
        'fedssl_runs{state="paused"}': 0,
        'fedssl_runs{state="finished"}': 0,
    }
    assert shown['fedssl_rounds{verdict="aggregated"}'] == shown['fedssl_assignments{state="expired"}'] == 0
    assert shown['fedssl_queue_depth{queue="distill"}'] == waiting
    assert shown['fedssl_requests_total{method="POST",route="/v1/runs",status="201"}'] >= 2
    assert "secret-study" not in answer.text
    assert len(statements) == 2  # the token and the counts, however many runs, clients and rounds there are


def test_healthz_sends_no_statement_to_postgres(coordinator: Coordinator, statements: list[str]) -> None:
    with coordinator.bare_http() as http:
        assert http.get("/healthz").json() == {"status": "ok", "checks": {}}
    assert statements == []


@pytest.mark.usefixtures("coordinator")
def test_healthz_needs_no_thread() -> None:
    """While Postgres hangs, every thread waits for it. Restarting the process would help no caller."""

    async def ask_without_threads() -> httpx.Response:
        threads = to_thread.current_default_thread_limiter()
        threads.total_tokens = 1
        threads.acquire_on_behalf_of_nowait("a request that waits for Postgres")
        return await asyncio.wait_for(_ask("/healthz"), timeout=2)

    assert asyncio.run(ask_without_threads()).status_code == 200


async def _ask(path: str) -> httpx.Response:
    transport = httpx.ASGITransport(create_app())
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as http:
        return await http.get(path)


def test_a_database_without_tables_is_not_ready(
    servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with servers.database(empty=True) as url:
        for name, value in coordinator_environment(url, servers.redis_url, tmp_path / "store").items():
            monkeypatch.setenv(name, value)
        clear_caches()
        answer = asyncio.run(_ask("/readyz"))
        assert answer.status_code == 503
        assert answer.json() == {
            "status": "unavailable",
            "checks": {"postgres": "not migrated: run `fedssl-coordinator migrate`"},
        }
        clear_caches()
