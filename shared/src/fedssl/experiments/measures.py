"""Compute the columns of a table for a finished run: accuracies in percent, anything else unscaled."""

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedssl.artifacts.tensors import load_tensors
from fedssl.data import ImageData
from fedssl.data.catalogue import KNOWN
from fedssl.data.partitioning import held_out_images
from fedssl.errors import ResultsError
from fedssl.evaluation import FINE_TUNINGS, TRANSFERS, FineTuneSettings, labels_of
from fedssl.evaluation.fine_tuning import fine_tune, semi_supervised
from fedssl.evaluation.suite import Labelled, load_encoder, load_labelled
from fedssl.experiments.model_measures import (
    classifier_accuracy,
    embedding_uniformity,
    last_client_metric,
    last_server_metric,
    mean_inter_class_angle,
    mean_local_global_angle,
    mean_norm,
)
from fedssl.experiments.papers import Measure, TableCell
from fedssl.experiments.runs import ComputeSettings, FinishedRun, client_models, encoders
from fedssl.protocol.runs import RunSpec
from fedssl.run_files import MEASURES, MODEL, read_json, write_json

_TUNINGS: Mapping[str, Mapping[str, FineTuneSettings]] = {"fine_tune": FINE_TUNINGS, "transfer": TRANSFERS}
OnMeasuring = Callable[[str, float | None], None]
"""Called with the name of the measure that is computed, and the share of it that is done, 0..1, if that is known."""
_Report = Callable[[float | None], None]


def measure_cell(
    cell: TableCell,
    spec: RunSpec,
    run: FinishedRun,
    folder: Path,
    machine: ComputeSettings,
    on_measuring: OnMeasuring = lambda name, share: None,
) -> dict[str, float]:
    """Return every measure of the cell by name. Expensive measures are stored in the run's folder and not repeated."""
    kept = _Kept(folder)
    found: dict[str, float] = {}
    for name, measure in cell.measures.items():
        if (value := _from_run(measure, run)) is not None:
            found[name] = value
            continue
        report = functools.partial(on_measuring, name)
        compute = functools.partial(_from_models, measure, spec, folder, machine, kept, report)
        found[name] = kept.value(_key(measure, spec), compute)
    return found


class _Kept:
    """The measures that are stored in a run's folder."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / MEASURES
        self._values = read_json(self._path) or {}

    def value(self, key: str, compute: Callable[[], float]) -> float:
        """Return the stored value, or compute and store it."""
        if key not in self._values:
            self._values[key] = compute()
            write_json(self._path, self._values)
        value = self._values[key]
        return math.nan if value is None else float(value)  # JSON has null instead of NaN


def tuning_passes(cell: TableCell, spec: RunSpec) -> float:
    """Return the cost of fine-tuning one encoder as the cell asks, as the number of forward passes of an image.

    A step with gradients costs three. Tests count too: with 1 % of the labels, they may cost more than the steps.
    """
    config, total = spec.central_evaluation, 0.0
    if config is None:
        return total
    known = KNOWN.get(config.dataset)
    num_train, num_test = (50_000, 10_000) if known is None else (known.num_train, known.num_test)
    for measure in cell.measures.values():
        if measure.kind in _TUNINGS:
            settings = settings_of(measure)
            labelled = min(num_train, config.max_train or num_train) * (measure.share or 1.0)
            total += labelled * settings.epochs * (1 if settings.encoder_learning_rate is None else 3)
            total += min(num_test, config.max_test or num_test) * math.ceil(settings.epochs / settings.evaluate_every)
    return total


def settings_of(measure: Measure) -> FineTuneSettings:
    """Return the settings of the fine-tuning that a measure names."""
    assert measure.settings is not None, "a fine-tuning names its settings"
    return _TUNINGS[measure.kind][measure.settings]


def _from_run(measure: Measure, run: FinishedRun) -> float | None:
    """Return a measure that was computed during the run; None for measures of another kind."""
    match measure.kind:
        case "probe":
            return 100 * _required(run.last, "probe")
        case "best_probe":
            best = run.best("probe")
            return 100 * (_required(run.last, "probe") if best is None else best[1])
        case "worst_probe":
            return 100 * run.last.get("probe_min", _required(run.last, "probe"))
        case "uniformity" | "alignment" | "effective_rank":
            return _required(run.last, measure.kind)
        case _:
            return None


def _required(values: dict[str, float], name: str) -> float:
    if name not in values:
        raise ResultsError(f"the run's {name} was not measured: do not change the table's evaluation.measures")
    return values[name]


def _from_models(
    measure: Measure, spec: RunSpec, folder: Path, machine: ComputeSettings, kept: _Kept, report: _Report
) -> float:
    report(None)
    match measure.kind:
        case "client_metric":
            return last_client_metric(folder, _metric_of(measure))
        case "server_metric":
            return last_server_metric(folder, _metric_of(measure))
        case _ if measure.kind in _TUNINGS:
            return _tuned(measure, spec, folder, machine, kept, report)
    test, device = _labelled(spec, machine).test, machine.device
    match measure.kind:
        case "inter_class_angle":
            return mean_inter_class_angle(folder, spec, test, device)
        case "local_global_angle":
            return mean_local_global_angle(folder, client_models(folder), spec, test, measure.label, device)
        case "representation_norm" | "embedding_norm":
            return mean_norm(folder, spec, test, device, projected=measure.kind == "embedding_norm")
        case "embedding_uniformity":
            return embedding_uniformity(folder, spec, test, device)
        case "classifier":
            models = client_models(folder) if spec.method.sends_nothing else [folder / MODEL]
            return 100 * classifier_accuracy(models, spec, test, device)
        case _:
            raise AssertionError(f"{measure.kind} is measured during a run")


def _metric_of(measure: Measure) -> str:
    assert measure.metric is not None, "a metric of the training names itself"
    return measure.metric


def _tuned(
    measure: Measure, spec: RunSpec, folder: Path, machine: ComputeSettings, kept: _Kept, report: _Report
) -> float:
    """Return the accuracy in percent after fine-tuning, as a mean over the run's encoders, each of which is stored."""
    labelled = _labelled(spec, machine)
    settings = dataclasses.replace(settings_of(measure), seed=spec.seed)
    share = measure.share or 1.0
    few, paths = _held_out(spec, share, machine), encoders(folder)

    def tune(at: int) -> float:
        common: Any = {
            "settings": settings,
            "device": machine.device,
            "on_progress": lambda done: report((at + done) / len(paths)),
        }
        encoder = load_encoder(load_tensors(paths[at]), spec)
        if few is not None:
            tuned = fine_tune(encoder, few, labelled.test, spec.data, **common)
        else:
            tuned = semi_supervised(encoder, labelled.train, labelled.test, spec.data, share, **common)
        return 100 * (tuned.best_accuracy if measure.use == "best" else tuned.accuracy)

    if len(paths) == 1:
        return tune(0)
    key = _key(measure, spec)
    accuracies = [kept.value(f"{key} {path.name}", functools.partial(tune, at)) for at, path in enumerate(paths)]
    return sum(accuracies) / len(accuracies)


def _held_out(spec: RunSpec, share: float, machine: ComputeSettings) -> ImageData | None:
    """Return the labelled images of a fine-tuning, which no client had, or None if the run held out too few.

    If `evaluation.max_train` limits the N training images, the same share of that number is labelled.
    """
    partition, config = spec.partition, spec.central_evaluation
    if partition is None or config is None or partition.dataset != config.dataset or partition.hold_out < share:
        return None
    train = _labelled(spec, machine, every_train=True).train
    labels = labels_of(train).numpy()
    share *= min(1.0, (config.max_train or len(labels)) / len(labels))
    return train.subset(held_out_images(partition, labels, share, train.groups))


def _labelled(spec: RunSpec, machine: ComputeSettings, *, every_train: bool = False) -> Labelled:
    config = spec.central_evaluation
    assert config is not None, "every cell has an evaluation"
    return load_labelled(
        config.dataset,
        spec.data,
        max_train=None if every_train else config.max_train,
        max_test=config.max_test,
        seed=spec.seed,
        root=machine.data_root,
    )


def _key(measure: Measure, spec: RunSpec) -> str:
    """Return a digest of everything that determines the measure of a given run."""
    config = spec.central_evaluation
    limits = None if config is None else [config.dataset, config.max_train, config.max_test]
    settings = dataclasses.asdict(settings_of(measure)) if measure.kind in _TUNINGS else None
    text = json.dumps([measure.model_dump(mode="json"), settings, limits], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
