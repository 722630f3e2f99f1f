"""Events of a run, as pages and as a stream."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import pytest

from fedssl.client.sse import ServerSentEvent, parse_events
from fedssl.protocol.views import EventView
from fedssl_coordinator.federation.events import endpoints
from support.coordinator import Coordinator
from support.scenario import Scenario
from support.tables import Tables


@pytest.fixture
def scenario(coordinator: Coordinator, tables: Tables, tmp_path: Path) -> Scenario:
    return Scenario(coordinator, tables, tmp_path, "a", num_rounds=1)


@contextmanager
def _stream(scenario: Scenario, **headers: str) -> Iterator[Iterator[ServerSentEvent]]:
    with (
        scenario.coordinator.http() as http,
        http.stream("GET", f"/v1/runs/{scenario.id}/events/stream", headers=headers, timeout=20) as answer,
    ):
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["cache-control"] == "no-store"
        yield parse_events(answer.iter_raw())


def _log(scenario: Scenario) -> list[EventView]:
    return list(scenario.coordinator.client.event_log(scenario.id))


def test_the_stream_of_a_finished_run_replays_its_events_and_ends(scenario: Scenario) -> None:
    scenario.work("a")
    scenario.advance()
    with _stream(scenario) as events:
        sent = list(events)
    assert [EventView.model_validate_json(event.data) for event in sent] == _log(scenario)
    assert [(event.id, event.event) for event in sent] == [(str(event.id), event.kind) for event in _log(scenario)]
    assert sent[-1].event == "run.finished"


def test_a_broken_stream_resumes_after_the_last_seen_event(scenario: Scenario) -> None:
    scenario.work("a")
    scenario.advance()
    log = _log(scenario)
    for seen in (log[0], log[len(log) // 2], log[-2]):
        with _stream(scenario, **{"Last-Event-ID": str(seen.id)}) as events:
            assert [int(event.id) for event in events] == [event.id for event in log if event.id > seen.id]


def test_a_stream_that_is_resumed_after_the_last_event_ends_at_once(scenario: Scenario) -> None:
    scenario.work("a")
    scenario.advance()
    started = time.monotonic()
    with _stream(scenario, **{"Last-Event-ID": str(_log(scenario)[-1].id)}) as events:
        assert list(events) == []
    with _stream(scenario, **{"Last-Event-ID": "9" * 18}) as events:
        assert list(events) == []
    assert time.monotonic() - started < 1.5


def test_a_refusal_after_the_end_of_a_run_is_logged_and_replayed(scenario: Scenario) -> None:
    item = scenario.claim("a")
    scenario.coordinator.client.stop(scenario.id)
    with pytest.raises(Exception, match="too late"):
        scenario.workers["a"].decline(item.assignment_id, "late")
    finished, refused = _log(scenario)[-2:]
    assert (finished.kind, refused.kind) == ("run.finished", "assignment.refused")
    with _stream(scenario, **{"Last-Event-ID": str(finished.id)}) as events:
        assert [event.event for event in events] == ["assignment.refused"]


def test_events_are_streamed_as_they_happen(scenario: Scenario, monkeypatch: pytest.MonkeyPatch) -> None:
    """They arrive at once, through Redis, and not only at the next poll."""
    monkeypatch.setattr(endpoints, "POLL_SECONDS", 20.0)  # more than a busy machine takes to send an event
    arrived: dict[str, float] = {}

    def watch() -> None:
        with _stream(scenario) as events:
            for event in events:
                arrived.setdefault(event.event, time.monotonic())

    watcher = threading.Thread(target=watch)
    watcher.start()
    while "round.opened" not in arrived:
        time.sleep(0.01)
    time.sleep(0.3)  # the replay is over, and the stream waits
    happened = {}
    scenario.claim("a")
    happened["assignment.leased"] = time.monotonic()
    scenario.deliver("a")
    happened["assignment.accepted"] = time.monotonic()
    scenario.advance()
    happened["run.finished"] = time.monotonic()
    watcher.join(30)
    assert not watcher.is_alive()
    assert [kind for kind in arrived if kind in happened] == list(happened)
    assert all(arrived[kind] - at < endpoints.POLL_SECONDS / 2 for kind, at in happened.items())


def test_a_long_log_is_replayed_without_pauses(scenario: Scenario, tables: Tables) -> None:
    count = 3 * endpoints._BATCH + 7
    tables.execute(
        "INSERT INTO events (kind, run_id, message) SELECT 'note', %s, 'n' || i FROM generate_series(1, %s) AS i",
        scenario.id,
        count,
    )
    scenario.coordinator.client.stop(scenario.id)
    started = time.monotonic()
    with _stream(scenario) as events:
        notes = [EventView.model_validate_json(event.data).message for event in events if event.event == "note"]
    assert notes == [f"n{i}" for i in range(1, count + 1)]
    assert time.monotonic() - started < endpoints.POLL_SECONDS
    assert [event.message for event in _log(scenario) if event.kind == "note"] == notes


def test_two_watchers_see_the_same_events(scenario: Scenario) -> None:
    with _stream(scenario) as one, _stream(scenario) as two:
        scenario.coordinator.client.stop(scenario.id)
        assert list(one) == list(two) != []


def test_streams_can_be_left_before_their_end(scenario: Scenario) -> None:
    for _ in range(3):
        with _stream(scenario) as events:
            next(events)
    scenario.coordinator.client.stop(scenario.id)  # wakes streams that are still open
    end = time.monotonic() + 5
    while time.monotonic() < end and scenario.coordinator.client.ready().status != "ok":
        time.sleep(0.05)
    assert _log(scenario)[-1].kind == "run.finished"


def test_an_invalid_last_event_id_is_refused(scenario: Scenario) -> None:
    with scenario.coordinator.http() as http:
        for last in ("-1", "x", "1.5", "9" * 19, ""):
            answer = http.get(f"/v1/runs/{scenario.id}/events/stream", headers={"Last-Event-ID": last})
            assert answer.status_code == 422, last
            assert answer.json()["errors"][0]["loc"] == ["header", "last-event-id"], last


def test_the_stream_of_an_unknown_run_is_not_found(coordinator: Coordinator) -> None:
    with coordinator.http() as http:
        assert http.get(f"/v1/runs/{uuid4()}/events/stream").status_code == 404


def test_a_stream_ends_when_its_token_is_revoked(scenario: Scenario) -> None:
    token = scenario.coordinator.client.create_token("operator")
    with (
        scenario.coordinator.http(token.secret) as http,
        http.stream("GET", f"/v1/runs/{scenario.id}/events/stream", timeout=20) as answer,
    ):
        events = parse_events(answer.iter_raw())
        assert next(events).event == "run.created"
        scenario.coordinator.client.revoke_token(token.id)
        scenario.claim("a")  # wakes the stream, which must not send this event
        assert "assignment.leased" not in [event.event for event in events]
