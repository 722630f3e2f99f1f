"""A run's numbers in the formats of other programs: CSV, JSON, TensorBoard's event files, an MLflow run."""

import csv
import io
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fedssl.errors import ExportError
from fedssl.evaluation.comparable import names_of, setting_of
from fedssl.packages import is_installed
from fedssl.protocol.views import RunView
from fedssl.run_files import write_json, write_text

if TYPE_CHECKING:
    from fedssl.client import Client

MetricFormat = Literal["csv", "json", "tensorboard", "mlflow"]

_MLFLOW_BATCH = 1_000  # the most metrics that MLflow accepts at once


@dataclass(frozen=True, slots=True)
class Number:
    """One number of a run. `client` is None if it is a number of the whole round."""

    round_number: int
    client: str | None
    name: str
    value: float

    @property
    def series(self) -> str:
        """The name of the curve to which it belongs."""
        return self.name if self.client is None else f"{self.name}/{self.client}"


def numbers_of(client: "Client", run: RunView) -> list[Number]:
    """Return the metrics of clients and rounds, and the results of evaluations as `DATASET.MEASURE`.

    If a data set was used with several settings, what differs between them follows its name.
    """
    found = [Number(row.round_number, row.client_id, row.name, row.value) for row in client.metrics(run.id)]
    evaluations = list(client.evaluations(run.id))
    names = names_of(evaluations)
    for evaluation in evaluations:
        for name, value in (evaluation.results or {}).items():
            if value is not None:
                found.append(Number(evaluation.round_number, None, f"{names[setting_of(evaluation)]}.{name}", value))
    return sorted(found, key=lambda number: (number.round_number, number.series))


def write_csv(run: RunView, numbers: Sequence[Number], out: Path) -> None:
    """Write a line per number: round, client (empty for the whole round), name, value."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["round", "client", "name", "value"])
    writer.writerows([number.round_number, number.client or "", number.name, number.value] for number in numbers)
    write_text(out, text.getvalue())


def write_document(run: RunView, numbers: Sequence[Number], out: Path) -> None:
    """Write one JSON document, with the run's name and spec."""
    described = {"run": str(run.id), "name": run.name, "spec": run.spec.model_dump(mode="json")}
    write_json(out, {**described, "numbers": [asdict(number) for number in numbers]})


def write_tensorboard(run: RunView, numbers: Sequence[Number], out: Path) -> None:
    """Write an event file into the folder `out`. Raises ExportError if TensorBoard is not installed."""
    _require("tensorboard", "torch")
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(out)) as writer:
        for number in numbers:
            writer.add_scalar(number.series, number.value, number.round_number)


def send_to_mlflow(run: RunView, numbers: Sequence[Number], out: Path) -> None:
    """Create a run in the experiment whose name is that of `out`, on the server MLFLOW_TRACKING_URI.

    Raises ExportError if MLflow is not installed, or does not accept the numbers.
    """
    _require("mlflow")
    import mlflow
    from mlflow.entities import Metric, Param
    from mlflow.exceptions import MlflowException

    settings = {"method": run.method, "seed": run.spec.seed, "num_rounds": run.num_rounds}
    now = int(time.time() * 1000)
    points = [Metric(number.series, number.value, now, number.round_number) for number in numbers]
    try:
        mlflow.set_experiment(out.name)
        with mlflow.start_run(run_name=run.name, tags={"fedssl.run": str(run.id)}) as started:
            client, theirs = mlflow.MlflowClient(), started.info.run_id
            client.log_batch(theirs, params=[Param(name, str(value)) for name, value in settings.items()])
            for start in range(0, len(points), _MLFLOW_BATCH):
                client.log_batch(theirs, metrics=points[start : start + _MLFLOW_BATCH])
    except MlflowException as error:
        raise ExportError(f"MLflow does not accept the run (MLFLOW_TRACKING_URI is its address): {error}") from None


WRITERS: dict[MetricFormat, Callable[[RunView, Sequence[Number], Path], None]] = {
    "csv": write_csv,
    "json": write_document,
    "tensorboard": write_tensorboard,
    "mlflow": send_to_mlflow,
}


def _require(*packages: str) -> None:
    if missing := [name for name in packages if not is_installed(name)]:
        raise ExportError(f"{' and '.join(missing)} is not installed here: pip install {' '.join(missing)}")
