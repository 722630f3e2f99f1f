"""Commands for what the coordinator itself stores and trains: dimensions, distillations and the state of a run."""

from pathlib import Path

import pytest
from typer.testing import Result

from fedssl.protocol.states import JobState, RunState
from support.commands import Fedssl, json_of
from support.coordinator import Coordinator
from support.distillation_scenario import DistillationScenario
from support.federation import tiny_spec
from support.methods import method_spec
from support.scenario import Scenario
from support.tables import Tables

pytestmark = pytest.mark.integration


def _table(result: Result) -> list[str]:
    """Return the non-empty lines of a printed table: its columns, a rule and its rows."""
    assert result.exit_code == 0, result.output
    return [line for line in result.stdout.splitlines() if line.strip()]


def test_the_dimensions_of_each_client_are_listed(coordinator: Coordinator, fedssl: Fedssl) -> None:
    for name in ("b", "a"):
        coordinator.worker(name)
    run = coordinator.client.create_run(method_spec("ssd", cohort={"min_clients": 2})).id
    assert "assigns no dimensions" in fedssl("run", "dimensions", run).stderr
    coordinator.advance(run)
    owned = json_of(fedssl("run", "dimensions", run, "--format", "json"))
    assert [(view["client_id"], len(view["dimensions"])) for view in owned] == [("a", 8), ("b", 8)]
    shown = _table(fedssl("run", "dimensions", str(run)[:8]))
    assert shown[0].split() == ["client", "dimensions", "which"]
    assert shown[2].split()[:2] == ["a", "8"]
    listed = [int(n) for part in shown[2].split(maxsplit=2)[2].split(", ") for n in part.split("-")]
    assert listed[0] == owned[0]["dimensions"][0]
    assert listed[-1] == owned[0]["dimensions"][-1]


@pytest.mark.full
def test_distillations_are_listed_watched_and_cancelled(
    coordinator: Coordinator, fedssl: Fedssl, tables: Tables, tmp_path: Path
) -> None:
    scenario = DistillationScenario(coordinator, tables, tmp_path)
    run = str(scenario.id)[:8]
    [job] = json_of(fedssl("run", "distillations", run, "--format", "json"))
    assert (job["state"], job["epoch"], job["num_epochs"], job["eta_seconds"]) == ("queued", 0, 6, None)
    tables.execute(
        "UPDATE distillation_jobs SET state = 'running', started_at = now(), epoch = 4, loss = 1.25, "
        "seconds_per_epoch = 40"
    )
    row = _table(fedssl("run", "distillations", run))[2].split()
    assert row[:6] == [job["id"][:8], "1", "running", "4/6", "1.25", "1:20"]

    cancelled = fedssl("run", "cancel-distillation", run)
    assert cancelled.exit_code == 0, cancelled.output
    assert "cancelled" in cancelled.stdout
    assert f"run {run} is paused; `fedssl run resume` restarts the training from scratch" in cancelled.stderr
    assert (scenario.run.state, scenario.job.state) == (RunState.PAUSED, JobState.CANCELLED)
    assert "resume the run to start it again" in fedssl("run", "show", run).stdout
    again = fedssl("run", "cancel-distillation", run)
    assert (again.exit_code, again.stdout) == (5, "")
    assert "has no distillation in progress" in again.stderr

    assert fedssl("run", "resume", run).exit_code == 0
    coordinator.advance(scenario.id)
    scenario.distil()
    coordinator.advance(scenario.id)
    states = [job["state"] for job in json_of(fedssl("run", "distillations", run, "--format", "json"))]
    assert states == ["cancelled", "completed"]
    assert fedssl("run", "watch", run).exit_code == 0


def test_a_run_without_distillations_has_an_empty_list(coordinator: Coordinator, fedssl: Fedssl) -> None:
    run = coordinator.client.create_run(tiny_spec()).id
    assert json_of(fedssl("run", "distillations", run, "--format", "json")) == []
    assert fedssl("run", "distillations", run).exit_code == 0


def test_the_tensors_of_a_runs_server_state_are_listed(coordinator: Coordinator, fedssl: Fedssl) -> None:
    """SCAFFOLD's state has the weights and a control variate for each of their parameters."""
    run = coordinator.client.create_run(method_spec("scaffold")).id
    assert "has no state yet" in fedssl("run", "state", run).stderr
    coordinator.advance(run)
    lines = [line.split() for line in _table(fedssl("run", "state", run))]
    assert [line[0] for line in lines[2:5]] == ["control", "encoder", "projector"]
    assert lines[-1][-2:] == ["artifact", coordinator.client.run(run).server_state]
    found = json_of(fedssl("run", "state", run, "--format", "json"))
    assert found["artifact"] == coordinator.client.run(run).server_state
    stored = coordinator.tensors(found["artifact"])
    assert {t["name"]: tuple(t["shape"]) for t in found["tensors"]} == {n: tuple(t.shape) for n, t in stored.items()}
    numbers = sum(tensor.numel() for name, tensor in stored.items() if name.startswith("control."))
    assert int(lines[2][2].replace(",", "")) == numbers


def test_a_group_with_a_single_tensor_shows_its_shape(coordinator: Coordinator, fedssl: Fedssl) -> None:
    run = coordinator.client.create_run(method_spec("fedrlc")).id
    coordinator.advance(run)
    [row] = [line for line in fedssl("run", "state", run).stdout.splitlines() if line.startswith(" centers")]
    assert row.split() == ["centers", "1", "80", "320", "10", "x", "8"]


def test_a_completed_run_is_continued(coordinator: Coordinator, fedssl: Fedssl, tables: Tables, tmp_path: Path) -> None:
    scenario = Scenario(coordinator, tables, tmp_path, num_rounds=1)
    refused = fedssl("run", "continue", scenario.id, "--rounds", "2")
    assert refused.exit_code == 5, refused.output
    assert "it is running, and has closed 0 of 1 round: wait until it ends" in refused.stderr
    scenario.work("a", "b")
    scenario.advance()
    continued = json_of(fedssl("run", "continue", str(scenario.id)[:8], "--rounds", "2", "--format", "json"))
    assert (continued["state"], continued["rounds_closed"], continued["num_rounds"]) == ("running", 1, 3)
