"""The picture of a comparison: accuracy by round and by traffic, one line per method with its deviation over seeds."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedssl.experiments.runs import FinishedRun
from fedssl.experiments.variants import has_traffic

# Okabe and Ito's colours, which colour-blind readers can tell apart too; line styles and markers also work in grey.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C8C8C")
_STYLES = ("-", "--", "-.", ":")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_INK, _LINE = "#333333", "#E5E5E5"
_NAMES = {"probe": "linear probe", "knn": "kNN"}


@dataclass(frozen=True, slots=True)
class Curve:
    """One method's accuracy in percent at each evaluated round, mean and deviation over seeds, and traffic so far."""

    rounds: list[int]
    megabytes: list[float]
    mean: list[float]
    deviation: list[float]


def plot_comparison(path: Path, finished: Mapping[str, Sequence[FinishedRun]], measure: str = "probe") -> None:
    """Write a PNG of the finished runs of each variant, by name.

    The left side shows accuracy against the round, with a band of one standard deviation if there are several seeds.
    The right side shows it against the bytes that all clients sent and received until then, without the baseline whose
    images are in one place. Only rounds that were evaluated for every seed are shown. The picture depends only on the
    arguments.
    """
    curves = {name: curve_of(runs, measure) for name, runs in finished.items() if runs}
    curves = {name: curve for name, curve in curves.items() if curve.rounds}
    figure = Figure(figsize=(11, 4.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True)
    most = max((curve.megabytes[-1] for name, curve in curves.items() if has_traffic(name)), default=0.0)
    unit, size = ("gigabytes", 1e3) if most >= 1e3 else ("megabytes", 1.0)
    for number, (name, curve) in enumerate(curves.items()):
        _draw(left, curve.rounds, curve, number, name, len(curves))
        if has_traffic(name):
            _draw(right, [sent / size for sent in curve.megabytes], curve, number, name, len(curves))
    _finish(left, "Accuracy by round", "round")
    _finish(right, "Accuracy by traffic", f"{unit} that all clients sent and received")
    left.xaxis.set_major_locator(MaxNLocator(integer=True))
    left.set_ylabel(f"{_NAMES.get(measure, measure)}, % of the test set", color=_INK)
    if curves:
        figure.legend(
            *left.get_legend_handles_labels(), loc="outside lower center", ncols=min(len(curves), 5), frameon=False,
            labelcolor=_INK,
        )  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", metadata={"Software": None})


def curve_of(runs: Sequence[FinishedRun], measure: str) -> Curve:
    """Return the curve over the rounds that were evaluated for every seed; an encoder that diverged has no accuracy."""
    judged = [
        {at for at, values in run.evaluations.items() if math.isfinite(values.get(measure, math.nan))} for run in runs
    ]
    rounds = sorted(set.intersection(*judged)) if judged else []
    values = [[100 * run.evaluations[at][measure] for run in runs] for at in rounds]
    return Curve(
        rounds=rounds,
        megabytes=[statistics.fmean(run.megabytes_by_round[at] for run in runs) for at in rounds],
        mean=[statistics.fmean(each) for each in values],
        deviation=[statistics.stdev(each) if len(each) > 1 else 0.0 for each in values],
    )


def _draw(axes: Any, places: Sequence[float], curve: Curve, number: int, name: str, num_curves: int) -> None:
    colour = _COLOURS[number % len(_COLOURS)]
    style = _STYLES[number // len(_COLOURS) % len(_STYLES)]
    axes.plot(
        places, curve.mean, color=colour, linestyle=style, linewidth=2, label=name,
        marker=_MARKERS[number % len(_MARKERS)], markersize=5, markeredgecolor="white", markeredgewidth=0.6,
    )  # fmt: skip
    if any(curve.deviation):
        lower, upper = ([m + sign * d for m, d in zip(curve.mean, curve.deviation, strict=True)] for sign in (-1, 1))
        faint = 0.15 if num_curves <= 4 else 0.07  # many bands overlap
        axes.fill_between(places, lower, upper, color=colour, alpha=faint, linewidth=0)


def _finish(axes: Any, title: str, label: str) -> None:
    axes.set_title(title, loc="left", color=_INK, fontweight="bold")
    axes.set_xlabel(label, color=_INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=_INK, length=3)
    axes.grid(axis="y", color=_LINE, linewidth=0.8)
    axes.set_axisbelow(True)
