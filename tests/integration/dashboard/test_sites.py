"""The panel of evaluations at the sites: numbers per site and round, and a text in place of each missing number."""

import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from uuid import uuid4

import pytest

from fedssl.protocol.site_work import SiteAnswer
from support.coordinator import Coordinator
from support.pages import Browser, shape_of
from support.scenario import Scenario
from support.site_counts import CROSS_SITE, SITES, counts, cross_counts, site_head
from support.tables import Tables

EVALUATION = {"at": "sites", "every": 1, "measures": ["knn"], "sites": {**SITES, "classes": ["a", "b", "rare"]}}


@pytest.fixture
def judged(shared_coordinator: Coordinator, tables: Tables, tmp_path: Path) -> Iterator[Scenario]:
    """Yield a run of three sites that are asked to evaluate its first weights."""
    scenario = Scenario(
        shared_coordinator, tables, tmp_path, "pqr", name=f"judged-{uuid4().hex[:6]}", evaluation=EVALUATION
    )
    yield scenario
    shared_coordinator.client.stop(scenario.id)
    tables.execute(
        "DELETE FROM site_evaluations WHERE run_id = %s", scenario.id
    )  # otherwise a later test would claim them


def _answer(scenario: Scenario, name: str, right: int = 3, wrong: int = 1, refusal: str | None = None) -> None:
    item = scenario.workers[name].claim_site_evaluation()
    assert item is not None
    assert item.run_id == scenario.id
    own = None if refusal else counts(right, wrong)
    answer = SiteAnswer(evaluation_id=item.evaluation_id, round_number=item.round_number, counts=own, refusal=refusal)
    scenario.workers[name].answer_site_evaluation(answer)


def _panel(text: str) -> str:
    found = re.search(r"<h2>At the sites</h2>.*?</section>", text, re.DOTALL)
    assert found
    return unescape(found[0])


def _rows(text: str) -> dict[str, list[str]]:
    """Return the texts of each row's cells, by the heading of the row."""
    rows = re.findall(r"<tr[^>]*>(.*?)</tr>", _panel(text), re.DOTALL)
    cells = [[_words(cell) for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL)] for row in rows]
    return {row[0]: row[1:] for row in cells}


def _words(html: str) -> str:
    return " ".join(re.sub(r"<[^>]+>", " ", html).split())


def test_sites_are_rows_and_rounds_are_columns_newest_first(viewer: Browser, judged: Scenario) -> None:
    for name, (right, wrong) in {"p": (3, 1), "q": (1, 3), "r": (4, 0)}.items():
        _answer(judged, name, right, wrong)
    judged.work("p", "q", "r")
    judged.advance()
    for name, (right, wrong) in {"p": (4, 0), "q": (3, 1)}.items():
        _answer(judged, name, right, wrong)
    text = viewer.get(f"/runs/{judged.id}").text
    assert "kNN, accuracy, on each site's own test images" in _panel(text)
    rows = _rows(text)
    left_out = "without rare: too few images at this site"
    assert rows["Site"] == ["Round 1", "Before training", "Remarks"]
    assert rows["Worst site"] == ["q 75.0%", "q 25.0%", ""]
    assert rows["Mean"] == ["87.5%", "66.7%", ""]
    assert rows["Pooled"] == ["87.5%", "66.7%", ""]
    assert rows["p"] == ["100.0%", "75.0%", left_out]
    assert rows["q"] == ["75.0%", "25.0%", left_out]
    assert rows["r"] == ["no answer yet", "100.0%", "has not answered yet"]


def test_sites_without_a_number_show_a_text_and_the_reason(viewer: Browser, judged: Scenario, tables: Tables) -> None:
    _answer(judged, "p", refusal="the <b>policy</b> forbids it")
    tables.execute("UPDATE clients SET last_seen_at = now() - interval '10 minutes' WHERE id = 'q'")
    tables.execute(
        "UPDATE site_evaluations SET state = 'expired', reason = 'the weights were removed', ended_at = now() "
        "WHERE run_id = %s AND client_id = 'r'",
        judged.id,
    )
    text = viewer.get(f"/runs/{judged.id}").text
    assert "<b>policy</b>" not in text
    rows = _rows(text)
    assert "Mean" not in rows
    assert rows["p"][0] == "declined"
    assert rows["p"][1].startswith("declined: the")
    assert rows["q"] == ["no answer yet", "offline: it answers when it is back, and nothing waits for it"]
    assert rows["r"] == ["expired", "expired: the weights were removed"]
    tables.execute("UPDATE clients SET last_seen_at = now() WHERE id = 'q'")


def test_a_diverged_site_is_the_worst_site(viewer: Browser, judged: Scenario) -> None:
    _answer(judged, "p")
    item = judged.workers["q"].claim_site_evaluation()
    assert item is not None
    own = counts(measures={})
    answer = SiteAnswer(evaluation_id=item.evaluation_id, round_number=0, counts=own)
    judged.workers["q"].answer_site_evaluation(answer)
    rows = _rows(viewer.get(f"/runs/{judged.id}").text)
    assert rows["q"][0] == "diverged"
    assert "its training has diverged" in rows["q"][1]
    assert (rows["Worst site"][0], rows["Mean"][0]) == ("q diverged", "diverged")


def test_a_site_that_joined_late_is_shown_as_not_asked_before(
    viewer: Browser, judged: Scenario, tables: Tables
) -> None:
    tables.execute("DELETE FROM site_evaluations WHERE run_id = %s AND client_id = 'r'", judged.id)
    judged.work("p", "q", "r")
    judged.advance()
    rows = _rows(viewer.get(f"/runs/{judged.id}").text)
    assert rows["r"][:2] == ["no answer yet", "not asked"]


def test_a_remark_names_its_round_if_it_is_not_about_the_newest(
    viewer: Browser, judged: Scenario, tables: Tables
) -> None:
    _answer(judged, "r", refusal="no labels")
    judged.work("p", "q", "r")
    judged.advance()
    tables.execute("DELETE FROM site_evaluations WHERE run_id = %s AND round_number = 1 AND client_id = 'r'", judged.id)
    rows = _rows(viewer.get(f"/runs/{judged.id}").text)
    assert rows["r"] == ["not asked", "declined", "Before training: declined: no labels"]


def test_an_open_page_gets_the_updated_panel_after_an_answer(viewer: Browser, judged: Scenario) -> None:
    live = f"/runs/{judged.id}/live?shape="
    shape = shape_of(viewer.get(f"/runs/{judged.id}").text)
    assert "At the sites" not in viewer.get(live + shape).text
    _answer(judged, "p")
    news = viewer.get(live + shape).text
    assert 'id="sites" hx-swap-oob="innerHTML"' in news
    assert _rows(news)["p"][0] == "75.0%"


def test_a_finished_run_stays_live_while_its_sites_evaluate(
    viewer: Browser, judged: Scenario, tables: Tables, shared_coordinator: Coordinator
) -> None:
    shared_coordinator.client.stop(judged.id)
    assert 'data-live="1"' in viewer.get(f"/runs/{judged.id}").text
    for name in "pqr":
        _answer(judged, name)
    assert 'data-live="1"' not in viewer.get(f"/runs/{judged.id}").text


def test_only_the_lowest_of_many_sites_are_shown(
    viewer: Browser, judged: Scenario, tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedssl_coordinator.dashboard.run.sites.SHOWN_SITES", 2)
    for name, right in {"p": 4, "q": 1}.items():
        _answer(judged, name, right, 4 - right)
    text = viewer.get(f"/runs/{judged.id}").text
    assert "2 of 3 sites, lowest first" in _panel(text)
    assert [name for name in _rows(text) if name in "pqr"] == ["q", "p"]


def test_the_panel_explains_when_sites_will_be_asked(viewer: Browser, judged: Scenario, tables: Tables) -> None:
    tables.execute("DELETE FROM site_evaluations WHERE run_id = %s", judged.id)
    text = _words(_panel(viewer.get(f"/runs/{judged.id}").text))
    assert "No site has been asked yet." in text
    assert "before training, after every 1 round and after the last one, and sends only counts." in text


def test_the_coordinators_own_panels_explain_that_only_sites_evaluate(viewer: Browser, judged: Scenario) -> None:
    text = viewer.get(f"/runs/{judged.id}").text
    assert "None, frozen encoder" not in text
    assert "evaluated at the sites" in text
    assert "Evaluated at the sites: their table is below" in text
    assert "The spec does not request an evaluation" not in text


def test_a_clients_page_counts_the_evaluations_that_it_answered(viewer: Browser, judged: Scenario) -> None:
    path = "/clients/p"
    assert "counted on its labelled images" not in viewer.get(path).text
    _answer(judged, "p")
    assert "what it counted on its labelled images, in 1 evaluation at the sites" in viewer.get(path).text


def test_a_run_without_evaluations_at_its_sites_has_no_such_panel(viewer: Browser, scenario: Scenario) -> None:
    assert scenario.run.spec.site_evaluation is None
    assert "At the sites" not in viewer.get(f"/runs/{scenario.id}").text


def test_an_evaluation_at_the_sites_is_requested_from_the_page(
    operator: Browser, viewer: Browser, judged: Scenario
) -> None:
    _answer(judged, "p", refusal="no labels")
    path = f"/runs/{judged.id}/evaluate"
    assert f'href="{path}#sites"' in operator.get(f"/runs/{judged.id}").text
    assert f'href="{path}#sites"' not in viewer.get(f"/runs/{judged.id}").text
    assert "Evaluate at the sites" in operator.get(path).text
    for number in ("1", "x"):
        wrong = operator.send(path, at="sites", round_number=number)
        assert wrong.status_code == 422
        words = {"1": "round 1 of run", "x": "write the number of a round"}[number]
        assert words in wrong.text.partition("Evaluate at the sites")[2]
        assert f'value="{number}"' in wrong.text
    assert viewer.send(path, at="sites").status_code == 403
    assert operator.send(path, at="sites", round_number="").headers["location"] == f"/runs/{judged.id}"
    assert _rows(viewer.get(f"/runs/{judged.id}").text)["p"][0] == "no answer yet"


def test_a_run_without_evaluations_at_its_sites_has_no_form_for_them(operator: Browser, scenario: Scenario) -> None:
    path = f"/runs/{scenario.id}/evaluate"
    assert "Evaluate at the sites" not in operator.get(path).text
    assert "has no evaluation at the sites" in operator.send(path, at="sites").text


def test_the_sites_classifiers_are_shown_as_a_table_of_sites_by_sites(
    viewer: Browser, shared_coordinator: Coordinator, tables: Tables, tmp_path: Path
) -> None:
    scenario = Scenario(
        shared_coordinator, tables, tmp_path, "pqr", name=f"crossed-{uuid4().hex[:6]}", evaluation=CROSS_SITE
    )
    for name, right in (("p", 3), ("q", 1), ("q", 2)):
        item = scenario.workers[name].claim_site_evaluation()
        assert item is not None
        answer = {"evaluation_id": item.evaluation_id, "round_number": 0, "head": None if item.head else site_head()}
        scenario.workers[name].answer_site_evaluation(SiteAnswer(counts=cross_counts(right, 4 - right), **answer))
    text = viewer.get(f"/runs/{scenario.id}").text
    assert "Before training: each site's own classifier on the images of every site" in _words(_panel(text))
    assert _rows(text)["p"] == ["75.0%", "50.0%"]
    assert _rows(text)["q"] == ["no answer yet", "25.0%"]
    shared_coordinator.client.stop(scenario.id)
    tables.execute("DELETE FROM site_evaluations WHERE run_id = %s", scenario.id)
