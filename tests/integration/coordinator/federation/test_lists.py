"""Lists: every item appears once and in order, whatever the size of the pages."""

from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from fedssl.client import NotFound
from fedssl.protocol.states import RunState
from fedssl.protocol.views import RunView
from fedssl_coordinator.core.paging import encode_cursor
from support.coordinator import Coordinator
from support.federation import tiny_spec
from support.scenario import Scenario
from support.tables import Tables


def _pages(coordinator: Coordinator, path: str, limit: int, **query: str) -> list[list[dict[str, Any]]]:
    pages = []
    with coordinator.http() as http:
        while True:
            answer = http.get(path, params={"limit": limit, **query})
            assert answer.status_code == 200, answer.text
            pages.append(answer.json()["items"])
            if answer.json()["next_cursor"] is None:
                return pages
            query["cursor"] = answer.json()["next_cursor"]


def _assert_cut_anyhow(coordinator: Coordinator, path: str, key: str, expected: list[Any]) -> None:
    few = (1, 2, 3) if len(expected) < 10 else (7,)
    for limit in (*few, len(expected), len(expected) + 1, 100):
        pages = _pages(coordinator, path, limit)
        assert [item[key] for page in pages for item in page] == expected
        assert [len(page) for page in pages[:-1]] == [limit] * (len(pages) - 1)
        assert pages[-1] or len(pages) == 1  # no empty page at the end


def _run_with_a_round(coordinator: Coordinator) -> RunView:
    coordinator.worker("a")
    run = coordinator.client.create_run(tiny_spec())
    coordinator.advance(run.id)
    coordinator.advance(run.id)
    return run


def test_runs_are_listed_newest_first_even_if_created_at_the_same_moment(
    coordinator: Coordinator, tables: Tables
) -> None:
    for _ in range(5):
        coordinator.client.create_run(tiny_spec(), start=False)
    tables.execute(
        "UPDATE runs SET created_at = '2026-01-01 12:00:00.000001+02' WHERE id IN (SELECT id FROM runs LIMIT 3)"
    )
    expected = tables.query("SELECT id::text FROM runs ORDER BY created_at DESC, id DESC")
    _assert_cut_anyhow(coordinator, "/v1/runs", "id", [run_id for (run_id,) in expected])


def test_runs_can_be_listed_by_state(coordinator: Coordinator) -> None:
    runs = [coordinator.client.create_run(tiny_spec(), start=i % 2 == 0) for i in range(5)]
    for state, expected in ((RunState.RUNNING, runs[::2]), (RunState.CREATED, runs[1::2]), (RunState.PAUSED, [])):
        [*pages] = _pages(coordinator, "/v1/runs", 2, state=state.value)
        assert [item["id"] for page in pages for item in page] == [str(run.id) for run in reversed(expected)]
    with coordinator.http() as http:
        assert http.get("/v1/runs", params={"state": "lost"}).status_code == 422


def test_clients_are_listed_by_name_and_tokens_newest_first(coordinator: Coordinator, tables: Tables) -> None:
    names = ["b", "a-1", "a", "z9", "0"]
    for name in names:
        coordinator.worker_token(name)
    _assert_cut_anyhow(coordinator, "/v1/clients", "id", sorted(names))
    expected = tables.query("SELECT id::text FROM tokens ORDER BY created_at DESC, id DESC")
    _assert_cut_anyhow(coordinator, "/v1/tokens", "id", [token_id for (token_id,) in expected])


def test_rounds_events_and_metrics_are_listed_oldest_first(
    coordinator: Coordinator, tables: Tables, tmp_path: Path
) -> None:
    scenario, other = (Scenario(coordinator, tables, tmp_path, names, num_rounds=3) for names in ("ab", "cd"))
    for _ in range(3):
        for one in (other, scenario):  # both write to the same tables in turn
            one.work(*one.workers)
            one.advance()
    path = f"/v1/runs/{scenario.id}"
    _assert_cut_anyhow(coordinator, f"{path}/rounds", "number", [1, 2, 3])
    assert all(len(r["assignments"]) == 2 for page in _pages(coordinator, f"{path}/rounds", 2) for r in page)
    events = tables.query("SELECT id FROM events WHERE run_id = %s ORDER BY id", scenario.id)
    _assert_cut_anyhow(coordinator, f"{path}/events", "id", [event_id for (event_id,) in events])
    opened = tables.query("SELECT id FROM events WHERE run_id = %s AND kind = 'round.opened' ORDER BY id", scenario.id)
    pages = _pages(coordinator, f"{path}/events", 1, kind="round.opened")
    assert [event["id"] for page in pages for event in page] == [event_id for (event_id,) in opened]
    losses = [m for page in _pages(coordinator, f"{path}/metrics", 2, name="loss") for m in page]
    assert [(m["round_number"], m["client_id"]) for m in losses] == [
        (number, client) for number in (1, 2, 3) for client in ("a", "b", None)
    ]
    assert _pages(coordinator, f"{path}/metrics", 2, name="nothing/of_the_kind") == [[]]


def test_a_round_has_counts_and_a_list_of_assignments(coordinator: Coordinator, tables: Tables, tmp_path: Path) -> None:
    scenario, other = (Scenario(coordinator, tables, tmp_path, names, num_rounds=2) for names in ("abcd", "ef"))
    scenario.claim("a")
    scenario.expire_lease("a")
    scenario.advance()  # offered again
    scenario.work("b")
    scenario.claim("c")
    expected = [("a", 1), ("a", 2), ("b", 1), ("c", 1), ("d", 1)]
    client, path = coordinator.client, f"/v1/runs/{scenario.id}/rounds/1/assignments"
    assert [(one.client_id, one.attempt) for one in client.assignments(scenario.id, 1)] == expected
    assert list(client.assignments(scenario.id, 1)) == client.run(scenario.id).current_round.assignments  # type: ignore[union-attr]
    _assert_cut_anyhow(coordinator, path, "client_id", [name for name, _ in expected])
    counts = {"offered": 2, "leased": 1, "accepted": 1}  # of the newest attempts
    for view in (
        client.run(scenario.id, assignments=False).current_round,
        *client.rounds(scenario.id, assignments=False),
    ):
        assert view is not None
        assert (view.counts, view.assignments) == (counts, [])
    assert scenario.round.counts == counts
    assert [one.client_id for one in client.assignments(other.id, 1)] == ["e", "f"]
    for run_id, number in ((scenario.id, 2), (uuid4(), 1)):
        with pytest.raises(NotFound):
            list(client.assignments(run_id, number))


LISTS = [
    "/v1/runs",
    "/v1/clients",
    "/v1/tokens",
    "/v1/public-datasets",
    "/v1/evaluation-datasets",
    "/v1/runs/{}/rounds/1/assignments",
    *(f"/v1/runs/{{}}/{what}" for what in ("rounds", "events", "metrics")),
]


@pytest.mark.parametrize("path", LISTS)
def test_invalid_limits_and_cursors_are_refused(shared_coordinator: Coordinator, path: str) -> None:
    has_round = "assignments" in path
    run = (
        _run_with_a_round(shared_coordinator)
        if has_round
        else shared_coordinator.client.create_run(tiny_spec(), start=False)
    )
    with shared_coordinator.http() as http:
        for query in (
            {"limit": "0"}, {"limit": "-1"}, {"limit": "501"}, {"limit": "x"}, {"cursor": "x"}, {"cursor": "é"},
            {"cursor": "x" * 501}, {"cursor": encode_cursor(None, None, None)},
        ):  # fmt: skip
            answer = http.get(path.format(run.id), params=query)
            assert answer.status_code == 422, (query, answer.text)
            assert answer.json()["type"] == "urn:fedssl:problem:invalid-request"
            assert next(iter(query)) in answer.json()["detail"]
        far = http.get(path.format(run.id), params={"cursor": encode_cursor(2**63 - 1)})
        assert far.status_code in (200, 422)  # beyond the last row, or another list's cursor


def test_a_page_of_rounds_is_limited_by_its_number_of_assignments(
    coordinator: Coordinator, tables: Tables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round with more clients than the limit is a page of its own."""
    from fedssl_coordinator.federation.runs import service

    scenario = Scenario(coordinator, tables, tmp_path, "abc", num_rounds=3)
    for _ in range(3):
        scenario.work("a", "b", "c")
        scenario.advance()
    for most, expected in ((7, [2, 1]), (2, [1, 1, 1]), (100, [3])):
        monkeypatch.setattr(service, "_ASSIGNMENTS_SHOWN", most)
        pages = _pages(coordinator, f"/v1/runs/{scenario.id}/rounds", 50)
        assert [len(page) for page in pages] == expected
        assert [row["number"] for page in pages for row in page] == [1, 2, 3]
