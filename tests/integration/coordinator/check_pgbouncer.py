"""`make pooler-test`: run the coordinator through a real PgBouncer in transaction mode, over few connections."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import text

from fedssl.client import Retry, WorkerClient
from fedssl.simulation import simulate
from fedssl_coordinator.core.db import engine, exclusive, transaction
from support.coordinator import Coordinator
from support.methods import method_spec, shards
from support.pgbouncer import NUM_CONNECTIONS, PgBouncer, is_installed
from support.replicas import Replicas
from support.servers import Servers
from support.tables import Tables


@pytest.fixture
def pooler(database_url: str) -> Iterator[PgBouncer]:
    if not is_installed():
        pytest.exit("this needs PgBouncer: install it (Debian: pgbouncer), or say where it is with PGBOUNCER=...", 2)
    with PgBouncer(database_url) as running:
        yield running


def _settings(database_url: str) -> dict[str, str]:
    return {"FEDSSL_DATABASE_DIRECT_URL": database_url, "FEDSSL_STATEMENT_SECONDS": "7"}


def test_many_requests_share_few_connections(
    pooler: PgBouncer, servers: Servers, database_url: str, tmp_path: Path
) -> None:
    with (
        Coordinator(pooler.url, servers.redis_url, tmp_path, **_settings(database_url)) as coordinator,
        Tables(database_url) as tables,
    ):
        secrets = [coordinator.worker_token(f"c{number}") for number in range(20)]
        workers = [WorkerClient(coordinator.url, secret, retry=Retry(seconds=0)) for secret in secrets]

        def ask(worker: WorkerClient) -> None:
            for _ in range(10):  # often enough that psycopg would prepare
                worker.heartbeat()
                assert worker.claim(0) is None

        with ThreadPoolExecutor(20) as pool:
            list(pool.map(ask, workers))
        busy = tables.one(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() "
            "AND backend_type = 'client backend'"
        )
        assert busy <= NUM_CONNECTIONS


def test_timeouts_and_locks_do_not_leak_to_other_connections(
    pooler: PgBouncer, servers: Servers, database_url: str, tmp_path: Path
) -> None:
    with Coordinator(pooler.url, servers.redis_url, tmp_path, **_settings(database_url)):
        for _ in range(8):
            with transaction() as session:
                assert session.scalar(text("SHOW statement_timeout")) == "7s"
        with psycopg.connect(pooler.url.replace("+psycopg", ""), prepare_threshold=None) as other:
            assert other.execute("SHOW statement_timeout").fetchone() == ("0",)
        with exclusive("a") as first, exclusive("a") as second:
            assert first is not None
            assert second is None
        with exclusive("a") as again:
            assert again is not None
        engine().dispose()


def test_a_federation_behind_a_pooler_gives_the_bits_of_the_simulation(
    pooler: PgBouncer, servers: Servers, database_url: str, tmp_path: Path
) -> None:
    spec = method_spec("fedbyol")
    images = shards(spec)
    num = {"api": 2, "aggregator": 2, "beat": 2}
    settings = {"FEDSSL_DATABASE_DIRECT_URL": database_url}
    with Replicas(pooler.url, servers.redis_url, tmp_path / "run", images, num=num, **settings) as running:
        for name in images:
            running.start(name)
        run = running.client.create_run(spec)
        running.assert_ends_with(run.id, simulate(spec, images).model)
