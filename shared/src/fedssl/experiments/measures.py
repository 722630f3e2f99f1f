"""Compute the columns of a table for a finished run: accuracies in percent, anything else unscaled."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path

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
    last_client_metric,
    last_server_metric,
    mean_inter_class_angle,
    mean_local_global_angle,
    mean_norm,
)
from fedssl.experiments.papers import Measure, TableCell
from fedssl.experiments.runs import ComputeSettings, FinishedRun, client_models, encoders
from fedssl.protocol.runs import RunSpec
from fedssl.run_files import MODEL, read_json, write_json

MEASURES = "measures.json"
_TUNINGS: Mapping[str, Mapping[str, FineTuneSettings]] = {"fine_tune": FINE_TUNINGS, "transfer": TRANSFERS}
OnMeasuring = Callable[[str], None]


def measure_cell(
    cell: TableCell,
    spec: RunSpec,
    run: FinishedRun,
    folder: Path,
    machine: ComputeSettings,
    on_measuring: OnMeasuring = lambda name: None,
) -> dict[str, float]:
    """Return every measure of the cell by name. Expensive measures are stored in the run's folder and not repeated."""
    kept = read_json(folder / MEASURES) or {}
    found: dict[str, float] = {}
    for name, measure in cell.measures.items():
        if (value := _from_run(measure, run)) is not None:
            found[name] = value
            continue
        key = _key(measure, spec)
        if key not in kept:
            on_measuring(name)
            kept[key] = _from_models(measure, spec, folder, machine)
            write_json(folder / MEASURES, kept)
        found[name] = math.nan if kept[key] is None else float(kept[key])  # JSON has null instead of NaN
    return found


def tuning_images(cell: TableCell, spec: RunSpec) -> float:
    """Return the number of images that the cell's fine-tunings train on, counting repetitions."""
    total = 0.0
    for measure in cell.measures.values():
        if measure.kind in _TUNINGS and spec.central_evaluation is not None:
            name = spec.central_evaluation.dataset
            held = KNOWN[name].num_train if name in KNOWN else 50_000
            labelled = min(held, spec.central_evaluation.max_train or held) * (measure.share or 1.0)
            total += labelled * settings_of(measure).epochs
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


def _from_models(measure: Measure, spec: RunSpec, folder: Path, machine: ComputeSettings) -> float:
    match measure.kind:
        case "client_metric":
            return last_client_metric(folder, _metric_of(measure))
        case "server_metric":
            return last_server_metric(folder, _metric_of(measure))
        case _ if measure.kind in _TUNINGS:
            return _tuned(measure, spec, folder, machine)
    test, device = _labelled(spec, machine).test, machine.device
    match measure.kind:
        case "inter_class_angle":
            return mean_inter_class_angle(folder, spec, test, device)
        case "local_global_angle":
            return mean_local_global_angle(folder, client_models(folder), spec, test, measure.label, device)
        case "representation_norm" | "embedding_norm":
            return mean_norm(folder, spec, test, device, projected=measure.kind == "embedding_norm")
        case "classifier":
            models = client_models(folder) if spec.method.sends_nothing else [folder / MODEL]
            return 100 * classifier_accuracy(models, spec, test, device)
        case _:
            raise AssertionError(f"{measure.kind} is measured during a run")


def _metric_of(measure: Measure) -> str:
    assert measure.metric is not None, "a metric of the training names itself"
    return measure.metric


def _tuned(measure: Measure, spec: RunSpec, folder: Path, machine: ComputeSettings) -> float:
    """Return the accuracy in percent after fine-tuning, as a mean over the run's encoders."""
    labelled = _labelled(spec, machine)
    settings = dataclasses.replace(settings_of(measure), seed=spec.seed)
    share = measure.share or 1.0
    few = _held_out(spec, share, machine)
    accuracies = []
    for path in encoders(folder):
        encoder = load_encoder(load_tensors(path), spec)
        if few is not None:
            tuned = fine_tune(encoder, few, labelled.test, spec.data, settings=settings, device=machine.device)
        else:
            tuned = semi_supervised(
                encoder, labelled.train, labelled.test, spec.data, share, settings=settings, device=machine.device
            )
        accuracies.append(tuned.best_accuracy if measure.use == "best" else tuned.accuracy)
    return 100 * sum(accuracies) / len(accuracies)


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
