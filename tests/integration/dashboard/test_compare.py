"""Scores on the web page: which of a run's evaluations are shown, and which run is better."""

import html
import json
import re
from dataclasses import asdict
from typing import Any
from uuid import UUID, uuid4

import pytest
from psycopg.types.json import Jsonb

from fedssl.experiments.spread import QUALITY, mean_and_deviation
from fedssl.experiments.summary import Line
from fedssl.protocol.chance import Chance
from fedssl.protocol.evaluation import EvaluationConfig
from support.coordinator import Coordinator
from support.federation import tiny_spec
from support.pages import Browser
from support.tables import Tables

_ROW = (
    "INSERT INTO evaluations (id, run_id, round_number, model, dataset, dataset_digest, config, state, results, "
    "chance, created_at, finished_at) VALUES (gen_random_uuid(), %s, %s, %s, %s, %s, %s, 'completed', %s, %s, "
    "clock_timestamp(), now())"
)


class Judged:
    """A run whose evaluations are inserted as rows."""

    def __init__(self, shared_coordinator: Coordinator, tables: Tables, dataset: str | None, **settings: Any) -> None:
        evaluation = {"dataset": dataset, "every": 1} if dataset else None
        self.tables, self.name = tables, f"judged-{uuid4().hex[:6]}"
        spec = tiny_spec(name=self.name)
        self.id: UUID = shared_coordinator.client.create_run(spec, start=False).id
        spec = tiny_spec(name=self.name, evaluation=evaluation, **settings)  # no such data set is registered here
        tables.execute("UPDATE runs SET spec = %s WHERE id = %s", Jsonb(spec.model_dump(mode="json")), self.id)

    def add(
        self, number: int, dataset: str, results: dict[str, float | None], chance: Chance | None = None, **config: Any
    ) -> None:
        judging = EvaluationConfig.model_validate({"dataset": dataset, **config}).model_dump(mode="json")
        del judging["every"]
        digest = _digest(dataset)
        self.tables.execute(
            "SET session_replication_role = replica"
        )  # the inserted rows refer to artifacts that are not stored
        self.tables.execute(_ROW, self.id, number, digest, dataset, digest, Jsonb(judging), Jsonb(results),
                            None if chance is None else Jsonb(asdict(chance)))  # fmt: skip
        self.tables.execute("SET session_replication_role = origin")


def _digest(dataset: str) -> str:
    return (dataset.encode().hex() + "0" * 64)[:64]


def _cells(text: str, name: str) -> list[str]:
    """Return the cells of one row of the table, as HTML."""
    [line] = re.findall(rf'<th scope="row">{name}</th>(.*?)</tr>', text, re.DOTALL)
    return re.findall(r"<td.*?</td>", line, re.DOTALL)


def _drawn(text: str) -> Any:
    """Return the numbers that the page's script draws."""
    [found] = re.findall(r"data-runs='(.*?)'", text)
    return json.loads(html.unescape(found))


@pytest.fixture
def own(shared_coordinator: Coordinator, tables: Tables) -> Judged:
    """Return a run that is evaluated on its spec's data set, with other settings, and on another data set."""
    judged = Judged(shared_coordinator, tables, "held-out")
    judged.add(1, "other", {"probe": 0.9, "knn": 0.9})
    judged.add(1, "held-out", {"probe": 0.3}, measures=["probe"])
    judged.add(1, "held-out", {"probe": 0.8}, max_train=50)
    judged.add(1, "held-out", {"knn": 0.25, "probe": 0.7}, measures=["knn"])
    judged.add(2, "held-out", {"probe": 0.4, "knn": 0.35})
    judged.add(3, "other", {"probe": 0.95})
    return judged


def test_a_runs_scores_are_those_on_the_data_set_of_its_spec(viewer: Browser, own: Judged) -> None:
    found = viewer.get(f"/runs/{own.id}/curves.json").json()
    assert found["rounds"] == [1, 2]
    assert found["results"] == {"probe": [0.3, 0.4], "knn": [0.25, 0.35]}
    for path in (f"/runs/{own.id}", f"/runs?q={own.name}"):
        text = viewer.get(path).text
        assert "40.0%" in text, path
        assert "95.0%" not in text, path


def test_evaluations_with_different_settings_have_different_names(viewer: Browser, own: Judged) -> None:
    text = viewer.get(f"/runs/{own.id}/jobs").text
    found = re.findall(r'<td class="opt"[^>]*>(held-out[^<]*|other[^<]*)</td>', text)
    assert sorted(set(found)) == ["held-out max_train 10000", "held-out max_train 50", "other"]


def test_a_diverged_run_does_not_show_an_earlier_accuracy(
    shared_coordinator: Coordinator, tables: Tables, viewer: Browser
) -> None:
    judged = Judged(shared_coordinator, tables, "held-out")
    judged.add(1, "held-out", {"probe": 0.3, "knn": 0.25, "effective_rank": 7.0})
    judged.add(2, "held-out", {"probe": None, "knn": None, "effective_rank": None})
    for path in (f"/runs/{judged.id}", f"/runs?q={judged.name}"):
        text = viewer.get(path).text
        assert "30.0%" not in text, path
        assert "25.0%" not in text, path
    assert "training diverged" in viewer.get(f"/runs/{judged.id}").text


def test_without_a_data_set_in_the_spec_scores_are_those_of_the_newest_evaluation(
    shared_coordinator: Coordinator, tables: Tables, viewer: Browser
) -> None:
    judged = Judged(shared_coordinator, tables, None)
    judged.add(1, "held-out", {"probe": 0.3})
    judged.add(1, "other", {"probe": 0.5})
    found = viewer.get(f"/runs/{judged.id}/curves.json").json()
    assert (found["rounds"], found["results"]["probe"]) == ([1], [0.5])
    assert "on other" in viewer.get(f"/runs/{judged.id}").text


def test_the_better_of_two_runs_is_marked(shared_coordinator: Coordinator, tables: Tables, viewer: Browser) -> None:
    """The measured uniformity is -Lu of the papers, so larger is better."""
    base, better = (Judged(shared_coordinator, tables, "held-out") for _ in range(2))
    base.add(1, "held-out", {"probe": 0.3, "alignment": 0.5, "uniformity": 1.0})
    better.add(1, "held-out", {"probe": 0.4, "alignment": 0.25, "uniformity": 3.0})
    text = viewer.get(f"/compare?runs={base.id},{better.id}").text
    for name in ("Linear probe", "Alignment", "Uniformity"):
        assert ['class="best"' in cell for cell in _cells(text, name)] == [False, True], name
    assert "+10.0" in _cells(text, "Linear probe")[1]


def test_results_on_different_data_sets_are_labelled_and_not_compared(
    shared_coordinator: Coordinator, tables: Tables, viewer: Browser, own: Judged
) -> None:
    elsewhere = Judged(shared_coordinator, tables, "other")
    elsewhere.add(1, "other", {"probe": 0.9})
    text = viewer.get(f"/compare?runs={own.id},{elsewhere.id}").text
    assert ["held-out" in cell for cell in _cells(text, "Evaluated on")] == [True, False]
    assert "other" in _cells(text, "Evaluated on")[1]
    assert not [cell for cell in _cells(text, "Linear probe") if "best" in cell or "+" in cell]


def test_the_curves_show_the_chosen_measure(
    shared_coordinator: Coordinator, tables: Tables, viewer: Browser, own: Judged
) -> None:
    row = "INSERT INTO metrics (run_id, round_number, client_id, name, value) VALUES (%s, %s, NULL, 'loss', %s)"
    for number, value in ((1, 3.0), (2, 2.0)):
        tables.execute(row, own.id, number, value)
    tables.execute("UPDATE runs SET rounds_closed = 2 WHERE id = %s", own.id)
    for name, values in (("probe", [0.3, 0.4]), ("knn", [0.25, 0.35]), ("loss", [3.0, 2.0])):
        [run] = _drawn(viewer.get(f"/compare?runs={own.id}&y={name}").text)
        assert (run["rounds"], run["values"]) == ([1, 2], values), name
    page = viewer.get(f"/compare?runs={own.id}&y=loss&scale=log-x&smooth=5").text
    assert f"runs={own.id}&amp;x=bytes&amp;y=loss&amp;scale=log-x&amp;smooth=5" in page
    assert viewer.get(f"/compare?runs={own.id}&y=tensors").status_code == 404
    assert viewer.get(f"/compare?runs={own.id}&smooth=x").status_code == 404


def test_the_curves_are_also_shown_as_a_table(viewer: Browser, own: Judged) -> None:
    text = viewer.get(f"/compare?runs={own.id}&y=knn").text
    assert ["25.0% (–, –)" in text, "35.0% (–, –)" in text] == [True, True]
    assert "The same as a table" in text


def test_runs_with_different_seeds_have_the_same_mean_and_deviation_as_in_the_command(
    shared_coordinator: Coordinator, tables: Tables, viewer: Browser
) -> None:
    """An unfinished run, a repeated seed and a run with another setting are not included."""
    runs = [Judged(shared_coordinator, tables, "held-out", seed=seed) for seed in (0, 1, 2, 0, 4)]
    runs += [Judged(shared_coordinator, tables, "held-out", seed=5, num_rounds=7)]
    for run, probe in zip(runs, (0.41, 0.44, 0.48, 0.99, 0.99, 0.99), strict=True):
        run.add(1, "held-out", {"probe": probe, "uniformity": None if probe == 0.44 else 1.5})
        if run is not runs[4]:
            tables.execute("UPDATE runs SET state = 'finished', outcome = 'completed' WHERE id = %s", run.id)
    text = viewer.get(f"/compare?runs={','.join(str(run.id) for run in runs)}").text
    [row] = re.findall(r"<tr>(?:(?!<tr>).)*3: 0, 1, 2.*?</tr>", text, re.DOTALL)
    line = Line("fedu", (0, 1, 2), {"probe_last": (0.41, 0.44, 0.48)}, {})
    assert f">{mean_and_deviation(line.spread('probe_last'), QUALITY['probe'])}<" in row
    assert (">44.33 ± 3.51<" in row, ">training diverged<" in row, ">–<" in row) == (True, True, True)
    assert text.count('class="w wide"') == 2


def test_means_over_seeds_have_the_best_of_all_rounds_if_the_seeds_were_evaluated_after_the_same_ones(
    shared_coordinator: Coordinator, tables: Tables, viewer: Browser
) -> None:
    """The best round may be one that the curves leave out: they have about 200 of the rounds."""
    runs = [Judged(shared_coordinator, tables, "held-out", seed=seed) for seed in (0, 1)]
    finished = "UPDATE runs SET state = 'finished', outcome = 'completed' WHERE id = %s"
    for run, probe in zip(runs, (0.75, 0.65), strict=True):
        tables.execute(finished, run.id)
        for number in range(202):
            run.add(number, "held-out", {"probe": 0.9 if number == 0 else probe if number == 2 else 0.5})
    path = f"/compare?runs={runs[0].id},{runs[1].id}"

    def cells() -> list[str]:
        [row] = re.findall(r"<tr>(?:(?!<tr>).)*2: 0, 1<.*?</tr>", viewer.get(path).text, re.DOTALL)
        return re.findall(r'<td class="num">(.*?)</td>', row)

    assert cells() == ["50.00 ± 0.00", "70.00 ± 7.07", "–", "–", "–", "–"]
    tables.execute("DELETE FROM evaluations WHERE run_id = %s AND round_number = 2", runs[0].id)
    assert cells() == ["50.00 ± 0.00", "–", "–", "–", "–", "–"]


def test_names_of_runs_are_text_in_the_drawn_numbers(
    shared_coordinator: Coordinator, tables: Tables, viewer: Browser
) -> None:
    judged = Judged(shared_coordinator, tables, "held-out")
    name = "</script><b>&\u2028\"'"
    tables.execute("UPDATE runs SET name = %s WHERE id = %s", name, judged.id)
    text = viewer.get(f"/compare?runs={judged.id}").text
    assert name not in text
    assert [run["name"] for run in _drawn(text)] == [name]


def test_accuracies_are_shown_next_to_their_baselines(
    shared_coordinator: Coordinator, tables: Tables, viewer: Browser, own: Judged
) -> None:
    judged = Judged(shared_coordinator, tables, "ten-classes")
    assert "first evaluation pending" in viewer.get(f"/runs/{judged.id}").text
    judged.add(0, "ten-classes", {"probe": 0.25, "knn": 0.2}, Chance(0.15, 10))
    first = viewer.get(f"/runs/{judged.id}").text
    assert "first evaluation pending" not in first
    assert "untrained 25.0%, chance 15.0%" in first
    judged.add(1, "ten-classes", {"probe": 0.5, "knn": 0.4}, Chance(0.15, 10))

    for path in (f"/runs/{judged.id}", f"/runs?q={judged.name}"):
        text = viewer.get(path).text
        assert "untrained 25.0%, chance 15.0%" in text, path
        assert "untrained 20.0%, chance 15.0%" in text, path
        assert "+25.0 points since round 0" in text, path
    assert viewer.get(f"/runs/{judged.id}/curves.json").json()["chance"] == 0.15
    jobs = " ".join(viewer.get(f"/runs/{judged.id}/jobs").text.split())
    assert "chance is 15.0%, the share of the largest of 10 classes" in jobs
    text = viewer.get(f"/compare?runs={judged.id},{own.id}").text
    found = {"Linear probe before training": "25.0%", "kNN before training": "20.0%", "Chance": "15.0%"}
    for name, shown in found.items():
        cells = _cells(text, name)
        assert shown in cells[0], name
        assert "–" in cells[1], "nothing is known about the other run's data set"

    tables.execute(
        "UPDATE runs SET spec = jsonb_set(spec, '{model,initial}', %s) WHERE id = %s",
        Jsonb({"weights": "imagenet"}),
        judged.id,
    )
    assert "start 25.0%, chance 15.0%" in viewer.get(f"/runs/{judged.id}").text
