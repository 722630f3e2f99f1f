"""The largest scale at which some cells of a table fit into a time budget."""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fedssl.data.catalogue import KNOWN
from fedssl.errors import ResultsError, SpecError
from fedssl.experiments import calibration
from fedssl.experiments.costs import num_images, passes, server_images, trained_images
from fedssl.experiments.measures import tuning_passes
from fedssl.experiments.overlays import changed
from fedssl.experiments.papers import TableCell
from fedssl.experiments.pilot import Pilot
from fedssl.experiments.scaling import MIN_ROUNDS, NARROWER, Scale, scaled
from fedssl.protocol.model import EncoderConfig
from fedssl.protocol.runs import RunSpec
from fedssl.run_files import read_json, write_json

FEWEST_IMAGES, FEWEST_A_CLIENT = 5000, 100
"""Fewer images, in total or per client, are used only if everything else is already as small as possible."""

LEAST_TRAINED = 50_000
"""Images, counted as often as they are trained on. On CIFAR-10, encoders that trained on 20,000 stayed at the level of
the untrained one, and those that trained on 64,000 were 10 points above it in the linear probe (log of 2026-11-25)."""

_EPOCHS = (1.0, 0.5, 0.2, 0.1, 0.05, 0.01)
_SLACK = 0.85  # the share of the budget that is planned; the rest is for other work and for what is not estimated
_SLACK_MEASURED = 0.92  # the same share, once the real work was measured
_LEAST_USED = 0.8  # a plan that uses less than this share of the remaining time is enlarged
_MOST_PILOTS = 3
_CONFIRMED = 0.1  # a second pilot that differs less from the first one confirms it
_MOST_MEASURING = 0.15  # no further pilot once the measurements took this share of the budget
_PILOT_SHARE = 0.06  # share of the budget: a pilot ends after the first round that ends later than this
_JUDGING = 0.2  # the largest share of the planned time for evaluations
_MOST_EVALUATIONS = 5
_NUM_TEST = 10_000
_SOMETHING = 20  # the smallest average number of images per client


@dataclass(frozen=True, slots=True)
class Fit:
    """A plan that fits: the scale, the remaining seeds, and the estimated seconds for all of it.

    `calibration` is how the estimate was corrected by the first rounds of the real runs; None if it was not.
    """

    scale: Scale
    seeds: tuple[int, ...]
    seconds: float
    calibration: "Calibration | None" = None


@dataclass(frozen=True, slots=True)
class Calibration:
    """The measurements before a plan was made.

    Attributes:
        budget: the seconds that were promised, from the start of the measurements to the last result.
        measuring: the seconds that the measurements took, which are part of the budget.
        num_pilots: how often the first rounds of all cells were run.
        training, judging: the real times, as multiples of the first estimates.
        loading: seconds before the first rounds of all cells.
    """

    budget: float
    measuring: float
    num_pilots: int
    training: float
    judging: float
    loading: float


def kept_fit(path: Path, make: Callable[[], Fit]) -> Fit:
    """Return the fit that is stored in a file; if there is no file, make a fit and store it there.

    Measured speeds vary, and a run can continue only at the scale at which it began. Raises ResultsError if the file is
    damaged.
    """
    document = read_json(path)
    if document is None:
        fitted = make()
        path.parent.mkdir(parents=True, exist_ok=True)
        values = dataclasses.asdict(fitted)
        encoder = fitted.scale.encoder
        values["scale"]["encoder"] = None if encoder is None else encoder.model_dump(mode="json")
        write_json(path, values)
        return fitted
    try:
        scale = dict(document["scale"])
        encoder = scale.pop("encoder")
        narrower = None if encoder is None else EncoderConfig.model_validate(encoder)
        measured = document.get("calibration")
        calibration = None if measured is None else Calibration(**measured)
        return Fit(Scale(encoder=narrower, **scale), tuple(document["seeds"]), document["seconds"], calibration)
    except (KeyError, TypeError, ValueError) as error:
        raise ResultsError(f"{path} is not a plan ({error!r}): remove it, or start again with --restart") from error


@dataclass(slots=True)
class Speeds:
    """This machine's speeds, each measured once per method, encoder, image size and precision.

    The batch size, which only the scale of a budget changes, is that of the first spec: a pilot corrects the rest.
    `num_processes`: how many processes can train clients at the same time without slowing each other down.
    """

    device: str = "cpu"
    num_processes: int = 1
    on_measuring: Callable[[str], None] = lambda what: None
    _training: dict[object, float] = field(default_factory=dict)
    _judging: dict[object, float] = field(default_factory=dict)

    def training(self, spec: RunSpec) -> float:
        """Return images per second of local training."""
        method = spec.method
        is_eager = self.device != "cpu" and spec.training.gpu_steps == "eager"
        kind = (spec.model, spec.data.image_size, spec.training.precision, is_eager)
        key = (method.name, *(add_on.name for add_on in method.add_ons), *kind)
        if key not in self._training:
            self.on_measuring(f"how fast {method.name} trains {_called(spec.model.encoder)}")
            self._training[key] = calibration.training_speed(spec, self.device)
        return self._training[key]

    def judging(self, spec: RunSpec) -> float:
        """Return the seconds that one evaluation of an encoder takes."""
        config = spec.central_evaluation
        assert config is not None, "every cell has an evaluation"
        known = KNOWN.get(config.dataset)
        num_classes = 10 if known is None else known.num_classes
        key = (spec.model.encoder, spec.data.image_size, num_classes)
        if key not in self._judging:
            self.on_measuring(f"how long the evaluation of {_called(spec.model.encoder)} takes")
            labelled = calibration.noise(spec, config.max_train or _NUM_TEST, _NUM_TEST, num_classes)
            self._judging[key] = calibration.judging_seconds(spec, labelled, self.device)
        return self._judging[key]


@dataclass(slots=True)
class Corrected(Speeds):
    """The speeds of another measurement, corrected by how long the real work took: multiples of the estimated times."""

    estimated: Speeds = field(default_factory=Speeds)
    training_factor: float = 1.0
    judging_factor: float = 1.0

    def training(self, spec: RunSpec) -> float:
        """Return images per second of local training."""
        return self.estimated.training(spec) / self.training_factor

    def judging(self, spec: RunSpec) -> float:
        """Return the seconds that one evaluation of an encoder takes."""
        return self.estimated.judging(spec) * self.judging_factor


Adapt = Callable[[TableCell, RunSpec], RunSpec]
"""Returns the scaled spec of a cell in the form in which it is run."""

RunPilot = Callable[[TableCell, RunSpec, float], Pilot]
"""Runs the first rounds of a cell at a scale, for not much longer than the given seconds, and returns their times."""


def _as_scaled(cell: TableCell, spec: RunSpec) -> RunSpec:
    return spec


def calibrated_fit(
    cells: Sequence[TableCell],
    budget_seconds: float,
    seeds: Sequence[int],
    speeds: Speeds,
    pilot: RunPilot,
    adapt: Adapt = _as_scaled,
    clock: Callable[[], float] = time.monotonic,
) -> Fit:
    """Choose a scale as :func:`fit` does, and correct the choice by the first rounds of the real runs.

    The budget begins with this call, and includes the measurements. The plan uses between 80 and 100 % of the remaining
    time, if its cells are large enough. Raises SpecError if not even the smallest scale fits.
    """
    started = clock()
    found = fit(cells, budget_seconds, seeds, speeds, adapt)
    training = judging = 1.0
    for number in range(1, _MOST_PILOTS + 1):
        specs = [adapt(cell, scaled(cell, found.scale, speeds.device)) for cell in cells]
        longest = _PILOT_SHARE * budget_seconds / len(cells)
        pilots = [pilot(cell, spec, longest) for cell, spec in zip(cells, specs, strict=True)]
        parts = [_parts(*each, speeds) for each in zip(cells, specs, pilots, strict=True)]
        real, loading = sum(each.real for each in parts), sum(each.loading for each in parts)
        before, training, judging = training, _factor(parts, "training"), _factor(parts, "judging")
        left = budget_seconds - (clock() - started)
        calibration = Calibration(budget_seconds, budget_seconds - left, number, training, judging, loading)
        measured = Fit(found.scale, found.seeds, len(found.seeds) * real, calibration)
        if _LEAST_USED * left <= measured.seconds <= left:
            return measured
        better = Corrected(
            speeds.device, speeds.num_processes, estimated=speeds, training_factor=training, judging_factor=judging
        )
        again = fit(cells, left, seeds, better, adapt, slack=_SLACK_MEASURED, fixed_seconds=loading)
        if again.scale == found.scale and again.seeds == found.seeds:
            return measured
        confirmed = abs(training / before - 1) < _CONFIRMED or budget_seconds - left > _MOST_MEASURING * budget_seconds
        is_measured = again.scale.encoder == found.scale.encoder  # another encoder's times are not known yet
        found = replace(again, calibration=calibration)
        if confirmed and is_measured:
            return found
    return found


@dataclass(frozen=True, slots=True)
class _Parts:
    """Seconds of one seed's run of a cell: as measured, and the measured and the estimated part of each kind."""

    real: float
    loading: float
    training: tuple[float, float]
    judging: tuple[float, float]


def _parts(cell: TableCell, spec: RunSpec, pilot: Pilot, speeds: Speeds) -> _Parts:
    tuning = _tuning_seconds(cell, spec, speeds)
    estimated = max(training_seconds(cell, spec, speeds) - tuning, 1e-9)
    training = spec.num_rounds * pilot.round
    due = num_evaluations(spec)
    judging = num_encoders(spec) * speeds.judging(spec)
    judged = pilot.judging or judging  # a run that is evaluated only at its end has no evaluation in its pilot
    real = pilot.loading + training + tuning * training / estimated + due * judged
    return _Parts(real, pilot.loading, (training, estimated), (due * pilot.judging, due * judging))


def _factor(parts: Sequence[_Parts], kind: str) -> float:
    """Return the real time as a multiple of the estimate; 1 if there is nothing to compare."""
    real, estimated = (sum(getattr(each, kind)[at] for each in parts) for at in (0, 1))
    return real / estimated if real > 0 and estimated > 0 else 1.0


def learns_little(cells: Sequence[TableCell], scale: Scale) -> list[str]:
    """Return the names of the cells that train on fewer images at this scale than `LEAST_TRAINED`, repetitions counted.

    Cells that do not train, and those whose data set has an unknown size, are left out.
    """
    trained = {cell.name: trained_images(scaled(cell, scale), cell.public_client) for cell in cells}
    return [name for name, images in trained.items() if images and images < LEAST_TRAINED]


def num_evaluations(spec: RunSpec) -> int:
    """Return how often a run's encoder is evaluated, including before training."""
    assert spec.central_evaluation is not None, "every cell has an evaluation"
    return sum(spec.central_evaluation.is_due(number, spec.num_rounds) for number in range(spec.num_rounds + 1))


def training_seconds(cell: TableCell, spec: RunSpec, speeds: Speeds) -> float:
    """Return the seconds that one run of a cell at a scale takes for training and fine-tuning, without evaluations.

    Returns infinity if the size of the data set is unknown.
    """
    trained = trained_images(spec, cell.public_client)
    if trained is None:
        return math.inf
    at_once = min(speeds.num_processes, _clients_per_round(cell, spec))
    images = trained / at_once + server_images(spec)
    return images / max(speeds.training(spec), 1e-9) + _tuning_seconds(cell, spec, speeds)


def _tuning_seconds(cell: TableCell, spec: RunSpec, speeds: Speeds) -> float:
    """Return the seconds of a cell's fine-tunings. Their steps are eager and in float32, unlike those of training."""
    images = num_encoders(spec) * tuning_passes(cell, spec) / passes(spec.method).units
    if images == 0:
        return 0.0
    exact = changed(spec, {"training": {"precision": "fp32", "gpu_steps": "eager"}})
    return images / max(speeds.training(exact), 1e-9)


def _clients_per_round(cell: TableCell, spec: RunSpec) -> int:
    partition = spec.partition
    if partition is None or partition.pooled:
        return 1
    clients = spec.cohort.clients
    held = partition.num_clients - (cell.public_client is not None)
    return spec.cohort.num_wanted(max(1, held if clients is None else len(clients)))


def num_encoders(spec: RunSpec) -> int:
    """Return the number of encoders that are evaluated: one, or one per client if clients send nothing."""
    alone = spec.method.merge.name == "local" and spec.partition is not None
    return spec.partition.num_clients if alone and spec.partition is not None else 1


def fit(
    cells: Sequence[TableCell],
    budget_seconds: float,
    seeds: Sequence[int],
    speeds: Speeds,
    adapt: Adapt = _as_scaled,
    *,
    slack: float = _SLACK,
    fixed_seconds: float = 0.0,
) -> Fit:
    """Choose one scale for all cells, so that they can be compared.

    First the number of images is reduced, then the encoder's width, then epochs, and finally seeds. Raises SpecError if
    not even the smallest scale fits. `slack` is the share of the budget that is planned; `fixed_seconds` are needed per
    seed at any scale.
    """
    if unknown := [cell.name for cell in cells if num_images(adapt(cell, cell.spec)) is None]:
        raise SpecError(f"the size of the data set of {unknown[0]} is unknown: run it without a budget")

    def at(cell: TableCell, scale: Scale) -> RunSpec:
        return adapt(cell, scaled(cell, scale, speeds.device))

    tries = (
        (count, epochs, encoder) for count in range(len(seeds), 0, -1) for epochs in _EPOCHS for encoder in _ENCODERS
    )
    for count, epochs, encoder in tries:
        start = Scale(encoder=encoder, epochs=epochs, rounds=_rounds(cells))
        share = budget_seconds / count - fixed_seconds / slack
        if (found := _largest(cells, start, share, speeds, slack, at)) is not None:
            return Fit(found[0], tuple(seeds[:count]), count * (found[1] + fixed_seconds))
    smallest = Scale(encoder=NARROWER[-1], epochs=_EPOCHS[-1], rounds=_rounds(cells), num_evaluations=1)
    shrunk = [replace(smallest, images=images) for images in (0.05, 0.02, 0.01)]
    for scale in shrunk:
        if (seconds := _seconds(cells, scale, speeds, at) + fixed_seconds) <= budget_seconds:
            return Fit(scale, tuple(seeds[:1]), seconds)
    needed = _seconds(cells, shrunk[-1], speeds, at) + fixed_seconds
    raise SpecError(f"the budget is too small: at least {needed:.0f} seconds are needed for {len(cells)} cells")


_ENCODERS: tuple[EncoderConfig | None, ...] = (None, *NARROWER)
_At = Callable[[TableCell, Scale], RunSpec]


def _largest(
    cells: Sequence[TableCell], start: Scale, budget: float, speeds: Speeds, slack: float, at: _At
) -> tuple[Scale, float] | None:
    """Return the scale with the most images that one seed's budget allows, and its seconds, or None if too few fit."""
    seconds = slack * budget
    least = _fewest(cells)
    specs = [(cell, at(cell, replace(start, images=least))) for cell in cells]
    total = 0.0
    for cell, spec in specs:  # stop early, so as not to measure every method at a scale that cannot fit
        total += training_seconds(cell, spec, speeds)
        if total > seconds:
            return None
    judging = sum(num_encoders(spec) * speeds.judging(spec) for _, spec in specs)
    most = min(_MOST_EVALUATIONS, int(_JUDGING * seconds / max(judging, 1e-9)) - 1)
    start = replace(start, num_evaluations=most)
    if most < 1 or _seconds(cells, replace(start, images=least), speeds, at) > seconds:
        return None
    if _seconds(cells, start, speeds, at) <= seconds:
        best = _more_rounds(cells, start, seconds, speeds, at)
        return best, _seconds(cells, best, speeds, at)
    low, high = least, 1.0
    while high - low > 0.02 * high:
        middle = (low + high) / 2
        fits = _seconds(cells, replace(start, images=middle), speeds, at) <= seconds
        low, high = (middle, high) if fits else (low, middle)
    best = replace(start, images=low)
    return best, _seconds(cells, best, speeds, at)


def _more_rounds(cells: Sequence[TableCell], scale: Scale, seconds: float, speeds: Speeds, at: _At) -> Scale:
    """Return the scale with as many of the paper's rounds as fit, given that all images fit."""
    shares = [share for share in (1.0, 0.75, 0.5, 0.35) if share > scale.rounds]
    candidates = [replace(scale, rounds=share) for share in shares]
    return next((each for each in candidates if _seconds(cells, each, speeds, at) <= seconds), scale)


def _rounds(cells: Sequence[TableCell]) -> float:
    """Return the share of the rounds that leaves at least 20 in every cell that has more than 20."""
    many = [cell.spec.num_rounds for cell in cells if cell.spec.num_rounds > MIN_ROUNDS]
    return MIN_ROUNDS / min(many) if many else 1.0


def _fewest(cells: Sequence[TableCell]) -> float:
    """Return the smallest share of the images: enough in the largest cell, and some per client in every cell."""
    enough, something = [], []
    for cell in cells:
        held, partition = num_images(cell.spec), cell.spec.partition
        assert held is not None, "only called for known data sets"
        clients = 1 if partition is None or partition.pooled else partition.num_clients
        enough.append(max(FEWEST_IMAGES, FEWEST_A_CLIENT * clients) / held)
        something.append(_SOMETHING * clients / held)
    return min(1.0, max(min(enough), *something))


def _seconds(cells: Sequence[TableCell], scale: Scale, speeds: Speeds, at: _At) -> float:
    """Return the seconds that all cells take at a scale, for one seed."""
    total = 0.0
    for cell in cells:
        spec = at(cell, scale)
        judging = num_evaluations(spec) * num_encoders(spec) * speeds.judging(spec)
        total += training_seconds(cell, spec, speeds) + judging
    return total


def _called(encoder: EncoderConfig) -> str:
    return encoder.name if encoder.name != "convnet" else f"a ConvNet {'-'.join(map(str, encoder.widths))}"
