"""Downloads of artifacts: ranges, resumed downloads, and who may fetch what."""

import itertools
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.coordinator import Coordinator
from support.federation import tiny_spec
from support.scenario import Scenario
from support.tables import Tables


@pytest.fixture
def scenario(coordinator: Coordinator, tables: Tables, tmp_path: Path) -> Scenario:
    return Scenario(coordinator, tables, tmp_path, "a", num_rounds=1)


def _get(scenario: Scenario, token: str | None = None, **headers: str) -> httpx.Response:
    with scenario.coordinator.http(token) as http:
        return http.get(f"/v1/artifacts/{scenario.round.broadcast}", headers=headers)


RANGES: dict[str, tuple[int, int | None, int | None]] = {
    # header -> status, first byte, byte after the last one (None if the range reaches the end)
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


def test_ranges_are_served_ignored_or_refused(scenario: Scenario) -> None:
    digest = scenario.round.broadcast
    with scenario.coordinator.http() as http:
        whole = http.get(f"/v1/artifacts/{digest}").content
        for asked in RANGES:
            _check_range(http.get(f"/v1/artifacts/{digest}", headers={"Range": asked}), asked, whole, digest)


def _check_range(answer: httpx.Response, asked: str, whole: bytes, digest: str) -> None:
    status, start, stop = RANGES[asked]
    assert answer.status_code == status, asked
    if status == 416:
        assert answer.headers["content-range"] == f"bytes */{len(whole)}"
        assert answer.json()["type"] == "urn:fedssl:problem:range-not-satisfiable"
        assert str(len(whole)) in answer.json()["detail"]
        return
    assert answer.content == whole[start:stop], asked
    assert answer.headers["content-length"] == str(len(answer.content))
    assert answer.headers["etag"] == f'"{digest}"'
    assert answer.headers["accept-ranges"] == "bytes"
    if status == 206:
        assert start is not None
        content_range = f"bytes {start}-{start + len(answer.content) - 1}/{len(whole)}"
        assert answer.headers["content-range"] == content_range, asked


def test_the_last_byte_can_be_requested_and_none_after_it(scenario: Scenario) -> None:
    whole = _get(scenario).content
    assert _get(scenario, Range=f"bytes={len(whole) - 1}-").content == whole[-1:]
    assert _get(scenario, Range=f"bytes={len(whole)}-").status_code == 416


def test_a_download_that_began_with_older_weights_starts_from_scratch(scenario: Scenario) -> None:
    """A run's newest weights change: the rest of a file must never follow another file's beginning."""
    path = f"/v1/runs/{scenario.id}/model"
    with scenario.coordinator.http() as http:
        old = http.get(path)
        same = http.get(path, headers={"Range": "bytes=100-", "If-Range": old.headers["etag"]})
        assert (same.status_code, same.content) == (206, old.content[100:])
        scenario.work("a", value=2.0)
        scenario.advance()
        new = http.get(path, headers={"Range": "bytes=100-", "If-Range": old.headers["etag"]})
        assert new.status_code == 200
        assert new.headers["etag"] == f'"{scenario.run.model}"' != old.headers["etag"]
        assert new.content == http.get(path).content != old.content
        assert "cache-control" not in new.headers  # this address shows other bytes after the next round
        assert http.get(path, params={"which": "initial"}).content == old.content


# If-None-Match, with {} for the ETag, and whether it names what the caller asks for
NAMED = {
    '{}': True, 'W/{}': True, "*": True, '"x", {}': True, '"x",W/{} , "y"': True, '"x"': False, "": False,
    "bytes": False,
}  # fmt: skip


def test_bytes_that_the_caller_already_has_are_not_sent_again(scenario: Scenario) -> None:
    digest = scenario.round.broadcast
    etag = f'"{digest}"'
    with scenario.coordinator.http() as http:
        for path, method, (named, is_known) in itertools.product(
            (f"/v1/artifacts/{digest}", f"/v1/runs/{scenario.id}/model"), ("GET", "HEAD"), NAMED.items()
        ):
            headers = {"If-None-Match": named.format(etag), "Range": "bytes=0-9", "Accept-Direct": "1"}
            answer = http.request(method, path, headers=headers)
            assert answer.headers["etag"] == etag
            expected = 304 if is_known else 206 if method == "GET" else 200
            assert answer.status_code == expected, (path, method, named)
            assert len(answer.content) == (10 if expected == 206 else 0), (path, method, named)


def test_static_files_that_the_browser_already_has_are_not_sent_again(shared_coordinator: Coordinator) -> None:
    with shared_coordinator.bare_http() as http:
        for encoding in ("gzip", "identity"):
            headers = {"Accept-Encoding": encoding}
            first = http.get("/static/x/frame.css", headers=headers)
            again = http.get("/static/x/frame.css", headers={**headers, "If-None-Match": first.headers["etag"]})
            assert (first.status_code, again.status_code, again.content) == (200, 304, b"")
            part = http.get("/static/x/frame.css", headers={**headers, "Range": "bytes=0-9"})
            assert (part.status_code, part.content) == (206, first.content[:10])
            assert "content-encoding" not in part.headers


def test_two_if_none_match_headers_count_as_one_list(scenario: Scenario) -> None:
    lines = [("If-None-Match", '"x"'), ("If-None-Match", f'"{scenario.round.broadcast}"')]
    with scenario.coordinator.http() as http:
        assert http.get(f"/v1/artifacts/{scenario.round.broadcast}", headers=lines).status_code == 304


def test_a_caller_without_permission_learns_nothing_from_if_none_match(scenario: Scenario) -> None:
    digest = scenario.round.broadcast
    stranger = scenario.coordinator.worker_token("stranger")
    headers = {"If-None-Match": f'"{digest}"'}
    assert _get(scenario, stranger, **headers).status_code == 404
    with scenario.coordinator.bare_http() as http:
        assert http.get(f"/v1/artifacts/{digest}", headers=headers).status_code == 401
    (scenario.coordinator.store / digest[:2] / digest[2:4] / digest).unlink()
    assert _get(scenario, **headers).status_code == 404


def test_head_has_the_headers_of_get(scenario: Scenario) -> None:
    for path in (f"/v1/artifacts/{scenario.round.broadcast}", f"/v1/runs/{scenario.id}/model"):
        with scenario.coordinator.http() as http:
            whole, head = http.get(path), http.head(path)
            assert (head.status_code, head.content) == (200, b"")
            for name in ("etag", "content-length", "content-type", "accept-ranges"):
                assert head.headers[name] == whole.headers[name]
            # A range is only for GET; everything else is ignored.
            ranged = http.head(path, headers={"Range": "bytes=99999999999-"})
            assert (ranged.status_code, ranged.headers["content-length"]) == (200, whole.headers["content-length"])


def test_requesting_the_weights_of_a_run_that_has_none_is_refused(coordinator: Coordinator) -> None:

    run = coordinator.client.create_run(tiny_spec(), start=False)
    with coordinator.http() as http:
        for which in ("latest", "initial"):
            answer = http.get(f"/v1/runs/{run.id}/model", params={"which": which})
            assert answer.status_code == 409
            assert "has no weights yet: start it" in answer.json()["detail"]
        assert http.get(f"/v1/runs/{run.id}/model", params={"which": "best"}).status_code == 422


def test_a_worker_can_fetch_only_what_was_sent_to_it(coordinator: Coordinator, tables: Tables, tmp_path: Path) -> None:
    scenario = Scenario(coordinator, tables, tmp_path, "ab", num_rounds=2)
    scenario.work("a", value=1.0)
    scenario.work("b", value=2.0)
    first, updates = scenario.round.broadcast, [str(a.update) for a in scenario.round.assignments]
    scenario.advance()
    second = scenario.round.broadcast
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


def test_an_artifact_that_the_store_has_lost_is_not_found(scenario: Scenario) -> None:
    digest = scenario.round.broadcast
    (scenario.coordinator.store / digest[:2] / digest[2:4] / digest).unlink()
    answer = _get(scenario)
    assert (answer.status_code, answer.json()["type"]) == (404, "urn:fedssl:problem:not-found")


def test_a_download_is_streamed_and_does_not_fill_the_memory(scenario: Scenario, tables: Tables) -> None:
    """The first bytes of a sparse gigabyte arrive at once, and the server still works after the reader has left."""
    digest = "ab" * 32
    path = scenario.coordinator.store / digest[:2] / digest[2:4] / digest
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.truncate(1 << 30)
    tables.execute("INSERT INTO artifacts (digest, num_bytes) VALUES (%s, %s)", digest, 1 << 30)
    started = time.monotonic()
    with scenario.coordinator.http() as http, http.stream("GET", f"/v1/artifacts/{digest}") as answer:
        assert answer.headers["content-length"] == str(1 << 30)
        first: Any = next(answer.iter_raw())
        assert set(first) == {0}
    assert time.monotonic() - started < 5
    assert scenario.coordinator.client.ready().status == "ok"
