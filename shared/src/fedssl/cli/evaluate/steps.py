"""The steps of an evaluation, with what is being done on standard error."""

import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from fedssl.cli.errors import UsageError
from fedssl.cli.output import console, note
from fedssl.errors import NotFinite

if TYPE_CHECKING:
    from fedssl.cli.evaluate.command import Request
    from fedssl.cli.evaluate.models import Model
    from fedssl.evaluation import Angles, FineTuneResult, ProbeResult, TransferResult
    from fedssl.judging import Labelled

Tell = Callable[[str, float | None], None]
_SECONDS_BETWEEN_LINES = 15.0
_MAP_NAMES = {"tsne": "t-SNE", "pca": "PCA"}


@dataclass(slots=True)
class Findings:
    """What an evaluation found. `width`: H of the representations; `semi`: by the share of labels."""

    request: "Request"
    num_labels: int
    num_test: int
    width: int
    results: dict[str, float] = field(default_factory=dict)
    probe: "ProbeResult | None" = None
    semi: "dict[float, FineTuneResult]" = field(default_factory=dict)
    transfer: "TransferResult | None" = None
    angles: "Angles | None" = None


def carry_out(request: "Request", model: "Model", root: Path | None) -> Findings:
    """Everything that was asked for, in the order of the help.

    Raises:
        UsageError: the file does not hold what is needed.
        DataError: the images cannot be read, or have no labels.
        NotFinite: the encoder's training diverged.
    """
    from fedssl.data import choose_images
    from fedssl.judging import Labelled, load_labelled

    spec = model.spec
    with steps() as tell:
        tell(f"reading {request.data}", None)
        everything = load_labelled(
            request.data, spec.data, max_train=None, max_test=request.num_test, seed=spec.seed, root=root
        )
        chosen = choose_images(len(everything.train), request.num_labels, spec.seed)
        labelled = Labelled(everything.train.subset(chosen), everything.test)
        findings = Findings(request, len(labelled.train), len(labelled.test), spec.model.encoder.feature_dim)
        if request.measures:
            findings.results, findings.probe = _measure(request, model, labelled, tell)
        for share in request.semi:
            findings.semi[share] = _tune(request, model, everything, share, tell)
        if request.transfer is not None:
            findings.transfer = _transfer(request, model, request.transfer, root, tell)
        if request.angles is not None:
            findings.angles = _angles(request, model, request.angles, labelled, tell)
        if request.map is not None:
            _draw(request, model, request.map, labelled, tell)
    return findings


def _measure(
    request: "Request", model: "Model", images: "Labelled", tell: Tell
) -> "tuple[dict[str, float], ProbeResult | None]":
    from fedssl.judging import examine

    judged = examine(model.encoder(), images, request.config, model.spec.data, device=request.device, on_progress=tell)
    if not all(math.isfinite(value) for value in judged.results.values()):
        raise _diverged(model)
    return judged.results, judged.probe


def _tune(request: "Request", model: "Model", images: "Labelled", share: float, tell: Tell) -> "FineTuneResult":
    from fedssl.evaluation import FINE_TUNINGS, semi_supervised

    settings = dataclasses.replace(FINE_TUNINGS[request.tuning], seed=model.spec.seed)
    return semi_supervised(
        model.encoder(), images.train, images.test, model.spec.data, share, settings=settings, device=request.device,
        on_progress=lambda done: tell(f"fine-tuning with {100 * share:g} % of the labels", done),
    )  # fmt: skip


def _transfer(request: "Request", model: "Model", name: str, root: Path | None, tell: Tell) -> "TransferResult":
    from fedssl.evaluation import PROBES, TRANSFERS, transfer
    from fedssl.judging import load_labelled

    tell(f"reading {name}", None)
    limits = {"max_train": request.num_labels, "max_test": request.num_test}
    images = load_labelled(name, model.spec.data, **limits, seed=model.spec.seed, root=root)
    return transfer(
        model.encoder(), images.train, images.test, model.spec.data, probe=PROBES[request.settings],
        tuning=TRANSFERS.get(request.settings), device=request.device,
        on_progress=lambda what, done: tell(f"{what} on {name}", done),
    )  # fmt: skip


def _angles(request: "Request", model: "Model", path: Path, images: "Labelled", tell: Tell) -> "Angles":
    from fedssl.cli.evaluate.models import read_other
    from fedssl.evaluation import compare_embeddings, extract_features, labels_of

    tell("embeddings under both models", None)
    other = read_other(path, model)
    if other.spec.data != model.spec.data:
        raise UsageError(
            f"{model.path} and {path} are of runs whose [data] differs: their embeddings cannot be compared"
        )
    networks = [each.projected().to(request.device) for each in (model, other)]
    local, whole = (extract_features(each, images.test, model.spec.data, request.device) for each in networks)
    if local.shape != whole.shape:
        raise UsageError(f"{model.path} has embeddings of {local.shape[1]} dimensions, {path} of {whole.shape[1]}")
    return compare_embeddings(local, whole, labels_of(images.test))


def _draw(request: "Request", model: "Model", path: Path, images: "Labelled", tell: Tell) -> None:
    from fedssl.data import choose_images
    from fedssl.evaluation import extract_features, labels_of, plot_map, project

    name = _MAP_NAMES[request.map_method]
    tell(f"map by {name}", None)
    shown = images.test.subset(choose_images(len(images.test), request.num_mapped, model.spec.seed))
    features = extract_features(model.encoder().to(request.device), shown, model.spec.data, request.device)
    if not bool(features.isfinite().all()):
        raise _diverged(model)
    points = project(features, request.map_method, seed=model.spec.seed % 2**32)
    title = f"{request.data}: {len(shown):,} test images under {model.path.name}, {name}"
    plot_map(path, points, labels_of(shown).numpy(), shown.class_names, title)


def _diverged(model: "Model") -> NotFinite:
    return NotFinite(f"{model.path}: the encoder's representations are not finite: its training diverged")


@contextmanager
def steps() -> Iterator[Tell]:
    """What shows the step in progress: a bar on a terminal; where output is piped, a line for each step."""
    screen = console(stderr=True)
    if not screen.is_terminal:
        yield _lines()
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=screen, transient=True) as progress:
        task = progress.add_task("", total=None)
        current = [""]

        def tell(what: str, share: float | None) -> None:
            if what != current[0]:
                current[0] = what
                progress.reset(task, description=what, total=None)
            progress.update(task, completed=share or 0, total=None if share is None else 1)

        yield tell


def _lines() -> Tell:
    current, last = "", time.monotonic()

    def tell(what: str, share: float | None) -> None:
        nonlocal current, last
        now = time.monotonic()
        if what == current and now - last < _SECONDS_BETWEEN_LINES:
            return
        note(what if what != current or share is None else f"{what}: {100 * share:.0f} %")
        current, last = what, now

    return tell
