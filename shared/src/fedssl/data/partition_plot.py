"""The picture of a partition: how many images of each class each client holds."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedssl.data.partitions import effective_classes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Paul Tol's `muted` colours, which colour-blind readers can tell apart too. More classes use a colour map instead.
_COLOURS = (
    "#332288",
    "#88CCEE",
    "#44AA99",
    "#117733",
    "#999933",
    "#DDCC77",
    "#CC6677",
    "#882255",
    "#AA4499",
    "#BBBBBB",
)
_COLOUR_MAP = "viridis"
_INK, _BLUE, _GRID = "#333333", "#0072B2", "#E5E5E5"
_MANY_CLIENTS = 30  # with this many clients the bars touch, and only some are numbered
_MIN_WIDTH, _MAX_WIDTH = 6.4, 14.0


def plot_partition(
    path: Path,
    counts_KC: NDArray[np.int64],
    class_names: Sequence[str] = (),
    *,
    title: str = "",
    subtitle: str = "",
) -> None:
    """Write a PNG: for each client a bar of its images, coloured by class, and its effective number of classes.

    Args:
        path: where the PNG is written; missing folders are created.
        counts_KC: the number of images of each class (C columns) that each client (K rows) has.
        class_names: the names by number; a missing name is replaced by the number.
        title: the data set that was partitioned.
        subtitle: the parameters of the partition.

    Up to ten classes each have their own colour and name; more classes are shades of one scale, every other one
    lighter. The picture depends only on the arguments: no pyplot, no global state, no date.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    num_clients = len(counts_KC)
    width = float(np.clip(3.0 + 0.42 * num_clients, _MIN_WIDTH, _MAX_WIDTH))
    figure = Figure(figsize=(width, 5.4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    bars, diversity = figure.subplots(2, 1, sharex=True, height_ratios=(3.2, 1))
    _plain(bars)
    _plain(diversity)
    _draw_bars(bars, counts_KC)
    names = [*class_names, *map(str, range(len(class_names), counts_KC.shape[1]))][: counts_KC.shape[1]]
    _add_legend(bars, [_as_written(name) for name in names])
    _draw_diversity(diversity, counts_KC)
    bars.set_title(_as_written(title), loc="left", color=_INK, fontweight="bold", pad=24 if subtitle else None)
    bars.annotate(
        _as_written(subtitle), (0, 1), xytext=(0, 8), xycoords="axes fraction", textcoords="offset points", color=_INK,
        fontsize="small",
    )  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", metadata={"Software": None})


def _as_written(text: str) -> str:
    """Return a text in which matplotlib does not interpret `$` as mathematics."""
    return text.replace("$", r"\$")


def _plain(axes: "Axes") -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=_INK, length=3)
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)


def _draw_bars(axes: "Axes", counts_KC: NDArray[np.int64]) -> None:
    from matplotlib.collections import PolyCollection

    num_clients, num_classes = counts_KC.shape
    tops_KC = counts_KC.cumsum(axis=1)
    half = _half_width(num_clients)
    clients, classes = np.nonzero(counts_KC)
    left, right = clients - half, clients + half
    top = tops_KC[clients, classes]
    bottom = top - counts_KC[clients, classes]
    x, y = np.stack([left, right, right, left], axis=1), np.stack([bottom, bottom, top, top], axis=1)
    colours = _colours(num_classes)[classes]
    edge: dict[str, Any] = {"edgecolors": "white" if num_classes <= len(_COLOURS) else "none", "linewidths": 0.5}
    axes.add_collection(PolyCollection(list(np.stack([x, y], axis=2)), facecolors=colours, **edge))
    axes.set_ylim(0, max(1.0, 1.05 * float(tops_KC[:, -1].max(initial=0))))
    axes.set_ylabel("images", color=_INK)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def _draw_diversity(axes: "Axes", counts_KC: NDArray[np.int64]) -> None:
    from matplotlib.ticker import MaxNLocator

    num_clients, num_classes = counts_KC.shape
    effective_K = effective_classes(counts_KC)
    axes.bar(range(num_clients), effective_K, width=2 * _half_width(num_clients), color=_BLUE)
    axes.set_ylim(0, num_classes * 1.05)
    axes.set_ylabel("effective\nclasses", color=_INK)
    axes.set_xlabel("client", color=_INK)
    axes.set_xlim(-0.7, num_clients - 0.3)
    axes.xaxis.set_major_locator(MaxNLocator(_MANY_CLIENTS, integer=True, steps=[1, 5, 10]))


def _add_legend(axes: "Axes", class_names: Sequence[str]) -> None:
    """Draw the names next to the bars, in the order of the stack, or a scale if there are too many."""
    num_classes = len(class_names)
    if num_classes <= len(_COLOURS):
        from matplotlib.patches import Patch

        colours = _colours(num_classes)
        handles = [Patch(facecolor=tuple(colours[i]), label=class_names[i]) for i in reversed(range(num_classes))]
        axes.legend(
            handles=handles, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize="small",
            labelcolor=_INK, title="class", alignment="left",
        )  # fmt: skip
        return
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    scale: Any = ScalarMappable(Normalize(0, num_classes - 1), _COLOUR_MAP)
    bar = axes.figure.colorbar(scale, ax=axes, pad=0.01, fraction=0.04)
    bar.set_label("class", color=_INK)
    bar.outline.set_visible(False)
    bar.ax.tick_params(colors=_INK, length=3)


def _colours(num_classes: int) -> NDArray[np.float64]:
    """Return the RGBA colour of each class, (C, 4)."""
    from matplotlib import colormaps
    from matplotlib.colors import to_rgba_array

    if num_classes <= len(_COLOURS):
        return np.asarray(to_rgba_array(_COLOURS[:num_classes]))
    colours_C4 = np.asarray(colormaps[_COLOUR_MAP](np.linspace(0, 1, num_classes)))
    colours_C4[1::2, :3] = 1 - 0.72 * (
        1 - colours_C4[1::2, :3]
    )  # lighter, so that one class ends where the next begins
    return colours_C4


def _half_width(num_clients: int) -> float:
    return 0.39 if num_clients < _MANY_CLIENTS else 0.45
