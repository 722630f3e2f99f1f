"""Commands for evaluations of encoders on the coordinator."""

import threading
import time
from pathlib import Path

import pytest
from typer.testing import Result

from fedssl.protocol.states import JobState
from support.commands import Fedssl, json_of
from support.coordinator import Coordinator
from support.distillation_scenario import DistillationScenario
from support.evaluated_runs import evaluated_spec, register_digits
from support.methods import method_spec
from support.tables import Tables

pytestmark = pytest.mark.integration


@pytest.fixture
def scenario(coordinator: Coordinator, tables: Tables, tmp_path: Path) -> DistillationScenario:
    """Return a run with two of its three rounds closed, and with an evaluation after each of them."""
    register_digits(coordinator.client, tmp_path)
    return DistillationScenario(coordinator, tables, tmp_path, evaluated_spec(num_rounds=3), train=True)


def _evaluate(scenario: DistillationScenario) -> None:
    for row in scenario.coordinator.client.evaluations(scenario.id):
        if row.state in (JobState.QUEUED, JobState.RUNNING):
            scenario.coordinator.evaluate(row.id)


def test_the_table_marks_the_last_and_the_best_evaluation(scenario: DistillationScenario, fedssl: Fedssl) -> None:
    scenario.train()
    _evaluate(scenario)
    run = str(scenario.id)[:8]
    rows = json_of(fedssl("run", "evaluations", run, "--format", "json"))
    assert [(row["round_number"], row["state"]) for row in rows] == [(n, "completed") for n in (0, 1, 2)]
    # These numbers leave no doubt which round is the best.
    for number, probe in ((0, 0.25), (1, 0.75), (2, 0.5)):
        scenario.tables.execute(
            "UPDATE evaluations SET results = jsonb_set(results, '{probe}', to_jsonb(%s::float)) "
            "WHERE round_number = %s",
            probe,
            number,
        )
    shown = fedssl("run", "evaluations", run)
    lines = [line for line in shown.stdout.splitlines() if line.strip()]
    assert lines[0].split()[:3] == ["evaluation", "round", "data"]
    assert ["25.00 %" in lines[2], "75.00 %" in lines[3], "50.00 %" in lines[4]] == [True] * 3
    assert [line.rstrip().rpartition("completed")[2].strip() for line in lines[2:]] == ["-", "best by probe", "last"]
    assert "best is round 1 of 3 evaluated, chosen on the test set by probe itself" in shown.stderr
    assert "round 0 is the encoder before training" in shown.stderr
    assert "chance on digits is 13.00 %: the share of the largest of 10 classes" in shown.stderr


def test_a_runs_scores_are_shown_next_to_their_baselines(scenario: DistillationScenario, fedssl: Fedssl) -> None:
    assert json_of(fedssl("run", "show", scenario.id, "--format", "json"))["scores"] == []
    scenario.train()
    _evaluate(scenario)
    shown = fedssl("run", "show", scenario.id)
    [scores] = json_of(fedssl("run", "show", scenario.id, "--format", "json"))["scores"]
    by_round = {row.round_number: row.results for row in scenario.coordinator.client.evaluations(scenario.id)}

    assert (scores["dataset"], scores["last"]["round"]) == ("digits", 2)
    assert scores["baselines"]["untrained"]["probe"] == by_round[0]["probe"]
    how = "the share of the largest of 10 classes"
    assert scores["baselines"]["chance"] == {"accuracy": 0.13, "num_classes": 10, "how": how}
    row = next(line.split() for line in shown.stdout.splitlines() if line.startswith(" linear probe"))
    assert row[2:8] == [
        "13.00",
        "%",
        f"{100 * by_round[0]['probe']:.2f}",
        "%",
        f"{100 * by_round[2]['probe']:.2f}",
        "%",
    ]


def test_only_evaluations_with_the_same_settings_are_compared(scenario: DistillationScenario, fedssl: Fedssl) -> None:
    _evaluate(scenario)
    json_of(fedssl("run", "evaluate", scenario.id, "--round", 1, "--num-test", 50, "--format", "json"))
    _evaluate(scenario)
    shown = fedssl("run", "evaluations", scenario.id)
    assert shown.exit_code == 0
    assert shown.stderr.count(" evaluated") == 1  # of the run's own two; the third is compared with nothing
    assert shown.stdout.count("digits max_test 50") == 1


def test_a_request_combines_the_specs_evaluation_with_the_options(
    scenario: DistillationScenario, fedssl: Fedssl
) -> None:
    own = json_of(fedssl("run", "evaluate", scenario.id, "--format", "json"))
    assert own["id"] in {
        str(row.id) for row in scenario.coordinator.client.evaluations(scenario.id)
    }  # it is due without this request
    asked = json_of(
        fedssl(
            "run", "evaluate", scenario.id, "--round", 0, "--measures", "knn", "--num-labels", 0, "--num-test", 9,
            "--format", "json",
        )
    )  # fmt: skip
    assert (asked["round_number"], asked["state"]) == (0, "queued")
    config = {name: asked["config"][name] for name in ("dataset", "measures", "max_train", "max_test")}
    assert config == {"dataset": "digits", "measures": ["knn"], "max_train": None, "max_test": 9}
    plain = scenario.coordinator.client.create_run(method_spec("fedsimclr")).id
    scenario.coordinator.advance(plain)
    missing = fedssl("run", "evaluate", plain)
    assert (missing.exit_code, "give --data NAME" in missing.stderr) == (2, True)
    given = json_of(fedssl("run", "evaluate", plain, "--data", "digits", "--format", "json"))
    assert (given["config"]["measures"], given["config"]["max_train"]) == (["probe", "knn", "geometry"], 10_000)
    assert fedssl("run", "evaluate", plain, "--data", "elsewhere").exit_code == 2
    wrong = fedssl("run", "evaluate", plain, "--data", "digits", "--measures", "luck")
    assert (wrong.exit_code, "measures" in wrong.stderr) == (2, True)
    assert fedssl("run", "evaluate", plain, "--data", "digits", "--round", 5).exit_code == 5


def test_evaluate_can_wait_for_the_results(scenario: DistillationScenario, fedssl: Fedssl) -> None:
    def work() -> None:
        time.sleep(0.3)
        _evaluate(scenario)

    worker = threading.Thread(target=work)
    worker.start()
    done = fedssl("run", "evaluate", scenario.id, "--wait")
    worker.join()
    assert done.exit_code == 0, done.output
    assert "completed" in done.stdout


@pytest.mark.full
def test_an_evaluation_is_cancelled_by_its_id(scenario: DistillationScenario, fedssl: Fedssl) -> None:
    first = next(scenario.coordinator.client.evaluations(scenario.id))
    assert fedssl("run", "cancel-evaluation", scenario.id, "ffffffff").exit_code == 5
    assert fedssl("run", "cancel-evaluation", scenario.id, "f").exit_code == 2
    cancelled = fedssl("run", "cancel-evaluation", scenario.id, str(first.id)[:8])
    assert cancelled.exit_code == 0, cancelled.output
    assert "cancelled by an operator" in cancelled.stdout


@pytest.mark.full
def test_watching_shows_alarms_and_evaluated_rounds(
    coordinator: Coordinator, tables: Tables, fedssl: Fedssl, tmp_path: Path
) -> None:
    register_digits(coordinator.client, tmp_path)
    spec = evaluated_spec(num_rounds=1, watch={"min_effective_rank": 1e6, "first_round": 1})
    scenario = DistillationScenario(coordinator, tables, tmp_path, spec, train=False)
    said: list[Result] = []
    watching = threading.Thread(target=lambda: said.append(fedssl("run", "watch", scenario.id)))
    watching.start()
    time.sleep(1.5)  # by now it has polled once
    _evaluate(scenario)
    scenario.train()
    watching.join(20)
    [result] = said
    assert result.exit_code == 0, result.output
    assert "warning: round 1: client-0: effective_rank" in result.stderr
    assert "evaluated: before training, on digits: probe " in result.stderr


def test_a_map_is_requested_and_drawn(scenario: DistillationScenario, fedssl: Fedssl, tmp_path: Path) -> None:
    none = fedssl("run", "embedding", scenario.id)
    assert (none.exit_code, "fedssl run evaluate" in none.stderr) == (2, True)
    asked = ("run", "evaluate", scenario.id, "--measures", "knn", "--map", "pca")
    assert json_of(fedssl(*asked, "--format", "json"))["config"]["embedding_map"] == "pca"
    early = fedssl("run", "embedding", scenario.id)
    assert (early.exit_code, "its evaluation is queued" in early.stderr) == (2, True)
    _evaluate(scenario)
    out = tmp_path / "maps" / "digits.png"
    drawn = fedssl("run", "embedding", scenario.id, "--out", out)
    assert drawn.exit_code == 0, drawn.output
    assert "100 test images of digits" in drawn.stderr
    assert out.read_bytes().startswith(b"\x89PNG")
    found = json_of(fedssl("run", "embedding", scenario.id, "--format", "json"))
    assert len(found["points"]) == len(found["labels"]) == 100
    other = fedssl("run", "embedding", scenario.id, "--round", 0)
    assert (other.exit_code, "--round 0" in other.stderr) == (2, True)
