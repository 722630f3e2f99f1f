"""With a run of 500 rounds and 200 clients, every page stays small and reads only what it shows."""

import base64
import re
from html import unescape
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import event

from fedssl_coordinator.core.db import engine
from fedssl_coordinator.dashboard.runs.overview import PAGE
from support.large_run import add_large_run
from support.pages import Browser
from support.tables import Tables

pytestmark = pytest.mark.full


ROUNDS, CLIENTS = 500, 200


@pytest.fixture(scope="module")
def large_run(tables: Tables) -> UUID:
    return add_large_run(tables, num_rounds=ROUNDS, num_clients=CLIENTS, metrics=("loss",))


def test_every_page_has_a_limited_size(viewer: Browser, large_run: UUID) -> None:
    most = {
        "": 60_000,
        "/rounds": 120_000,
        "/rounds/250": 120_000,
        "/clients": 120_000,
        "/events": 120_000,
        "/live": 30_000,
    }
    for path, num_bytes in most.items():
        answer = viewer.get(f"/runs/{large_run}{path}")
        assert answer.status_code == 200, path
        assert len(answer.content) < num_bytes, path
        assert answer.text.count("<") < 8_000, path
    # A full page of runs: other tests may have created any number of them.
    runs = viewer.get("/runs")
    assert 1 <= runs.text.count('<tr data-href="/runs/') <= PAGE
    assert len(runs.content) < 120_000
    assert len(viewer.get("/clients").content) < 150_000


def test_charts_get_all_rounds_in_a_limited_size(viewer: Browser, large_run: UUID) -> None:
    loss = viewer.get(f"/runs/{large_run}/metric.json?name=loss&pin=site-007").json()
    assert len(loss["rounds"]) == ROUNDS
    assert list(loss["lines"]) == ["site-007"]
    band = loss["band"]
    known = [at for at, value in enumerate(band["median"]) if value is not None]
    assert len(known) >= ROUNDS - 1
    assert all(band["low"][at] <= band["median"][at] <= band["high"][at] for at in known)
    heat = viewer.get(f"/runs/{large_run}/heat.json?name=loss").json()
    assert len(base64.b64decode(heat["cells"])) == ROUNDS * CLIENTS
    outcomes = viewer.get(f"/runs/{large_run}/outcomes.json")
    assert {len(letters) for letters in outcomes.json()["clients"].values()} == {ROUNDS}
    assert len(outcomes.content) < 150_000
    assert len(viewer.get(f"/runs/{large_run}/curves.json").json()["rounds"]) == ROUNDS // 5


def test_medians_and_outcomes_are_those_in_the_database(viewer: Browser, large_run: UUID, tables: Tables) -> None:
    values = tables.one(
        "SELECT percentile_cont(0.5) WITHIN GROUP (ORDER BY value) FROM metrics "
        "WHERE run_id = %s AND name = 'loss' AND round_number = 250",
        large_run,
    )
    loss = viewer.get(f"/runs/{large_run}/metric.json?name=loss").json()
    assert loss["band"]["median"][loss["rounds"].index(250)] == pytest.approx(values)
    counts = {
        letter: sum(
            row.count(letter) for row in viewer.get(f"/runs/{large_run}/outcomes.json").json()["clients"].values()
        )
        for letter in "aer"
    }
    states = dict(tables.query("SELECT state, count(*) FROM assignments WHERE run_id = %s GROUP BY state", large_run))
    assert counts == {"a": states["accepted"], "e": states["expired"], "r": states["rejected"]}


def test_the_pages_of_a_round_list_every_attempt(viewer: Browser, large_run: UUID, tables: Tables) -> None:
    """The three attempts of one client are on both sides of a page break."""
    more = (
        "INSERT INTO assignments (id, run_id, round_id, round_number, client_id, attempt, state) "
        "SELECT gen_random_uuid(), run_id, round_id, round_number, client_id, n, 'declined' "
        "FROM assignments, generate_series(2, 3) n WHERE run_id = %s AND round_number = 5 AND client_id = 'site-099'"
    )
    tables.execute(more, large_run)
    shown: list[str] = []
    path: str | None = f"/runs/{large_run}/rounds/5"
    while path is not None:
        text = viewer.get(path).text
        shown += re.findall(r'<td><a href="/clients/([^"]+)"', text)
        link = re.search(r'<a class="btn" href="([^"]+)">More clients', text)
        path = None if link is None else f"/runs/{large_run}/rounds/5{unescape(link[1])}"
    tables.execute("DELETE FROM assignments WHERE run_id = %s AND round_number = 5 AND attempt > 1", large_run)
    assert len(shown) == CLIENTS + 2
    assert shown.count("site-099") == 3


def test_a_runs_page_does_not_read_policies_of_its_clients(viewer: Browser, large_run: UUID) -> None:
    """The policies and methods of ten thousand clients are megabytes of JSON."""
    asked: list[str] = []

    def note(connection: object, cursor: object, statement: str, *_: object) -> None:
        asked.append(statement)

    event.listen(engine(), "before_cursor_execute", note)
    try:
        assert viewer.get(f"/runs/{large_run}").status_code == 200
    finally:
        event.remove(engine(), "before_cursor_execute", note)
    assert any("clients.last_seen_at" in statement for statement in asked)
    assert not [statement for statement in asked if "clients.policy" in statement]


def test_a_runs_page_does_not_read_its_history_again(viewer: Browser, large_run: UUID, tables: Tables) -> None:
    from fedssl_coordinator.core.db import transaction
    from fedssl_coordinator.dashboard.run import queries
    from fedssl_coordinator.dashboard.run.traffic import traffic
    from fedssl_coordinator.federation import run_rows

    names = tables.query("SELECT DISTINCT client_id FROM assignments WHERE run_id = %s ORDER BY 1", large_run)
    up = tables.query("SELECT coalesce(sum(num_bytes), 0)::bigint, count(*) FROM uploads JOIN artifacts USING (digest) "
                      "JOIN assignments ON assignments.id = assignment_id WHERE run_id = %s", large_run)  # fmt: skip
    down = tables.one("SELECT sum(num_bytes)::bigint FROM assignments JOIN rounds ON rounds.id = round_id "
                      "JOIN artifacts ON digest = broadcast "
                      "WHERE assignments.run_id = %s AND leased_at IS NOT NULL", large_run)  # fmt: skip
    assert down > 0
    firsts: list[int] = []

    def note(connection: object, cursor: object, statement: str, parameters: Any, *_: object) -> None:
        if "BETWEEN" in statement and "num_bytes" in statement:
            firsts.append(min(value for value in parameters.values() if isinstance(value, int) and value > 0))

    event.listen(engine(), "before_cursor_execute", note)
    try:
        with transaction() as session:
            assert queries.client_ids(session, large_run) == [name for (name,) in names]
            assert queries.client_ids(session, uuid4()) == []
            run = run_rows.get_one(session, large_run)
            for _ in range(2):
                firsts.clear()
                assert traffic(session, run) == (*up[0], down)
    finally:
        event.remove(engine(), "before_cursor_execute", note)
    assert len(firsts) == 2
    assert min(firsts) >= run.rounds_closed >= ROUNDS - 1


def test_clients_with_exceptions_come_first_if_not_all_are_shown(viewer: Browser, large_run: UUID) -> None:
    text = viewer.get(f"/runs/{large_run}").text
    assert text.count('<li data-client="') == 2 * 24
    assert "176 more clients" in text
    assert text.index("expired in round 500") < text.index("epoch 1 of 2")
