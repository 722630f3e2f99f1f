"""An API process's connections to Postgres: how many there are, what they carry, and how they work with a pooler."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import QueuePool, event, text

from fedssl.client import Retry, WorkerClient
from fedssl.client.errors import Unavailable
from fedssl_coordinator.core.db import direct_engine, engine, exclusive, transaction
from fedssl_coordinator.federation.work import waiting_claims
from fedssl_coordinator.identity.authentication import Caller
from support.coordinator import Coordinator
from support.scenario import Scenario
from support.servers import Servers
from support.tables import Tables

pytestmark = pytest.mark.full


_WAITING = 40


def _connections(tables: Tables) -> int:
    found = tables.one(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() "
        "AND backend_type = 'client backend'"
    )
    assert isinstance(found, int)
    return found


def _close_connections(seconds: float = 5) -> None:
    """Close this process's connections once no request uses one. Disposing of a pool leaves a used connection open."""
    deadline = time.monotonic() + seconds
    pool = engine().pool
    assert isinstance(pool, QueuePool)
    while pool.checkedout() and time.monotonic() < deadline:
        time.sleep(0.01)
    engine().dispose()
    assert not pool.checkedout()


@contextmanager
def _statements() -> Iterator[list[str]]:
    """Yield a list that collects the statements that this process sends to Postgres during the block."""
    asked: list[str] = []

    def note(connection: object, cursor: object, statement: str, *_: object) -> None:
        asked.append(statement)

    event.listen(engine(), "before_cursor_execute", note)
    try:
        yield asked
    finally:
        event.remove(engine(), "before_cursor_execute", note)


def test_waiting_claims_hold_no_connection_and_share_one_check(
    coordinator: Coordinator, tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is one check per interval for all of them, with two statements."""
    look, all_wait = waiting_claims._to_wake, threading.Event()

    def look_and_count(callers: list[Caller], evaluating: set[Caller]) -> list[Caller]:
        found = look(callers, evaluating)
        if len(callers) == _WAITING:
            all_wait.set()
        return found

    monkeypatch.setattr(waiting_claims, "POLL_SECONDS", 0.5)
    monkeypatch.setattr(waiting_claims, "_to_wake", look_and_count)
    secrets = [coordinator.worker_token(f"c{number}") for number in range(_WAITING)]
    clients = [WorkerClient(coordinator.url, secret, retry=Retry(seconds=0)) for secret in secrets]
    with ThreadPoolExecutor(_WAITING) as pool:
        waiting = [pool.submit(client.claim, 6) for client in clients]
        assert all_wait.wait(4)
        time.sleep(1)  # each claim has also checked once itself
        assert not any(claim.done() for claim in waiting)
        _close_connections()
        with _statements() as asked:
            time.sleep(1.2)
            assert _connections(tables) == 1
        assert 2 <= len(asked) <= 8, asked
        assert [claim.result() for claim in waiting] == [None] * _WAITING


def test_a_thread_does_not_wait_to_finish_an_upload_while_eight_others_are_finished(coordinator: Coordinator) -> None:
    from fedssl_coordinator.core import store

    def ask(name: str) -> bool:
        with store._lock(name) as is_held:
            return is_held

    with ThreadPoolExecutor(1) as pool, ExitStack() as held:
        assert all(held.enter_context(store._lock(f"partial/{number}")) for number in range(8))
        assert not pool.submit(ask, "partial/one-more").result(5)  # 423: the sender retries
        held.close()
        assert pool.submit(ask, "partial/one-more").result(5)


def test_a_failed_check_for_waiting_claims_is_repeated(
    coordinator: Coordinator, tables: Tables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look, has_failed = waiting_claims._to_wake, threading.Event()

    def fail_once(callers: list[Caller], evaluating: set[Caller]) -> list[Caller]:
        if not has_failed.is_set():
            has_failed.set()
            raise ValueError("not of the database")
        return look(callers, evaluating)

    monkeypatch.setattr(waiting_claims, "POLL_SECONDS", 0.1)
    monkeypatch.setattr(waiting_claims, "_to_wake", fail_once)
    worker = coordinator.worker("a")
    with ThreadPoolExecutor(1) as pool:
        claim = pool.submit(worker.claim, 5)
        assert has_failed.wait(5)
        Scenario(coordinator, tables, tmp_path, "a")
        assert claim.result() is not None


def test_new_work_for_one_client_wakes_only_its_claim(coordinator: Coordinator, tables: Tables, tmp_path: Path) -> None:
    """If ten claims wait, nine of them send no more statements."""
    scenario = Scenario(coordinator, tables, tmp_path, num_rounds=1)
    scenario.work("a")
    scenario.claim("b")
    others = [coordinator.worker(f"c{number}", register=False) for number in range(8)]
    with ThreadPoolExecutor(10) as pool:
        waiting = [pool.submit(worker.claim, 3) for worker in (scenario.workers["a"], *others)]
        time.sleep(1)
        scenario.expire_lease("b")
        scenario.advance()
        with _statements() as asked:
            assert scenario.workers["b"].claim(5) is not None
            time.sleep(0.3)
        assert sum("UPDATE clients" in statement for statement in asked) == 1
        assert not any(claim.done() for claim in waiting)


def test_only_the_last_update_enqueues_the_aggregator(
    coordinator: Coordinator, tables: Tables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This also holds if all updates arrive at the same time: each transaction sees the earlier ones."""
    from fedssl_coordinator.core import enqueue

    names = "abcdefgh"
    scenario = Scenario(coordinator, tables, tmp_path, names, num_rounds=1)
    for name in names:
        scenario.claim(name)
    sent: list[tuple[str, str]] = []
    monkeypatch.setattr(enqueue, "_send_task", lambda name, run: sent.append((name, run)))
    with ThreadPoolExecutor(len(names)) as pool:
        list(pool.map(scenario.deliver, names))
    assert [each for each in sent if each[0] == "advance_run"] == [("advance_run", str(scenario.id))]
    assert {state for _, _, state in scenario.states()} == {"accepted"}


def test_a_process_opens_no_more_connections_than_configured(
    servers: Servers, database_url: str, tmp_path: Path
) -> None:
    limits = {"FEDSSL_DATABASE_CONNECTIONS": "15", "FEDSSL_DATABASE_WAIT_SECONDS": "0.5"}
    with (
        Coordinator(database_url, servers.redis_url, tmp_path, **limits) as coordinator,
        Tables(database_url) as tables,
    ):
        secrets = [coordinator.worker_token(f"c{number}") for number in range(30)]
        clients = [WorkerClient(coordinator.url, secret, retry=Retry(seconds=0)) for secret in secrets]
        plain = database_url.replace("+psycopg", "")
        with ThreadPoolExecutor(30) as pool, psycopg.connect(plain) as holder:
            holder.execute("LOCK TABLE clients")  # every claim's transaction blocks, holding its connection
            claims = [pool.submit(client.claim, 0) for client in clients]
            time.sleep(0.3)
            assert _connections(tables) <= 15 + 1
            time.sleep(0.7)
            holder.rollback()
        refused = [claim.exception() for claim in claims if claim.exception() is not None]
        assert 1 <= len(refused) <= 20
        assert {type(error) for error in refused} == {Unavailable}
        assert "send the request again shortly" in str(refused[0])


def test_no_setting_and_no_lock_outlives_its_transaction_behind_a_pooler(
    servers: Servers, database_url: str, tmp_path: Path
) -> None:
    """The pooler's connection then serves other clients, which would inherit timeouts. A lock would have no owner."""
    settings = {"FEDSSL_DATABASE_DIRECT_URL": database_url, "FEDSSL_STATEMENT_SECONDS": "7"}
    with Coordinator(database_url, servers.redis_url, tmp_path, **settings) as coordinator:
        assert coordinator.client.ready().status == "ok"
        with transaction() as session:
            assert session.scalar(text("SHOW statement_timeout")) == "7s"
            own = session.scalar(text("SELECT pg_backend_pid()"))
        raw = engine().raw_connection()
        try:
            assert raw.driver_connection is not None
            assert raw.driver_connection.prepare_threshold is None
            [timeout] = raw.driver_connection.execute("SHOW statement_timeout").fetchone()
            assert timeout == "0"
        finally:
            raw.close()
        assert direct_engine() is not engine()
        with exclusive("test") as connection, exclusive("test") as second:
            assert connection is not None
            assert connection.scalar(text("SELECT pg_backend_pid()")) != own
            assert second is None


def test_only_a_connection_that_was_idle_is_tested(
    coordinator: Coordinator, tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A test costs a round trip. An idle connection may have ended, in which case the request gets a new one."""
    from fedssl_coordinator.core import db

    tested: list[object] = []
    ping = engine().dialect.do_ping

    def note(connection: psycopg.Connection) -> bool:
        tested.append(connection)
        return ping(connection)  # type: ignore[arg-type]

    def ask() -> None:
        with transaction() as session:
            assert session.scalar(text("SELECT 1")) == 1

    monkeypatch.setattr(engine().dialect, "do_ping", note)
    ask()
    tested.clear()
    ask()
    assert tested == []
    monkeypatch.setattr(db, "_TESTED_SECONDS", 0.0)
    ask()
    assert len(tested) == 1
    tables.one(
        "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
        "WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
    )
    ask()
    assert len(tested) == 2


def test_connections_opened_while_the_database_was_read_only_are_replaced(
    coordinator: Coordinator, tables: Tables
) -> None:
    """This happens after a failover, or if a provider forbids writing because the disk is nearly full."""
    worker = coordinator.worker("a")
    [name] = tables.query("SELECT quote_ident(current_database())")[0]
    tables.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on")  # type: ignore[arg-type]
    try:
        _close_connections()
        for act in (worker.heartbeat, lambda: worker.claim(0), lambda: coordinator.client.create_token("viewer")):
            with pytest.raises(Unavailable, match="send the request again shortly"):
                act()
    finally:
        tables.execute(f"ALTER DATABASE {name} RESET default_transaction_read_only")  # type: ignore[arg-type]
    worker.heartbeat()
    assert worker.claim(0) is None
    coordinator.client.create_token("viewer")
