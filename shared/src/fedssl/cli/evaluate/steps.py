"""The steps of an evaluation, with their progress on standard error."""

import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path

from fedssl.cli.accuracies import ACCURACIES
from fedssl.cli.errors import UsageError
from fedssl.cli.evaluate.models import Model, read_other
from fedssl.cli.step_progress import Report, step_progress
from fedssl.data import choose_images
from fedssl.errors import NotFinite
from fedssl.evaluation import (
    FINE_TUNINGS,
    PROBES,
    TRANSFERS,
    Angles,
    FineTuneResult,
    ProbeResult,
    TransferResult,
    compare_embeddings,
    extract_features,
    labels_of,
    plot_map,
    project,
    semi_supervised,
    transfer,
)
from fedssl.evaluation.suite import Labelled, detailed_evaluation, evaluate_encoder, load_labelled
from fedssl.protocol.chance import Chance, chance_of
from fedssl.protocol.evaluation import EvaluationConfig, MapMethod, Measure, Settings
from fedssl.protocol.initial import InitialConfig

_MAP_NAMES = {"tsne": "t-SNE", "pca": "PCA"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The evaluation to run.

    If `num_labels` or `num_test` is None, all images are used. `semi` lists shares of the labels, 0..1.
    """

    model: Path
    data: str
    settings: Settings
    measures: tuple[Measure, ...]
    num_labels: int | None
    num_test: int | None
    semi: tuple[float, ...]
    tuning: str
    transfer: str | None
    angles: Path | None
    baselines: bool
    map: Path | None
    map_method: MapMethod
    num_mapped: int
    device: str

    @property
    def config(self) -> EvaluationConfig:
        """The measures as a run's spec has them; there must be at least one."""
        return EvaluationConfig.model_validate(
            {"dataset": self.data, "measures": self.measures, "settings": self.settings}
        )


@dataclass(slots=True)
class Findings:
    """The results of an evaluation.

    `width`: H of the representations; `semi`: by the share of labels; `untrained`: the accuracies of an untrained
    encoder; `chance`: that of a classifier without an encoder. `initial`: the weights that the encoder started from,
    if these were not random.
    """

    request: Request
    num_labels: int
    num_test: int
    width: int
    results: dict[str, float] = field(default_factory=dict)
    probe: ProbeResult | None = None
    semi: dict[float, FineTuneResult] = field(default_factory=dict)
    transfer: TransferResult | None = None
    angles: Angles | None = None
    untrained: dict[str, float] = field(default_factory=dict)
    chance: Chance | None = None
    initial: InitialConfig | None = None


def carry_out(request: Request, model: Model, root: Path | None) -> Findings:
    """Evaluate all that was requested, in the order of the help.

    Raises:
        UsageError: if the file lacks what is needed.
        DataError: if the images cannot be read, or have no labels.
        NotFinite: if the encoder's training diverged.
    """
    spec = model.spec
    with step_progress() as report:
        report(f"reading {request.data}", None)
        everything = load_labelled(
            request.data, spec.data, max_train=None, max_test=request.num_test, seed=spec.seed, root=root
        )
        chosen = choose_images(len(everything.train), request.num_labels, spec.seed)
        labelled = Labelled(everything.train.subset(chosen), everything.test)
        findings = Findings(request, len(labelled.train), len(labelled.test), spec.model.encoder.feature_dim)
        findings.initial = spec.model.initial
        if request.measures:
            findings.results, findings.probe = _measure(request, model, labelled, report)
            findings.chance = chance_of(labels_of(labelled.test).tolist())
        if request.baselines and (accuracies := tuple(name for name in request.measures if name in ACCURACIES)):
            findings.untrained = _measure_untrained(request, model, accuracies, labelled, report)
        for share in request.semi:
            findings.semi[share] = _tune(request, model, everything, share, report)
        if request.transfer is not None:
            findings.transfer = _transfer(request, model, request.transfer, root, report)
        if request.angles is not None:
            findings.angles = _angles(request, model, request.angles, labelled, report)
        if request.map is not None:
            _draw(request, model, request.map, labelled, report)
    return findings


def _measure(
    request: Request, model: Model, images: Labelled, report: Report
) -> tuple[dict[str, float], ProbeResult | None]:
    found = detailed_evaluation(
        model.encoder(), images, request.config, model.spec.data, device=request.device, on_progress=report
    )
    if not any(math.isfinite(value) for value in found.results.values()):  # a single image has no uniformity
        raise _diverged(model)
    return found.results, found.probe


def _measure_untrained(
    request: Request, model: Model, measures: tuple[Measure, ...], images: Labelled, report: Report
) -> dict[str, float]:
    """Return the accuracies of the encoder before training, by the same settings."""

    def on_progress(what: str, share: float | None) -> None:
        report(f"untrained: {what}", share)

    if (encoder := model.untrained()) is None:
        return {}
    config = request.config.model_copy(update={"measures": measures})
    return evaluate_encoder(encoder, images, config, model.spec.data, device=request.device, on_progress=on_progress)


def _tune(request: Request, model: Model, images: Labelled, share: float, report: Report) -> FineTuneResult:
    settings = dataclasses.replace(FINE_TUNINGS[request.tuning], seed=model.spec.seed)
    return semi_supervised(
        model.encoder(), images.train, images.test, model.spec.data, share, settings=settings, device=request.device,
        on_progress=lambda done: report(f"fine-tuning with {100 * share:g} % of the labels", done),
    )  # fmt: skip


def _transfer(request: Request, model: Model, name: str, root: Path | None, report: Report) -> TransferResult:
    report(f"reading {name}", None)
    limits = {"max_train": request.num_labels, "max_test": request.num_test}
    images = load_labelled(name, model.spec.data, **limits, seed=model.spec.seed, root=root)
    return transfer(
        model.encoder(), images.train, images.test, model.spec.data, probe=PROBES[request.settings],
        tuning=TRANSFERS.get(request.settings), device=request.device,
        on_progress=lambda what, done: report(f"{what} on {name}", done),
    )  # fmt: skip


def _angles(request: Request, model: Model, path: Path, images: Labelled, report: Report) -> Angles:
    report("computing the embeddings of both models", None)
    other = read_other(path, model)
    if other.spec.data != model.spec.data:
        raise UsageError(
            f"the embeddings of {model.path} and {path} cannot be compared: the [data] of their specs differs"
        )
    networks = [each.projected().to(request.device) for each in (model, other)]
    local, whole = (extract_features(each, images.test, model.spec.data, request.device) for each in networks)
    if local.shape != whole.shape:
        raise UsageError(f"{model.path} has embeddings of {local.shape[1]} dimensions, {path} of {whole.shape[1]}")
    return compare_embeddings(local, whole, labels_of(images.test))


def _draw(request: Request, model: Model, path: Path, images: Labelled, report: Report) -> None:
    name = _MAP_NAMES[request.map_method]
    report(f"computing the map by {name}", None)
    mapped = images.test.subset(choose_images(len(images.test), request.num_mapped, model.spec.seed))
    features = extract_features(model.encoder().to(request.device), mapped, model.spec.data, request.device)
    if not bool(features.isfinite().all()):
        raise _diverged(model)
    points = project(features, request.map_method, seed=model.spec.seed % 2**32)
    title = f"{request.data}: {len(mapped):,} test images, {model.path.name}, {name}"
    plot_map(path, points, labels_of(mapped).numpy(), mapped.class_names, title)


def _diverged(model: Model) -> NotFinite:
    return NotFinite(f"{model.path}: the encoder's representations are not finite: its training diverged")
