"""Changes are committed before they are answered or announced, and readers see events in order."""

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import event
from sqlalchemy.orm import Session

from fedssl.client import ApiError, ServerError, Unavailable
from support.coordinator import Coordinator
from support.federation import tiny_spec
from support.scenario import Scenario
from support.tables import ChangeWatcher, Tables

pytestmark = pytest.mark.full


@pytest.fixture
def slow_commits() -> Iterator[None]:
    """Make every commit take 0.2 s, so that an answer before the commit is noticed."""

    def wait(session: Session) -> None:
        time.sleep(0.2)

    event.listen(Session, "before_commit", wait)
    yield
    event.remove(Session, "before_commit", wait)


def test_an_answered_change_is_visible_to_other_connections(
    coordinator: Coordinator, tables: Tables, slow_commits: None
) -> None:
    """The session dependency commits before the response is sent."""
    run = coordinator.client.create_run(tiny_spec(cohort={"clients": ["a"]}))
    assert tables.query("SELECT state FROM runs") == [("running",)]
    token = coordinator.client.create_token("worker", "a")
    assert tables.one("SELECT count(*) FROM tokens WHERE id = %s", token.id) == 1
    worker = coordinator.worker("a")
    assert tables.one("SELECT num_images FROM clients") == 1000
    coordinator.advance(run.id)
    item = worker.claim(0)
    assert item is not None
    assert tables.query("SELECT state FROM assignments") == [("leased",)]
    worker.decline(item.assignment_id, "no")
    assert tables.query("SELECT state FROM assignments") == [("declined",)]
    coordinator.client.stop(run.id)
    assert tables.query("SELECT outcome FROM runs") == [("stopped",)]
    with pytest.raises(ApiError):
        coordinator.client.resume(run.id)
    assert tables.one("SELECT count(*) FROM events WHERE run_id = %s AND kind = 'run.finished'", run.id) == 1


@pytest.fixture
def failing_commits(coordinator: Coordinator, tables: Tables, request: pytest.FixtureRequest) -> Iterator[None]:
    """Make Postgres refuse new and changed runs at the commit, after all statements have succeeded."""
    tables.execute(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE EXCEPTION 'not today' USING ERRCODE = TG_ARGV[0]; END $$"
    )
    tables.execute(
        "CREATE CONSTRAINT TRIGGER refuses AFTER INSERT OR UPDATE ON runs DEFERRABLE INITIALLY DEFERRED FOR EACH ROW "
        f"EXECUTE FUNCTION refuse('{request.param}')"  # type: ignore[arg-type]
    )
    yield
    tables.execute("DROP FUNCTION refuse CASCADE")


@pytest.mark.parametrize(
    ("failing_commits", "kind"), [("40001", Unavailable), ("P0001", ServerError)], indirect=["failing_commits"]
)
def test_a_failed_commit_is_answered_with_an_error(
    coordinator: Coordinator, change_watcher: ChangeWatcher, failing_commits: None, kind: type[ServerError]
) -> None:
    with change_watcher.nothing_changes() as events, pytest.raises(kind) as caught:
        coordinator.client.create_run(tiny_spec())
    assert events == []
    if kind is Unavailable:
        assert caught.value.retry_after == 2
        assert "the database does not answer at the moment: send the request again" in str(caught.value)
    else:
        assert caught.value.slug == "internal"
        assert "not today" not in str(caught.value)


def test_a_reader_sees_the_events_of_a_run_in_the_order_of_their_ids(coordinator: Coordinator, tables: Tables) -> None:
    """Event 7 of a slow transaction must not appear after event 8 of a quick one has been read."""
    from fedssl_coordinator.core import audit
    from fedssl_coordinator.core.db import _factory, transaction

    run = coordinator.client.create_run(tiny_spec(), start=False)
    last = tables.last_event()

    def quick() -> None:
        with transaction() as session:
            audit.record(session, "quick", "", run_id=run.id)

    with _factory()() as slow:
        audit.record(slow, "slow", "", run_id=run.id)
        audit._write(slow)  # the first step of a commit: the event has its id, but is not visible yet
        second = threading.Thread(target=quick)
        second.start()
        second.join(0.3)
        assert second.is_alive()  # waits for the first transaction
        assert tables.events_after(last) == []
        with transaction() as session:  # another run's events do not wait
            audit.record(session, "elsewhere", "")
        slow.commit()
    second.join(5)
    assert [e.kind for e in tables.events_after(last) if e.run_id == run.id] == ["slow", "quick"]


def test_a_rollback_drops_the_events_and_callbacks_of_its_transaction(coordinator: Coordinator, tables: Tables) -> None:
    from fedssl_coordinator.core import audit
    from fedssl_coordinator.core.db import after_commit, transaction

    last = tables.last_event()
    sent: list[str] = []
    with transaction() as session:
        audit.record(session, "never", "")
        after_commit(session, lambda: sent.append("never"))
        session.rollback()
    with transaction() as session:
        audit.record(session, "once", "")
        after_commit(session, lambda: sent.append("once"))
        assert sent == []
    assert sent == ["once"]
    assert [e.kind for e in tables.events_after(last)] == ["once"]


def test_hundreds_of_concurrent_requests_are_all_answered(coordinator: Coordinator) -> None:
    """There are fewer threads and connections than requests: no request may hold one while it waits for the other."""
    run = coordinator.client.create_run(tiny_spec(), start=False)
    host, port = coordinator.url.removeprefix("http://").split(":")
    request = (
        f"GET /v1/runs/{run.id} HTTP/1.1\r\nHost: here\r\nConnection: close\r\n"
        f"Authorization: Bearer {coordinator.operator_token}\r\n\r\n"
    ).encode()
    connections = [socket.create_connection((host, int(port)), timeout=25) for _ in range(200)]
    for connection in connections:
        connection.sendall(request)
    answers = []
    for connection in connections:
        with connection:
            answers.append(connection.recv(12))
    assert answers == [b"HTTP/1.1 200"] * 200


def test_the_number_of_queries_does_not_grow_with_the_length_of_a_list(
    coordinator: Coordinator, tables: Tables, tmp_path: Path
) -> None:
    from fedssl_coordinator.core.db import engine

    statements: list[str] = []

    def note(connection: object, cursor: object, statement: str, *_: object) -> None:
        statements.append(statement)

    event.listen(engine(), "before_cursor_execute", note)
    counts = []
    scenario = Scenario(coordinator, tables, tmp_path, "abc", num_rounds=5)
    for _ in range(2):
        for _ in range(2):
            scenario.work("a", "b", "c")
            scenario.advance()
            coordinator.client.create_run(tiny_spec(), start=False)
        statements.clear()
        assert len(scenario.rounds) > 2
        assert len(list(coordinator.client.runs())) > 2
        assert len(list(coordinator.client.clients())) == 3
        assert len(list(coordinator.client.tokens())) == 5
        assert list(coordinator.client.metrics(scenario.id))
        assert scenario.run.current_round is not None
        counts.append(len(statements))
    assert counts[0] == counts[1]
    assert counts[0] <= 4 * 6 + 6  # four for the reasons why runs wait, two for the clients of rounds by state
