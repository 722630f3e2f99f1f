"""A run's metrics in MLflow, read back from its own store."""

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from fedssl.cli.run import metric_files
from fedssl.cli.run.metric_files import Number, send_to_mlflow
from fedssl.errors import ExportError
from fedssl.protocol.views import RunView
from support.federation import tiny_spec

NUMBERS = [Number(1, None, "loss", 2.0), Number(1, "hospital-a", "loss", 2.5), Number(2, None, "loss", 1.0)]


@pytest.fixture
def run() -> RunView:
    spec = tiny_spec(name="first", seed=5)
    made = {"id": "00000000-0000-0000-0000-000000000001", "created_at": "2026-11-20T12:00:00Z"}
    ended = {"state": "finished", "outcome": "completed", "reason": None, "started_at": None, "finished_at": None}
    rest = {"initial_model": None, "model": None, "current_round": None, "distillation": None, "clients": []}
    numbers = {"rounds_closed": spec.num_rounds, "num_rounds": spec.num_rounds}
    return RunView.model_validate(
        {"name": spec.name, "method": spec.method.name, "spec": spec, **made, **ended, **rest, **numbers}
    )


@pytest.fixture
def mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Use a separate store, and send no usage statistics."""
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", "")  # MLflow sets this variable itself: restore it like the others
    monkeypatch.delenv("MLFLOW_EXPERIMENT_ID")
    monkeypatch.chdir(tmp_path)
    import mlflow

    mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'mlflow.db'}")
    yield mlflow
    mlflow.set_tracking_uri(None)


@pytest.mark.full
def test_mlflow_stores_the_run_and_its_metrics(
    mlflow: ModuleType, run: RunView, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metric_files, "_MLFLOW_BATCH", 2)
    send_to_mlflow(run, NUMBERS, tmp_path / "federation")
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("federation")
    [kept] = client.search_runs([experiment.experiment_id])
    assert (kept.info.run_name, kept.info.status, kept.data.tags["fedssl.run"]) == ("first", "FINISHED", str(run.id))
    assert kept.data.params == {"method": run.method, "seed": "5", "num_rounds": str(run.num_rounds)}
    curves = {
        name: [(point.step, point.value) for point in client.get_metric_history(kept.info.run_id, name)]
        for name in kept.data.metrics
    }
    assert curves == {"loss": [(1, 2.0), (2, 1.0)], "loss/hospital-a": [(1, 2.5)]}
    with pytest.raises(ExportError, match="MLflow does not accept the run"):
        send_to_mlflow(run, [Number(1, None, "what?!", 1.0)], tmp_path / "federation")


def test_a_missing_export_package_is_named(run: RunView, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ExportError, match="mlflow is not installed here: pip install mlflow"):
        send_to_mlflow(run, NUMBERS, tmp_path)
