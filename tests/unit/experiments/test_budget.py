"""A time budget is kept within a quarter: the first rounds of the real runs are measured before the plan is made."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from fedssl.errors import ResultsError, SpecError
from fedssl.experiments import calibration, pilot
from fedssl.experiments.budget import (
    Calibration,
    Fit,
    Speeds,
    _parts,
    calibrated_fit,
    fit,
    kept_fit,
    learns_little,
    num_evaluations,
    training_seconds,
)
from fedssl.experiments.costs import passes, server_images, trained_images
from fedssl.experiments.measures import tuning_passes
from fedssl.experiments.overlays import changed
from fedssl.experiments.papers import TableCell, select
from fedssl.experiments.pilot import NUM_ROUNDS, Pilot, run_pilot
from fedssl.experiments.runs import ComputeSettings
from fedssl.experiments.scaling import Scale, scaled
from fedssl.protocol.runs import RunSpec
from fedssl.simulation import RoundRecord
from support.methods import method_spec

RATES = {64: 8000.0, 128: 2000.0, 256: 500.0, 512: 10.0, 2048: 4.0}


@dataclass(slots=True)
class Estimated(Speeds):
    """Speeds as measured on noise: images per second by the encoder's last width."""

    def training(self, spec: RunSpec) -> float:
        return RATES[spec.model.encoder.feature_dim]

    def judging(self, spec: RunSpec) -> float:
        return 1.0


@dataclass
class Machine:
    """A machine whose real work differs from the estimate, and the time on its clock."""

    slower: float = 1.0
    judging: float = 1.0
    seconds_per_round: float = 0.0
    loading: float = 0.0
    now: float = 0.0
    pilots: list[str] = field(default_factory=list)

    def clock(self) -> float:
        return self.now

    def run(self, cell: TableCell, spec: RunSpec, num_rounds: int | None = None) -> Pilot:
        """Let the time of a run or of its first rounds pass."""
        images = trained_images(spec, cell.public_client)
        assert images is not None
        per_round = images / spec.num_rounds * self.slower / RATES[spec.model.encoder.feature_dim]
        per_round += self.seconds_per_round
        evaluations = 1 if num_rounds else num_evaluations(spec)
        rounds = min(spec.num_rounds, num_rounds or spec.num_rounds)
        self.now += self.loading + rounds * per_round + evaluations * self.judging
        return Pilot(self.loading, self.judging, per_round)

    def pilot(self, cell: TableCell, spec: RunSpec, longest_seconds: float) -> Pilot:
        self.pilots.append(cell.name)
        before = self.now
        found = self.run(cell, spec, 1)
        if self.now - before <= longest_seconds:
            self.now += (NUM_ROUNDS - 1) * found.round
        return found


MACHINES = {
    "as estimated": Machine(),
    "three times slower": Machine(slower=3.0),
    "three times faster": Machine(slower=0.33),
    "slow evaluation": Machine(judging=5.0),
    "slow rounds": Machine(seconds_per_round=2.0),
    "slow start": Machine(loading=30.0),
    "everything": Machine(slower=1.8, judging=2.0, seconds_per_round=1.0, loading=10.0),
}


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize(
    "what",
    ["fedx-1:FedSimCLR@cifar10", *(pytest.param(table, marks=pytest.mark.full) for table in ("fedx-1", "fedu-1"))],
)
def test_the_promised_time_is_kept_within_a_quarter(name: str, what: str) -> None:
    machine, cells = MACHINES[name], select(what)
    machine.now, promised = 0.0, 300.0 * len(cells)

    found = calibrated_fit(cells, promised, (0,), Estimated(), machine.pilot, clock=machine.clock)
    for _ in found.seeds:
        for cell in cells:
            machine.run(cell, scaled(cell, found.scale))

    assert 0.75 * promised <= machine.now <= 1.25 * promised
    assert found.calibration is not None
    assert found.calibration.measuring <= 0.25 * promised
    assert found.seconds + found.calibration.measuring == pytest.approx(promised, rel=0.25)


def test_a_budget_counts_what_changes_by_hand_add_to_a_run() -> None:
    """Ten times as many rounds as the scale has take ten times as long, at any scale."""
    machine, [cell] = Machine(), select("fedx-1:FedSimCLR@cifar10")

    def adapt(cell: TableCell, spec: RunSpec) -> RunSpec:
        return changed(spec, {"num_rounds": 200})

    found = calibrated_fit([cell], 300, (0,), Estimated(), machine.pilot, adapt, clock=machine.clock)
    machine.run(cell, adapt(cell, scaled(cell, found.scale)))

    assert 0.75 * 300 <= machine.now <= 1.25 * 300
    with pytest.raises(SpecError, match="the size of the data set of fedx-1:FedSimCLR@cifar10 is unknown"):
        fit([cell], 300, (0,), Estimated(), lambda cell, spec: changed(spec, {"partition": {"dataset": "mine.npz"}}))


def test_clients_that_train_at_the_same_time_are_counted_at_most_once_per_client() -> None:
    [cell] = select("fedx-1:FedSimCLR@cifar10")
    alone, *several = (training_seconds(cell, cell.spec, Estimated("cpu", count)) for count in (1, 2, 10, 100))

    assert [alone / each for each in several] == [2, 10, 10], "there are ten clients"
    [cell] = select("flesd-1:FLESD@cifar10-a100")
    server = server_images(cell.spec) / RATES[512]
    assert training_seconds(cell, cell.spec, Estimated("cpu", 2)) == pytest.approx(
        (training_seconds(cell, cell.spec, Estimated()) - server) / 2 + server
    )


def test_an_evaluation_that_no_pilot_had_is_estimated() -> None:
    [cell] = select("fedx-1:FedSimCLR@cifar10")
    spec = changed(scaled(cell, Scale(rounds=0.2)), {"evaluation": {"every": 0}})
    assert (spec.num_rounds, num_evaluations(spec)) == (20, 1)

    parts = _parts(cell, spec, Pilot(loading=2, judging=0, round=3), Estimated())

    assert parts.real == 2 + 20 * 3 + 1
    assert parts.judging == (0, 1), "nothing to correct the estimate by"


def test_fine_tuning_costs_its_steps_and_its_tests() -> None:
    """SSD tunes with 1 % and 10 % of 50,000 labels for 200 epochs, and tests four times on 10,000 images."""
    [cell] = select("ssd-1:SSD@cifar10-k10")
    assert tuning_passes(cell, cell.spec) == 3 * 200 * (500 + 5000) + 2 * 4 * 10_000
    few = changed(cell.spec, {"evaluation": {"max_train": 1000, "max_test": 100}})
    assert tuning_passes(cell, few) == 3 * 200 * (10 + 100) + 2 * 4 * 100
    assert tuning_passes(cell, changed(cell.spec, {"evaluation": None})) == 0


def test_fine_tuning_takes_the_time_of_eager_steps_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does so on a GPU too, where the training takes captured steps in bfloat16."""
    [cell] = select("ssd-1:SSD@cifar10-k10")
    asked = list[str]()

    def training_speed(spec: RunSpec, device: str) -> float:
        asked.append(f"{spec.training.precision} {spec.training.gpu_steps}")
        return {"bf16": 1000.0, "fp32": 100.0}[spec.training.precision]

    monkeypatch.setattr(calibration, "training_speed", training_speed)
    monkeypatch.setattr(calibration, "judging_seconds", lambda *_: 1.0)
    speeds = Speeds("cuda")
    seconds = [training_seconds(cell, cell.spec, speeds) for _ in range(2)]

    images = trained_images(cell.spec, None)
    assert images is not None
    tuned = tuning_passes(cell, cell.spec) / passes(cell.spec.method).units
    assert seconds == [pytest.approx(images / 1000 + tuned / 100)] * 2
    assert asked == ["bf16 auto", "fp32 eager"], "each once"
    parts = _parts(cell, cell.spec, Pilot(loading=0, judging=0, round=1), speeds)
    assert parts.training == (cell.spec.num_rounds, pytest.approx(images / 1000))


def test_the_estimate_without_a_pilot_does_not_keep_the_budget() -> None:
    machine, [cell] = Machine(slower=3.0), select("fedx-1:FedSimCLR@cifar10")
    machine.run(cell, scaled(cell, fit([cell], 300, (0,), Estimated()).scale))

    assert machine.now > 1.25 * 300


def test_a_budget_that_the_real_work_exceeds_is_refused() -> None:
    machine, cells = Machine(loading=100.0), select("fedx-1:FedSimCLR@cifar10")

    with pytest.raises(SpecError, match="the budget is too small: at least"):
        calibrated_fit(cells, 90, (0,), Estimated(), machine.pilot, clock=machine.clock)


def test_a_stored_plan_is_reused_with_its_calibration(tmp_path: Path) -> None:
    made = Fit(Scale(images=0.5), (0,), 10.0, Calibration(60.0, 5.0, 1, 1.2, 0.9, 0.5))

    assert kept_fit(tmp_path / "plan.json", lambda: made) == made
    assert kept_fit(tmp_path / "plan.json", lambda: pytest.fail("it was kept")) == made


@pytest.mark.full
def test_a_pilot_measures_real_rounds_and_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    evaluation = {"dataset": "digits", "every": 1, "max_train": 100, "measures": ["knn"]}
    spec = method_spec("fedsimclr", num_rounds=50, evaluation=evaluation)

    found = run_pilot(spec, ComputeSettings(), longest_seconds=60)

    assert found.round > 0
    assert found.judging > 0
    assert found.loading > 0
    assert not list(tmp_path.glob("fedssl-pilot-*"))


def test_a_pilot_is_the_second_round_and_what_comes_before_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading takes 5 s, the evaluation before training 3 s, the rounds 10 and 4 s, an evaluation between them 2 s."""
    now, ended = [100.0], list[int]()
    monkeypatch.setattr(pilot.time, "monotonic", lambda: now[0])

    def simulated(spec: RunSpec, clients: object, **calls: Any) -> None:
        def pass_time(seconds: float) -> None:
            now[0] += seconds

        pass_time(5)
        for number, evaluation, rounds in ((0, 3, 10), (1, 2, 4), (2, 0, 4)):
            calls["on_judging"](number, "kNN", None)
            calls["on_judging"](number, "linear probe", 0.5)
            pass_time(evaluation)
            calls["on_evaluation"](number, {})
            pass_time(rounds)
            ended.append(number + 1)
            calls["on_round"](RoundRecord(number + 1, {}, {}))

    monkeypatch.setattr(pilot, "simulate", simulated)
    spec = method_spec("fedsimclr", num_rounds=50)

    assert run_pilot(spec, ComputeSettings(), longest_seconds=60) == Pilot(loading=5 + 10 - 4, judging=2, round=4)
    assert ended == [1, 2]
    assert run_pilot(spec, ComputeSettings(), longest_seconds=15).round == 10, "it ends after the first round"


def test_a_damaged_plan_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"scale": {"images": 0.5}}')

    with pytest.raises(ResultsError, match=r"plan\.json is not a plan .*: remove it, or start again with --restart"):
        kept_fit(tmp_path / "plan.json", lambda: pytest.fail("it is not replaced"))


def test_cells_that_learn_little_at_a_scale_are_listed() -> None:
    cells = select("fedrlc-1:FedBYOL@cifar10-class")
    twenty_rounds = Scale(rounds=0.2, epochs=0.01)

    assert learns_little(cells, replace(twenty_rounds, images=0.02)) == [cells[0].name], "20,000 images"
    assert learns_little(cells, replace(twenty_rounds, images=0.1)) == [], "100,000 images"
    assert learns_little(select("fedu-3:Random init@cifar10"), twenty_rounds) == [], "it is the untrained encoder"
