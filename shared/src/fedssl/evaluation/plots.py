"""The picture of a run: its losses over the rounds, and accuracies before and after training."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

Curve = Sequence[tuple[int, float]]

# Okabe and Ito's colours, which colour-blind readers can tell apart too. Blue is reserved for the most important curve.
_BLUE, _GREY, _INK = "#0072B2", "#8C8C8C", "#333333"
_CLIENT_COLOURS = ("#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#B8A500")


def plot_curves(path: Path, loss_by_client: Mapping[str, Curve], accuracies: Mapping[str, tuple[float, float]]) -> None:
    """Write a PNG: the loss of each client and their mean over the rounds, and accuracies before and after training.

    Args:
        path: where the PNG is written; missing folders are created.
        loss_by_client: for each client (round, mean loss) in the order of the rounds; rounds may be missing.
        accuracies: for each protocol its name and the accuracy before and after, as shares 0..1.

    A side without data is left out. The picture depends only on the arguments: no pyplot, no global state, no date.
    """
    sides = [side for side, data in (("loss", loss_by_client), ("accuracy", accuracies)) if data]
    figure = Figure(figsize=(6.4 if len(sides) < 2 else 11, 4.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    for axes, side in zip(figure.subplots(1, max(len(sides), 1), squeeze=False)[0], sides or ("",), strict=True):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=_INK, length=3)
        if side == "loss":
            _draw_losses(axes, loss_by_client)
        elif side == "accuracy":
            _draw_accuracies(axes, accuracies)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", metadata={"Software": None})


def mean_curve(loss_by_client: Mapping[str, Curve]) -> list[tuple[int, float]]:
    """Return for every round the mean over the clients that took part in it."""
    by_round: dict[int, list[float]] = {}
    for curve in loss_by_client.values():
        for number, loss in curve:
            by_round.setdefault(number, []).append(loss)
    return [(number, sum(losses) / len(losses)) for number, losses in sorted(by_round.items())]


def _draw_losses(axes: Any, loss_by_client: Mapping[str, Curve]) -> None:
    few = len(loss_by_client) <= len(_CLIENT_COLOURS)
    for i, (client, curve) in enumerate(loss_by_client.items()):
        colour = _CLIENT_COLOURS[i] if few else _GREY
        label = client if few else ("one client" if i == 0 else None)
        style = {"linewidth": 1.2, "alpha": 0.9 if few else 0.35, "marker": "o" if len(curve) < 2 else None}
        axes.plot(*_columns(curve), color=colour, label=label, markersize=3, **style)
    mean = mean_curve(loss_by_client)
    marker = "o" if len(mean) <= 30 else None
    axes.plot(*_columns(mean), color=_BLUE, linewidth=2.4, marker=marker, markersize=4, label="mean of the clients")
    axes.set_title("Training loss", loc="left", color=_INK, fontweight="bold")
    axes.set_xlabel("round", color=_INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", color="#E5E5E5", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.legend(frameon=False, fontsize="small", labelcolor=_INK)


def _draw_accuracies(axes: Any, accuracies: Mapping[str, tuple[float, float]]) -> None:
    """Draw one row per protocol: a hollow point before, a full one after, and a line between them."""
    for row, (before, after) in enumerate(accuracies.values()):
        left, right = 100 * before, 100 * after
        axes.plot([left, right], [row, row], color=_BLUE, linewidth=3, alpha=0.35, solid_capstyle="round", zorder=1)
        axes.scatter([left], [row], s=70, facecolor="white", edgecolor=_GREY, linewidth=2, zorder=2)
        axes.scatter([right], [row], s=80, color=_BLUE, zorder=3)
        outward = 1 if right >= left else -1
        for value, colour, weight, side in ((left, _INK, "normal", -outward), (right, _BLUE, "bold", outward)):
            axes.annotate(
                f"{value:.1f}", (value, row), xytext=(9 * side, 0), textcoords="offset points", va="center",
                ha="left" if side > 0 else "right", color=colour, fontweight=weight, fontsize="small",
            )  # fmt: skip
    values = [100 * value for pair in accuracies.values() for value in pair]
    margin = max(4.0, 0.25 * (max(values) - min(values)))
    axes.set_xlim(min(values) - margin, max(values) + margin)
    axes.set_ylim(len(accuracies) - 0.4, -0.6)
    axes.set_yticks(range(len(accuracies)), labels=list(accuracies))
    axes.set_title("Accuracy before (○) and after (●)", loc="left", color=_INK, fontweight="bold")
    axes.set_xlabel("% of the test set", color=_INK)
    axes.grid(axis="x", color="#E5E5E5", linewidth=0.8)
    axes.set_axisbelow(True)


def _columns(curve: Curve) -> tuple[list[int], list[float]]:
    return [number for number, _ in curve], [loss for _, loss in curve]
