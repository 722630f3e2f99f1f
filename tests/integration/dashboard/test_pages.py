"""Every page: which roles may open it, what its headers forbid, and that hostile names stay text."""

import re
from collections.abc import Sequence
from pathlib import Path
from uuid import UUID

import pytest
from sqlalchemy.orm import Session

import fedssl_coordinator.dashboard
from fedssl_coordinator.core.models import Run
from fedssl_coordinator.dashboard.runs import overview
from support.coordinator import Coordinator
from support.evaluated_runs import POINTS, add_embedding_map
from support.large_run import add_large_run
from support.pages import Browser, page_routes
from support.scenario import Scenario
from support.tables import Tables

FOLDER = Path(fedssl_coordinator.dashboard.__file__).parent
POSTS = {
    "/sign-in",
    "/project",
    "/sign-out",
    "/runs/new",
    "/runs/new/check",
    "/runs/new/settings",
    "/runs/{run_id}/edit",
    "/runs/{run_id}/evaluate",
    "/runs/{run_id}/{verb}",
    "/clients/{client_id}/rename",
    "/clients/{client_id}/revoke",
    "/notifications",
    "/notifications/{destination_id}/test",
}
EVALUATION = UUID(int=9)
EVIL = "<img src=x onerror=alert(1)>\"'&{{7*7}}"


@pytest.fixture(scope="module", autouse=True)
def embedding_map(tables: Tables, scenario: Scenario) -> None:
    """Add an evaluation of the run's first round with a map of its embeddings."""
    add_embedding_map(tables, scenario.id, EVALUATION)


def _paths(scenario: Scenario) -> list[str]:
    """Return the path of every readable page, for objects that exist, except streams, `/` and sign-in."""
    values = {
        "run_id": scenario.id,
        "client_id": "a",
        "number": 1,
        "verb": "stop",
        "digest": scenario.run.initial_model,
    }
    query = {"/runs/{run_id}/metric.json": "?name=loss", "/runs/{run_id}/heat.json": "?name=loss"}
    query["/runs/{run_id}/embedding.json"] = f"?evaluation={EVALUATION}"
    query["/compare"] = f"?runs={scenario.id}"
    streams = {"/runs/{run_id}/stream", "/", "/sign-in", "/sign-in/oidc", "/sign-in/oidc/callback"}
    return [
        path.format(**values) + query.get(path, "")
        for method, path in page_routes()
        if method == "GET" and path not in streams
    ]


def test_these_tests_list_every_post_route() -> None:
    assert {path for method, path in page_routes() if method != "GET"} == POSTS


def test_a_viewer_may_open_every_page_except_the_forms(viewer: Browser, scenario: Scenario) -> None:
    forms = ("/runs/new", "/notifications", "/edit", "/evaluate", "/confirm")
    for path in _paths(scenario):
        answer = viewer.get(path)
        allowed = 204 if path == "/session" else 200
        assert answer.status_code == (403 if path.endswith(forms) else allowed), path
        assert "script-src 'self'" in answer.headers["content-security-policy"], path
        assert "unsafe" not in answer.headers["content-security-policy"], path


def test_no_page_answers_without_a_session(shared_coordinator: Coordinator, scenario: Scenario) -> None:
    with Browser(shared_coordinator, None) as nobody:
        for path in [*_paths(scenario), f"/runs/{scenario.id}/stream"]:
            assert nobody.get(path).status_code == 303, path


def test_pages_of_missing_objects_are_not_found(admin: Browser, scenario: Scenario) -> None:
    gone = UUID(int=7)
    paths = [
        path.replace(str(scenario.id), str(gone)).replace("/clients/a", "/clients/nobody") for path in _paths(scenario)
    ]
    for path in {path for path in paths if str(gone) in path or "nobody" in path}:
        assert admin.get(path).status_code == 404, path
    for path in (
        "/runs/x",
        "/runs/x/rounds",
        f"/runs/{scenario.id}/rounds/0",
        f"/runs/{scenario.id}/rounds/9",
        "/compare?runs=x",
    ):
        assert admin.get(path).status_code == 404, path


def test_embedding_maps_are_listed_and_read_one_by_one(viewer: Browser, scenario: Scenario) -> None:
    listed = viewer.get(f"/runs/{scenario.id}/embeddings.json").json()
    assert listed == {"rounds": [{"round": 1, "id": str(EVALUATION)}], "dataset": "held-out", "method": "pca"}
    found = viewer.get(f"/runs/{scenario.id}/embedding.json?evaluation={EVALUATION}").json()
    assert (found["points"], found["labels"], found["class_names"]) == (POINTS, [0, 1, 1], ["cat", "dog"])
    for nothing in ("", "?evaluation=x", f"?evaluation={UUID(int=10)}"):
        assert viewer.get(f"/runs/{scenario.id}/embedding.json{nothing}").status_code == 404


@pytest.mark.parametrize(
    "path",
    ["/runs?cursor=x", "/runs?q=%00", "/runs?q=%25%5F\\", "/runs?group=x", "/clients?after=%00",
     "/clients/a?cursor=e30=", "/events?before=99999999999999999999", "/clients/%00", "/sign-in?next=%00",
     "/compare?runs=" + "x," * 200],
)  # fmt: skip
def test_invalid_parameters_do_not_cause_a_server_error(viewer: Browser, path: str) -> None:
    assert viewer.get(path).status_code < 500


def test_a_refusal_before_a_route_is_reached_is_shown_as_a_page(
    shared_coordinator: Coordinator, operator: Browser
) -> None:
    html = {"Accept": "text/html", "Content-Type": "application/x-www-form-urlencoded"}
    large = operator.http.post("/runs/new", content=b"x" * (2 << 20), headers=html)
    assert (large.status_code, large.headers["content-type"]) == (413, "text/html; charset=utf-8")
    assert "bytes are accepted: send less" in large.text
    unknown = operator.http.post("/runs/nowhere/at/all", headers=html)
    assert (unknown.status_code, unknown.headers["content-type"]) == (404, "text/html; charset=utf-8")
    by_address = operator.get("/sign-out", accept="text/html")
    assert (by_address.status_code, by_address.headers["allow"]) == (405, "POST, OPTIONS")
    assert "<h1>Method not allowed</h1>" in by_address.text


def test_events_are_shown_as_sentences(shared_coordinator: Coordinator, viewer: Browser, scenario: Scenario) -> None:
    text = page = viewer.get("/events").text
    while older := re.search(r'href="(\?before=\d+)"', page):  # other tests have left events too
        page = viewer.get(f"/events{older[1]}").text
        text += page
    words = ["a registered: ", "b registered: ", "created: small", "created: a token, viewer"]
    assert [word for word in words if word not in text] == []


def test_states_and_causes_of_a_round_are_shown_in_words(viewer: Browser, scenario: Scenario, tables: Tables) -> None:
    path = f"/runs/{scenario.id}/rounds/2"
    text = viewer.get(path).text
    assert ("Working" in text, "Leased" in text) == (True, False)
    change = "UPDATE assignments SET cause = %s, reason = 'no memory' WHERE run_id = %s AND client_id = 'a'"
    tables.execute(change, "client-machine", scenario.id)
    assert "the client&#39;s machine: no memory" in viewer.get(path).text
    tables.execute(change, None, scenario.id)


def test_hostile_names_are_shown_as_text(shared_coordinator: Coordinator, tables: Tables, scenario: Scenario) -> None:
    tables.execute("UPDATE runs SET name = %s, reason = %s WHERE id = %s", EVIL, EVIL, scenario.id)
    tables.execute("UPDATE clients SET device = %s WHERE id = 'a'", EVIL)
    tables.execute("UPDATE rounds SET reason = %s WHERE run_id = %s", EVIL, scenario.id)
    tables.execute("UPDATE assignments SET reason = %s WHERE run_id = %s", EVIL, scenario.id)
    tables.execute("UPDATE events SET message = %s WHERE run_id = %s", EVIL, scenario.id)
    with Browser(
        shared_coordinator, shared_coordinator.client.create_token("admin", label=EVIL[:100]).secret
    ) as browser:
        for path in _paths(scenario):
            if not any(part in path for part in (".json", ".csv", "encoder", "/files/")):
                text = browser.get(path).text
                assert "<img" not in text, path
                assert "{{7*7}}" in text or "alert" not in text, path
    tables.execute("UPDATE runs SET name = 'small', reason = NULL WHERE id = %s", scenario.id)


def test_no_template_has_an_inline_script_or_style() -> None:
    templates = sorted((FOLDER / "templates").glob("*.html"))
    assert templates
    for path in templates:
        text = path.read_text()
        assert not re.search(
            r"\sstyle=|\son[a-z]+=|hx-on|hx-vals='?js:|javascript:|<style|\|\s*safe(?!\s*\}\}</svg>)", text
        ), path
        assert all("src=" in tag for tag in re.findall(r"<script[^>]*>", text)), path


def test_vendored_files_have_the_recorded_digests() -> None:
    import hashlib

    folder = FOLDER / "static" / "vendor"
    noted = dict(
        reversed(line.split()) for line in (folder / "VENDORED.txt").read_text().split("sha256\n")[1].splitlines()
    )
    files = [path for path in folder.iterdir() if path.suffix in (".js", ".css", ".woff2")]
    assert {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files} == noted


def test_static_files_are_cached_and_no_other_files_are_served(viewer: Browser) -> None:
    found = set(re.findall(r'"(/static/[^"]+)"', viewer.get("/runs").text))
    assert found
    for path in found:
        answer = viewer.get(path)
        assert answer.status_code == 200, path
        assert "immutable" in answer.headers["cache-control"]
    root = next(iter(found)).split("/")[2]
    for path in (
        f"/static/{root}/../shell.py",
        f"/static/{root}/%2e%2e/shell.py",
        "/static/layout.js",
        f"/static/{root}/",
    ):
        assert viewer.get(path).status_code == 404, path


def test_the_link_to_the_next_round_exists_only_if_the_round_does(viewer: Browser, scenario: Scenario) -> None:
    assert f'rel="next" href="/runs/{scenario.id}/rounds/2"' in viewer.get(f"/runs/{scenario.id}/rounds/1").text
    assert 'rel="next"' not in viewer.get(f"/runs/{scenario.id}/rounds/2").text


def test_the_list_of_runs_computes_each_row_once(
    viewer: Browser, scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, computed = overview.rows, list[UUID]()

    def counted(session: Session, runs: Sequence[Run]) -> list[overview.Row]:
        computed.extend(run.id for run in runs)
        return rows(session, runs)

    monkeypatch.setattr(overview, "rows", counted)
    assert viewer.get("/runs").status_code == 200
    assert computed.count(scenario.id) == 1
    assert len(computed) == len(set(computed))


def test_a_clients_page_counts_all_of_its_runs(viewer: Browser, tables: Tables) -> None:
    for _ in range(21):
        add_large_run(tables, num_rounds=1, num_clients=4, metrics=())
    count = tables.one("SELECT count(DISTINCT run_id) FROM assignments WHERE client_id = 'site-004'")
    text = viewer.get("/clients/site-004").text
    assert f"in {count} existing runs; deleted runs are not counted" in text
    assert f"the newest 20 of {count} runs" in text


def test_the_page_of_a_run_shows_which_client_it_waits_for(viewer: Browser, scenario: Scenario) -> None:
    text = viewer.get(f"/runs/{scenario.id}").text
    assert "0 of 2 updates received" in text
    assert "has claimed round 2" in text
    assert "aggregated" in text


def test_a_run_is_stalled_if_its_clients_have_not_been_seen(
    viewer: Browser, scenario: Scenario, tables: Tables
) -> None:
    scenario.expire_lease("a")
    scenario.expire_lease("b")
    tables.execute("UPDATE clients SET last_seen_at = now() - interval '10 minutes'")
    text = viewer.get("/runs?q=small").text
    assert "Stalled" in text
    assert "a and b have not been seen recently" in text
    expected = "waiting for clients: a, b: not seen for more than 90 s"
    assert scenario.run.reason == expected
    assert [row.reason for row in scenario.coordinator.client.runs() if row.id == scenario.id] == [expected]
    tables.execute("UPDATE clients SET last_seen_at = now() WHERE id = 'b'")
    assert scenario.run.reason is None, "one of them may still deliver"
    tables.execute("UPDATE clients SET last_seen_at = now()")


def test_the_page_of_a_completed_run_shows_its_reason(viewer: Browser, scenario: Scenario, tables: Tables) -> None:
    [before] = tables.query("SELECT state, outcome, reason, finished_at FROM runs WHERE id = %s", scenario.id)
    reason = "all 3 rounds are closed, 3 of them without new weights (3 skipped)"
    change = "UPDATE runs SET state = %s, outcome = %s, reason = %s, finished_at = {} WHERE id = %s"
    tables.execute(change.format("started_at + interval '10 seconds'"), "finished", "completed", reason, scenario.id)
    assert f"A{reason[1:]}; took 10 s." in viewer.get(f"/runs/{scenario.id}").text
    tables.execute(change.format("%s"), *before, scenario.id)


def test_downloads_contain_the_metrics_the_weights_and_the_spec(viewer: Browser, scenario: Scenario) -> None:
    metrics = viewer.get(f"/runs/{scenario.id}/metrics.csv")
    assert metrics.text.splitlines()[0] == "round,client,name,value"
    assert any(line.startswith("1,a,loss,") for line in metrics.text.splitlines())
    model = scenario.run.model
    assert model is not None
    assert (
        viewer.get(f"/runs/{scenario.id}/encoder").content
        == (scenario.coordinator.store / model[:2] / model[2:4] / model).read_bytes()
    )
    assert viewer.get(f"/runs/{scenario.id}/spec.json").json()["num_rounds"] == 3


def test_the_stream_of_a_run_sends_new_events(viewer: Browser, scenario: Scenario) -> None:
    log = list(scenario.coordinator.client.event_log(scenario.id))
    path = f"/runs/{scenario.id}/stream?after={log[-2].id}"
    with viewer.http.stream("GET", path) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = answer.iter_lines()
        assert next(line for line in lines if line.startswith("id:")) == f"id: {log[-1].id}"


def test_a_page_that_is_not_found_keeps_the_navigation(shared_coordinator: Coordinator, viewer: Browser) -> None:
    for path in (f"/runs/{UUID(int=7)}", "/runs/x", "/clients/unknown", "/nowhere"):
        answer = viewer.get(path, Accept="text/html")
        assert answer.status_code == 404, path
        assert '<nav aria-label="Main">' in answer.text, path
        assert "script-src 'self'" in answer.headers["content-security-policy"], path
    with Browser(shared_coordinator, None) as stranger:
        answer = stranger.get("/nowhere", Accept="text/html")
        assert answer.status_code == 404
        assert "<nav" not in answer.text
    assert viewer.get("/nowhere", Accept="application/json").headers["content-type"] == "application/problem+json"
    assert viewer.get("/v1/nowhere", Accept="text/html").headers["content-type"] == "application/problem+json"
