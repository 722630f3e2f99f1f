"""Editing a run's name, tags and notes, renaming a client, and requesting an evaluation from the page."""

from html import unescape
from uuid import UUID

import pytest

from fedssl_coordinator.storage.datasets import repository as datasets
from support.coordinator import Coordinator
from support.data_sets import labelled_bytes, write_file
from support.pages import Browser, fields_with_a_mistake
from support.scenario import Scenario


@pytest.fixture
def run(operator: Browser) -> str:
    return operator.send("/runs/new", method="ssd", start="later").headers["location"]


def test_a_run_is_renamed_tagged_and_described(shared_coordinator: Coordinator, operator: Browser, run: str) -> None:
    words = {"name": "second try", "tags": "table-1, baseline table-1", "notes": "eight sites\n<b>not bold</b>"}
    assert operator.send(f"{run}/edit", **words).headers["location"] == run
    view = shared_coordinator.client.run(UUID(run.removeprefix("/runs/")))
    assert (view.name, view.tags, view.spec.name) == ("second try", ["baseline", "table-1"], "unnamed")
    text = operator.get(run).text
    assert "<h1>second try</h1>" in text
    assert 'href="/runs?q=table-1"' in text
    assert "&lt;b&gt;not bold&lt;/b&gt;" in text
    assert 'value="baseline, table-1"' in operator.get(f"{run}/edit").text
    assert "second try" in operator.get("/runs?q=table-1").text
    [event] = shared_coordinator.client.event_log(view.id, "run.edited")
    assert event.message == "unnamed: new name and tags and notes"


def test_an_invalid_edit_changes_nothing(shared_coordinator: Coordinator, operator: Browser, run: str) -> None:
    before = shared_coordinator.client.run(UUID(run.removeprefix("/runs/")))
    cases = (("name", "<b>"), ("name", ""), ("tags", "Upper"), ("tags", "a" * 40), ("notes", "x" * 10_001))
    for field, value in cases:
        answer = operator.send(f"{run}/edit", **{"name": "fine", "tags": "fine", "notes": "", field: value})
        assert answer.status_code == 422, (field, value)
        reason = unescape(answer.text.split('role="alert">')[1].split("</p>")[0])
        assert fields_with_a_mistake(answer.text) == [field]
        assert field in reason
        assert "pattern" not in reason
        assert shared_coordinator.client.run(before.id) == before, (field, value)
    assert "<h1>unnamed</h1>" in operator.get(run).text


def test_a_form_without_its_fields_is_refused(operator: Browser, run: str) -> None:
    assert operator.send(f"{run}/edit").status_code == 422


def test_a_viewer_can_neither_edit_nor_evaluate(viewer: Browser, scenario: Scenario) -> None:
    for path in ("edit", "evaluate"):
        assert viewer.send(f"/runs/{scenario.id}/{path}", name="x", dataset="x").status_code == 403
        assert f"/{path}" not in viewer.get(f"/runs/{scenario.id}").text


def test_an_evaluation_is_requested_from_the_page(
    shared_coordinator: Coordinator, operator: Browser, scenario: Scenario, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = f"/runs/{scenario.id}/evaluate"
    with pytest.MonkeyPatch.context() as patch:  # other tests may have registered some
        patch.setattr(datasets, "by_name", lambda *_: [])
        assert "No labelled data set is registered yet" in operator.get(path).text
    refused = operator.send(path, dataset="labelled", probe="on")
    assert refused.status_code == 422
    assert "no evaluation data set labelled is registered" in refused.text
    shared_coordinator.client.add_evaluation_dataset(
        "labelled", write_file(tmp_path_factory.mktemp("set"), labelled_bytes())
    )
    assert "<option>labelled</option>" in operator.get(path).text
    assert fields_with_a_mistake(operator.send(path, dataset="labelled").text) == ["probe", "knn", "geometry"]
    for number in ("abc", "-1", "99"):
        wrong = operator.send(path, dataset="labelled", knn="on", round_number=number)
        assert fields_with_a_mistake(wrong.text) == ["round_number"], number
        assert "Input should" not in wrong.text
    earlier = {
        evaluation.id for evaluation in shared_coordinator.client.evaluations(scenario.id)
    }  # those of other tests
    answer = operator.send(path, dataset="labelled", knn="on", embedding_map="pca", round_number="1")
    assert answer.headers["location"] == f"/runs/{scenario.id}/jobs"
    [found] = (
        evaluation for evaluation in shared_coordinator.client.evaluations(scenario.id) if evaluation.id not in earlier
    )
    assert (found.round_number, found.config.measures, found.config.embedding_map) == (1, ("knn",), "pca")
    shared_coordinator.client.cancel_evaluation(found.id)


def test_a_client_is_shown_by_the_name_that_operators_give_it(
    shared_coordinator: Coordinator, operator: Browser, viewer: Browser, scenario: Scenario
) -> None:
    path = "/clients/b/rename"
    assert operator.send(path, display_name="  St. Mary's <b>  ").status_code == 303
    assert shared_coordinator.client.client("b").display_name == "St. Mary's <b>"
    for page in ("/clients", "/clients/b", f"/runs/{scenario.id}/clients", "/clients?q=mary"):
        assert "St. Mary&#39;s &lt;b&gt;" in viewer.get(page).text, page
    for wrong in ("x" * 101, "two\nlines"):
        answer = operator.send(path, display_name=wrong)
        assert answer.status_code == 422
        assert fields_with_a_mistake(answer.text) == ["display_name"]
        assert [f'value="{wrong}"' in answer.text, "Nothing was changed: " in answer.text] == [True, True]
    assert viewer.send(path, display_name="x").status_code == 403
    assert operator.send("/clients/nobody/rename", display_name="x").status_code == 404
    assert operator.send(path, display_name="").status_code == 303
    assert "Mary" not in viewer.get("/clients").text
    row = viewer.get(f"/runs/{scenario.id}/clients").text.partition('href="/clients/b"')[2].partition("</tr>")[0]
    newest = [event for event in shared_coordinator.client.event_log(scenario.id) if event.client_id == "b"][-1]
    assert newest.message in unescape(row)
    kinds = [event.kind for event in scenario.tables.events_after(0) if event.client_id == "b"]
    assert kinds.count("client.edited") == 2
