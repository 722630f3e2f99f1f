"""Updates of an open page: new panels, texts about the same clients, and the numbers of its charts."""

import base64
import re
from collections.abc import Iterator
from datetime import datetime, timedelta, tzinfo
from html import unescape
from pathlib import Path
from uuid import UUID, uuid4

import pytest

from fedssl.protocol.work import Progress, Resources
from fedssl_coordinator.core import database_clock
from fedssl_coordinator.dashboard.layout import formats
from fedssl_coordinator.dashboard.runs import run_status
from support.coordinator import Coordinator
from support.evaluated_runs import add_embedding_map
from support.large_run import add_large_run
from support.pages import Browser, shape_of
from support.scenario import Scenario
from support.tables import Tables

_JOB = (
    "INSERT INTO distillation_jobs (id, run_id, round_number, state, epoch, num_epochs, started_at, finished_at) "
    "SELECT gen_random_uuid(), %s, r, 'completed', 2, 2, now(), now() FROM generate_series(%s::int, %s::int) r"
)
_METRIC = "INSERT INTO metrics (run_id, round_number, client_id, name, value) VALUES (%s, 1, %s, %s, %s)"


def _members(text: str, piece: str) -> list[str]:
    """Return the clients of one list, in the order of the page."""
    [inside] = re.findall(rf'<ul class="{piece}".*?</ul>', text, re.DOTALL)
    return re.findall(r'<li data-client="([^"]+)"', inside)


@pytest.fixture
def fresh(shared_coordinator: Coordinator, tables: Tables, tmp_path: Path) -> Iterator[Scenario]:
    """Yield a run of two clients that waits for its first update.

    The run is stopped at the end, so that these clients do not claim its work in a later test.
    """
    scenario = Scenario(shared_coordinator, tables, tmp_path, "xy", name=f"fresh-{uuid4().hex[:6]}", num_rounds=3)
    yield scenario
    shared_coordinator.client.stop(scenario.id)


def test_an_update_brings_the_panels_that_a_page_does_not_have_yet(
    operator: Browser, fresh: Scenario, tables: Tables
) -> None:
    page = operator.get(f"/runs/{fresh.id}").text
    assert 'data-name="loss"' not in page
    live = f"/runs/{fresh.id}/live"
    assert 'data-accuracy="The spec does not request an evaluation"' in page
    assert 'id="ckey"' not in operator.get(f"{live}?shape={shape_of(page)}").text  # no panel that the page already has
    fresh.work("x", "y")
    fresh.advance()
    news = operator.get(f"{live}?shape={shape_of(page)}").text
    for panel in ('id="ckey"', 'id="terms"', 'id="inside"', 'data-name="loss"'):
        assert panel in news
    tables.execute(_JOB, fresh.id, 1, 1)
    later = operator.get(f"{live}?shape={shape_of(news)}").text
    assert "Epochs distilled" in later
    assert 'id="job"' in operator.get(f"{live}?shape={shape_of(later)}").text


def test_a_page_uses_the_clock_of_postgres(viewer: Browser, fresh: Scenario, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of the API's machine is two hours fast, which is past the round's deadline."""

    class Ahead(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> "Ahead":
            return super().now(tz) + timedelta(hours=2)

    fresh.claim("x")
    for module in (database_clock, run_status, formats):
        monkeypatch.setattr(module, "datetime", Ahead)
    monkeypatch.setattr(database_clock, "_ahead", timedelta())
    monkeypatch.setattr(database_clock, "_compared_at", float("-inf"))
    text = unescape(viewer.get(f"/runs/{fresh.id}").text)
    assert "has claimed round 1" in text
    assert "has not claimed round 1 yet" in text
    assert "is past its deadline" not in text
    assert "h ago" not in unescape(viewer.get("/clients/x").text)


def test_an_update_brings_the_current_questions_and_downloads(
    operator: Browser, viewer: Browser, fresh: Scenario
) -> None:
    assert "Weights of round 0," in operator.get(f"/runs/{fresh.id}/live").text
    fresh.work("x", "y")
    fresh.advance()
    news = operator.get(f"/runs/{fresh.id}/live").text
    assert "Weights of round 1," in news
    assert "Round 2 is discarded. The encoder of round 1 stays" in news
    links = [f'href="/runs/{fresh.id}/evaluate{rest}"' for rest in ("", "?draw=pca")]
    assert all(link in news for link in links), "they need weights, which a run does not have when it is made"
    others = viewer.get(f"/runs/{fresh.id}/live").text
    assert not any(part in others for part in ("ask-stop", *links))


def test_an_update_adds_the_row_reason_and_colour_of_a_client_that_joins_late(
    viewer: Browser, fresh: Scenario, tables: Tables, shared_coordinator: Coordinator
) -> None:
    page = viewer.get(f"/runs/{fresh.id}").text
    shared_coordinator.worker("late")
    joins = (
        "INSERT INTO assignments (id, run_id, round_id, round_number, client_id, attempt, state) "
        "SELECT gen_random_uuid(), run_id, round_id, round_number, 'late', 1, 'offered' FROM assignments "
        "WHERE run_id = %s AND client_id = 'x'"
    )
    tables.execute(joins, fresh.id)
    news = viewer.get(f"/runs/{fresh.id}/live?shape={shape_of(page)}").text
    assert _members(news, "names") == _members(news, "why") == ["late", "x", "y"]
    assert re.findall(r'<b class="vh">([^<]+)</b>', news) == ["LAT", "X", "Y"], "screen readers read one list at a time"
    assert re.findall(r'data-client="([^"]+)" data-slot="(\d)"', news) == [("late", "0"), ("x", "1"), ("y", "2")]


def test_speed_memory_and_newest_events_of_each_client_are_shown(
    viewer: Browser, fresh: Scenario, shared_coordinator: Coordinator, tables: Tables
) -> None:
    def row(client: str) -> str:
        text = viewer.get(f"/runs/{fresh.id}/clients").text
        return text.partition(f'href="/clients/{client}"')[2].partition("</tr>")[0]

    item = fresh.claim("x")
    training = Progress(phase="training", epoch=1, num_epochs=2, step=3, num_steps=12, images_per_second=310)
    held = Resources(memory_bytes=1_500_000_000, gpu_memory_bytes=3_040_000_000, gpu_utilisation=0.874)
    fresh.workers["x"].heartbeat(item.assignment_id, training, resources=held)
    live = "training, epoch 1 of 2, 25%, 310 images/s, 1.50 GB memory, 3.04 GB GPU memory, GPU 87% busy"
    assert live in viewer.get(f"/runs/{fresh.id}").text
    assert live in viewer.get(f"/runs/{fresh.id}/live").text
    text = row("x")
    assert all(f">{shown}<" in text for shown in ("1.50 GB", "3.04 GB", "87%"))
    assert " GB" not in row("y")
    fresh.deliver("x")
    fresh.work("y")
    fresh.advance()
    took = "UPDATE assignments SET leased_at = closed_at - interval '4 s', num_examples = 1000 WHERE client_id = 'x'"
    tables.execute(f"{took} AND run_id = %s", fresh.id)
    assert '<td class="num opt">250</td>' in row("x"), "images per second of accepted updates"
    second = fresh.claim("x")
    fresh.workers["x"].heartbeat(second.assignment_id, training, resources=Resources(memory_bytes=2_000_000_000))
    text = row("x")
    assert "2.00 GB" in text, "the newest report counts"
    assert "3.04 GB" not in text
    assert "87%" not in text
    events = [event.message for event in shared_coordinator.client.event_log(fresh.id) if event.client_id == "x"]
    assert len(events) > 3
    shown = re.findall(r'<div>.*?<span title="([^"]+)"', text, re.DOTALL)
    assert [unescape(message) for message in shown] == events[:-4:-1]


def test_rows_and_reasons_have_the_same_clients_in_the_same_order(viewer: Browser, tables: Tables) -> None:
    large = add_large_run(tables, num_rounds=3, num_clients=60, metrics=("loss",))
    before = _members(viewer.get(f"/runs/{large}").text, "names")
    part = "WHERE run_id = %s AND round_number = 3 AND client_id = 'site-060'"
    tables.execute(f"UPDATE assignments SET state = 'rejected', reason = 'is new here' {part}", large)
    news = viewer.get(f"/runs/{large}/live").text
    assert "site-060" not in before
    assert "site-060" in _members(news, "names")
    assert _members(news, "names") == _members(news, "why")


def test_a_finished_run_is_live_until_its_last_evaluation_has_ended(
    viewer: Browser, fresh: Scenario, tables: Tables, shared_coordinator: Coordinator
) -> None:
    def is_live() -> bool:
        text = viewer.get(f"/runs/{fresh.id}").text
        assert shape_of(text) == shape_of(viewer.get(f"/runs/{fresh.id}/live").text)
        return 'data-live="1"' in text

    shared_coordinator.client.stop(fresh.id)
    assert not is_live()
    evaluation = uuid4()
    add_embedding_map(tables, fresh.id, evaluation)
    running = "state = 'running', results = NULL, embedding_map = NULL, finished_at = NULL"
    tables.execute(f"UPDATE evaluations SET {running} WHERE id = %s", evaluation)
    assert is_live()
    tables.execute("UPDATE evaluations SET state = 'cancelled', finished_at = now() WHERE id = %s", evaluation)
    assert not is_live()


def test_the_timeline_has_the_current_time_and_the_jobs_of_its_rounds(viewer: Browser, tables: Tables) -> None:
    large = add_large_run(tables, num_rounds=40, num_clients=4, metrics=())
    tables.execute(_JOB, large, 0, 39)
    found = viewer.get(f"/runs/{large}/timeline.json?last=8").json()
    assert [job["round"] for job in found["jobs"]] == [row["number"] for row in found["rounds"]] == [5, 6, 7, 8]
    now = tables.one("SELECT extract(epoch FROM now())::float")
    assert now - 60 < found["now"] <= now


@pytest.mark.parametrize(
    ("values", "scale"),
    [
        ((-1.7e308, 1.7e308, 0.0), ("linear", [0, 254, 127])),
        ((5e-324, 1.0), ("log", [0, 254])),
        ((5e-324, 1.7e308), ("log", [0, 254])),
        ((0.0, 5e-324), ("linear", [0, 0])),
        ((1.0, 2.0, 1.5), ("linear", [0, 254, 127])),
    ],
)
def test_extreme_floats_are_drawn(
    viewer: Browser, tables: Tables, values: tuple[float, ...], scale: tuple[str, list[int]]
) -> None:
    large, name = add_large_run(tables, num_rounds=1, num_clients=4, metrics=()), "divergence"
    for number, value in enumerate(values, start=1):
        tables.execute(_METRIC, large, f"site-{number:03}", name, value)
    found = viewer.get(f"/runs/{large}/heat.json?name={name}").json()
    assert (found["scale"], list(base64.b64decode(found["cells"]))[: len(values)]) == scale
    assert (found["low"], found["high"]) == (min(values), max(values))


def test_an_update_of_a_missing_run_is_not_found(viewer: Browser) -> None:
    assert viewer.get(f"/runs/{UUID(int=7)}/live?shape=x").status_code == 404


def test_a_job_that_no_process_takes_is_shown_as_waiting(operator: Browser, fresh: Scenario, tables: Tables) -> None:
    queued = (
        "INSERT INTO distillation_jobs (id, run_id, round_number, state, epoch, num_epochs, created_at) "
        "VALUES (gen_random_uuid(), %s, 1, 'queued', 0, 2, now() - %s * interval '1 second')"
    )
    waits = "waits for a process that serves the queue distill"
    tables.execute(queued, fresh.id, 5)
    assert waits not in operator.get(f"/runs/{fresh.id}").text
    tables.execute("UPDATE distillation_jobs SET created_at = now() - interval '2 minutes' WHERE run_id = %s", fresh.id)
    assert waits in operator.get(f"/runs/{fresh.id}").text
