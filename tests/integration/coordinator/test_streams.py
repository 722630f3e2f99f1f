"""Events as pages and as a stream, and artifacts on their way out."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
from support.cast import Cast
from support.coordinator import Coordinator
from support.tables import Tables

from fedssl.client.sse import ServerSentEvent, parse_events
from fedssl.protocol.views import EventView
from fedssl_coordinator.events import endpoints


@pytest.fixture
def cast(coordinator: Coordinator, tables: Tables, tmp_path: Path) -> Cast:
    return Cast(coordinator, tables, tmp_path, "a", num_rounds=1)


@contextmanager
def _stream(cast: Cast, **headers: str) -> Iterator[Iterator[ServerSentEvent]]:
    with (
        cast.coordinator.http() as http,
        http.stream("GET", f"/v1/runs/{cast.id}/events/stream", headers=headers, timeout=20) as answer,
    ):
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["cache-control"] == "no-store"
        yield parse_events(answer.iter_raw())


def _log(cast: Cast) -> list[EventView]:
    return list(cast.coordinator.client.event_log(cast.id))


def test_a_finished_run_is_replayed_and_the_stream_ends(cast: Cast) -> None:
    cast.work("a")
    cast.advance()
    with _stream(cast) as events:
        sent = list(events)
    assert [EventView.model_validate_json(event.data) for event in sent] == _log(cast)
    assert [(event.id, event.event) for event in sent] == [(str(event.id), event.kind) for event in _log(cast)]
    assert sent[-1].event == "run.finished"


def test_a_broken_stream_is_resumed_after_the_event_that_was_seen_last(cast: Cast) -> None:
    cast.work("a")
    cast.advance()
    log = _log(cast)
    for seen in (log[0], log[len(log) // 2], log[-2]):
        with _stream(cast, **{"Last-Event-ID": str(seen.id)}) as events:
            assert [int(event.id) for event in events] == [event.id for event in log if event.id > seen.id]


def test_a_stream_resumed_after_the_end_ends(cast: Cast) -> None:
    cast.work("a")
    cast.advance()
    started = time.monotonic()
    with _stream(cast, **{"Last-Event-ID": str(_log(cast)[-1].id)}) as events:
        assert list(events) == []
    with _stream(cast, **{"Last-Event-ID": "9" * 18}) as events:
        assert list(events) == []
    assert time.monotonic() - started < 1.5


def test_a_refusal_after_the_end_is_in_the_log_and_replayed(cast: Cast) -> None:
    item = cast.claim("a")
    cast.coordinator.client.stop(cast.id)
    with pytest.raises(Exception, match="too late"):
        cast.workers["a"].decline(item.assignment_id, "late")
    finished, refused = _log(cast)[-2:]
    assert (finished.kind, refused.kind) == ("run.finished", "assignment.refused")
    with _stream(cast, **{"Last-Event-ID": str(finished.id)}) as events:
        assert [event.event for event in events] == ["assignment.refused"]


def test_events_come_as_they_happen(cast: Cast) -> None:
    """At once, through Redis, and not at the next poll."""
    arrived: dict[str, float] = {}

    def watch() -> None:
        with _stream(cast) as events:
            for event in events:
                arrived.setdefault(event.event, time.monotonic())

    watcher = threading.Thread(target=watch)
    watcher.start()
    while "round.opened" not in arrived:
        time.sleep(0.01)
    time.sleep(0.3)  # the replay is over, the stream waits
    happened = {}
    cast.claim("a")
    happened["assignment.leased"] = time.monotonic()
    cast.deliver("a")
    happened["assignment.accepted"] = time.monotonic()
    cast.advance()
    happened["run.finished"] = time.monotonic()
    watcher.join(10)
    assert not watcher.is_alive()
    assert [kind for kind in arrived if kind in happened] == list(happened)
    assert all(arrived[kind] - at < endpoints.POLL_SECONDS / 2 for kind, at in happened.items())


def test_a_long_log_is_replayed_without_pauses(cast: Cast, tables: Tables) -> None:
    count = 3 * endpoints._BATCH + 7
    tables.execute(
        "INSERT INTO events (kind, run_id, message) SELECT 'note', %s, 'n' || i FROM generate_series(1, %s) AS i",
        cast.id,
        count,
    )
    cast.coordinator.client.stop(cast.id)
    started = time.monotonic()
    with _stream(cast) as events:
        notes = [EventView.model_validate_json(event.data).message for event in events if event.event == "note"]
    assert notes == [f"n{i}" for i in range(1, count + 1)]
    assert time.monotonic() - started < endpoints.POLL_SECONDS
    assert [event.message for event in _log(cast) if event.kind == "note"] == notes


def test_two_watchers_see_the_same(cast: Cast) -> None:
    with _stream(cast) as one, _stream(cast) as two:
        cast.coordinator.client.stop(cast.id)
        assert list(one) == list(two) != []


def test_a_watcher_that_leaves_is_forgotten(cast: Cast) -> None:
    for _ in range(3):
        with _stream(cast) as events:
            next(events)
    cast.coordinator.client.stop(cast.id)  # wakes whoever still listens
    end = time.monotonic() + 5
    while time.monotonic() < end and cast.coordinator.client.ready().status != "ok":
        time.sleep(0.05)
    assert _log(cast)[-1].kind == "run.finished"


@pytest.mark.parametrize("last", ["-1", "x", "1.5", "9" * 19, ""])
def test_a_last_event_id_that_is_none(cast: Cast, last: str) -> None:
    with cast.coordinator.http() as http:
        answer = http.get(f"/v1/runs/{cast.id}/events/stream", headers={"Last-Event-ID": last})
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["loc"] == ["header", "last-event-id"]


def test_a_stream_of_no_run(coordinator: Coordinator) -> None:
    with coordinator.http() as http:
        assert http.get(f"/v1/runs/{uuid4()}/events/stream").status_code == 404


def _get(cast: Cast, token: str | None = None, **headers: str) -> httpx.Response:
    with cast.coordinator.http(token) as http:
        return http.get(f"/v1/artifacts/{cast.round.broadcast}", headers=headers)


RANGES: dict[str, tuple[int, int | None, int | None]] = {
    # header -> status, first byte, byte after the last (None: to the end)
    "bytes=0-": (206, 0, None),
    "bytes=0-0": (206, 0, 1),
    "bytes=10-19": (206, 10, 20),
    "bytes=5-99999999999999999": (206, 5, None),
    "bytes=-5": (200, 0, None),
    "bytes=5-2": (200, 0, None),
    "bytes=0-1,5-6": (200, 0, None),
    "bytes=x-y": (200, 0, None),
    "bytes=": (200, 0, None),
    "lines=0-5": (200, 0, None),
    "bytes=" + "9" * 40 + "-": (200, 0, None),
    "bytes=99999999999-": (416, None, None),
}


@pytest.mark.parametrize("asked", RANGES)
def test_ranges(standing_cast: Cast, asked: str) -> None:
    status, start, stop = RANGES[asked]
    whole = _get(standing_cast).content
    answer = _get(standing_cast, Range=asked)
    assert answer.status_code == status
    if status == 416:
        assert answer.headers["content-range"] == f"bytes */{len(whole)}"
        assert answer.json()["type"] == "urn:fedssl:problem:range-not-satisfiable"
        assert str(len(whole)) in answer.json()["detail"]
        return
    assert answer.content == whole[start:stop]
    assert answer.headers["content-length"] == str(len(answer.content))
    assert answer.headers["etag"] == f'"{standing_cast.round.broadcast}"'
    assert answer.headers["accept-ranges"] == "bytes"
    if status == 206:
        assert start is not None
        assert answer.headers["content-range"] == f"bytes {start}-{start + len(answer.content) - 1}/{len(whole)}"


@pytest.fixture(scope="module")
def standing_cast(standing: Coordinator, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cast]:
    with Tables(standing.database_url) as looking:
        yield Cast(standing, looking, tmp_path_factory.mktemp("cast"), "xy")


def test_ranges_at_the_very_end(standing_cast: Cast) -> None:
    whole = _get(standing_cast).content
    assert _get(standing_cast, Range=f"bytes={len(whole) - 1}-").content == whole[-1:]
    assert _get(standing_cast, Range=f"bytes={len(whole)}-").status_code == 416


def test_a_download_that_began_with_older_weights_begins_anew(cast: Cast) -> None:
    """A run's newest weights change: the rest of a file must never follow another file's beginning."""
    path = f"/v1/runs/{cast.id}/model"
    with cast.coordinator.http() as http:
        old = http.get(path)
        same = http.get(path, headers={"Range": "bytes=100-", "If-Range": old.headers["etag"]})
        assert (same.status_code, same.content) == (206, old.content[100:])
        cast.work("a", value=2.0)
        cast.advance()
        new = http.get(path, headers={"Range": "bytes=100-", "If-Range": old.headers["etag"]})
        assert new.status_code == 200
        assert new.headers["etag"] == f'"{cast.run.model}"' != old.headers["etag"]
        assert new.content == http.get(path).content != old.content
        assert "cache-control" not in new.headers  # this address shows other bytes after the next round
        assert http.get(path, params={"which": "initial"}).content == old.content


def test_weights_before_there_are_any(coordinator: Coordinator) -> None:
    from support.federation import tiny_spec

    run = coordinator.client.create_run(tiny_spec(), start=False)
    with coordinator.http() as http:
        for which in ("latest", "initial"):
            answer = http.get(f"/v1/runs/{run.id}/model", params={"which": which})
            assert answer.status_code == 409
            assert "has no weights yet: start it" in answer.json()["detail"]
        assert http.get(f"/v1/runs/{run.id}/model", params={"which": "best"}).status_code == 422


def test_a_worker_fetches_what_was_sent_to_it_and_nothing_else(
    coordinator: Coordinator, tables: Tables, tmp_path: Path
) -> None:
    cast = Cast(coordinator, tables, tmp_path, "ab", num_rounds=2)
    cast.work("a", value=1.0)
    cast.work("b", value=2.0)
    first, updates = cast.round.broadcast, [str(a.update) for a in cast.round.assignments]
    cast.advance()
    second = cast.round.broadcast
    assert second != first
    tokens = {name: coordinator.worker_token(name) for name in ("a", "stranger")}

    def status(digest: str, name: str) -> int:
        with coordinator.http(tokens[name]) as http:
            return http.get(f"/v1/artifacts/{digest}").status_code

    assert [status(digest, "a") for digest in (first, second)] == [200, 200]
    assert [status(digest, "a") for digest in (*updates, "0" * 64)] == [404, 404, 404]  # not even its own update
    assert [status(digest, "stranger") for digest in (first, second, *updates)] == [404] * 4
    with coordinator.http() as http:  # the operator sees everything
        assert [http.get(f"/v1/artifacts/{digest}").status_code for digest in (first, second, *updates)] == [200] * 4
        assert http.get(f"/v1/artifacts/{'0' * 64}").status_code == 404


def test_an_artifact_that_the_store_has_lost(cast: Cast) -> None:
    digest = cast.round.broadcast
    (cast.coordinator.store / digest[:2] / digest[2:4] / digest).unlink()
    answer = _get(cast)
    assert (answer.status_code, answer.json()["type"]) == (404, "urn:fedssl:problem:not-found")


def test_a_download_streams_and_does_not_fill_the_memory(cast: Cast, tables: Tables) -> None:
    """A sparse file of a gigabyte: its first bytes come at once, and the server goes on when the reader leaves."""
    digest = "ab" * 32
    path = cast.coordinator.store / digest[:2] / digest[2:4] / digest
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.truncate(1 << 30)
    tables.execute("INSERT INTO artifacts (digest, num_bytes) VALUES (%s, %s)", digest, 1 << 30)
    started = time.monotonic()
    with cast.coordinator.http() as http, http.stream("GET", f"/v1/artifacts/{digest}") as answer:
        assert answer.headers["content-length"] == str(1 << 30)
        first: Any = next(answer.iter_raw())
        assert set(first) == {0}
    assert time.monotonic() - started < 5
    assert cast.coordinator.client.ready().status == "ok"
