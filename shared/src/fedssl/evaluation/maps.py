"""A map of the representations: every image is a point, coloured by its class."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from numpy.typing import NDArray
from torch import Tensor

from fedssl.protocol.evaluation import MapMethod

# Petroff's ten colours (2021), chosen by a survey from colours that colour-blind readers can tell apart.
_COLOURS = (
    "#3f90da", "#ffa90e", "#bd1f01", "#832db6", "#94a4a2", "#a96b59", "#e76300", "#b9ac70", "#717581", "#92dadd",
)  # fmt: skip
_MARKERS = ("o", "^", "s", "X", "v", "D", "P", "<", "*", ">")  # if a class has a number above nine, one shape per ten
_INK = "#333333"
_MOST_NAMED = 20  # with at most this many classes, their names are written on the map
_MOST_LISTED = 100  # classes that the legend lists
_LEGEND_ROWS = 34
_PERPLEXITY = 30.0
_REDUCED = 50  # dimensions to which PCA reduces before t-SNE, as its authors do
_ROUNDING = 1e-12  # the spread of equal values in float64, relative to the largest


def project(features_NH: Tensor, method: MapMethod = "tsne", *, seed: int = 0) -> NDArray[np.float64]:
    """Return two coordinates (N, 2) for every representation (N, H).

    Args:
        features_NH: at least two representations, all finite.
        method: `pca` keeps the two directions of the largest variance, signed so that the largest weight of each is
            positive; `tsne` keeps neighbourhoods (van der Maaten and Hinton 2008), starting from PCA.
        seed: the seed of t-SNE.

    If all representations are equal, as those of a collapsed encoder are, all points are at 0.

    Raises:
        ValueError: there are fewer than two representations, or some are not finite.
    """
    x_NH = features_NH.detach().to("cpu", torch.float64)
    if len(x_NH) < 2 or not bool(x_NH.isfinite().all()):
        raise ValueError("a map needs at least two representations, all finite")
    spread = float(x_NH.std(dim=0, correction=0).max())
    if spread <= _ROUNDING * float(x_NH.abs().max()):
        return np.zeros((len(x_NH), 2))
    if method == "pca":
        return _principal(x_NH, 2).numpy()
    from sklearn.manifold import TSNE

    perplexity = min(_PERPLEXITY, (len(x_NH) - 1) / 3)
    # Scaled to unit size, because t-SNE's C code ends the process if float32 rounds the representations to zeros.
    reduced = (_principal(x_NH, min(_REDUCED, *x_NH.shape)) / spread).to(torch.float32).numpy()
    points = TSNE(2, perplexity=perplexity, init="pca", learning_rate="auto", random_state=seed).fit_transform(reduced)
    return np.asarray(points, np.float64)


def aligned_map(
    features_NH: Tensor, method: MapMethod, before_N2: NDArray[np.float64] | None = None, *, seed: int = 0
) -> NDArray[np.float64]:
    """Return a map (N, 2) that can be compared with other maps of the same images, such as those of other rounds.

    Args:
        features_NH, method, seed: as in :func:`project`.
        before_N2: the map of the round before. The new map is rotated, and mirrored if necessary, to match it as
            closely as possible (orthogonal Procrustes), which does not change any distance.

    The points are centred, with a root mean square distance of 1 from the centre. Raises ValueError like `project`.
    """
    drawn_N2 = project(features_NH, method, seed=seed)
    drawn_N2 = drawn_N2 - drawn_N2.mean(axis=0)
    radius = float(np.sqrt((drawn_N2**2).sum(axis=1).mean()))
    points_N2 = np.asarray(drawn_N2 / (radius or 1.0), np.float64)
    if before_N2 is None or before_N2.shape != points_N2.shape:
        return points_N2
    left, _, right = np.linalg.svd(points_N2.T @ before_N2)
    return np.asarray(points_N2 @ (left @ right), np.float64)


def plot_map(
    path: Path, points_N2: NDArray[np.float64], labels_N: NDArray[np.int64], class_names: Sequence[str], title: str
) -> None:
    """Write a PNG of the points, coloured by class, with the classes' names.

    Args:
        path: where the PNG is written; missing folders are created.
        points_N2: from :func:`project`.
        labels_N: class numbers.
        class_names: the names by number; a class without a name is shown by its number.
        title: names the data, the number of images and the method.

    Every ten classes share their colours with the next ten and differ from them in shape. The picture depends only on
    the arguments: no pyplot, no global state, no date.
    """
    classes = [int(label) for label in np.unique(labels_N)]
    # matplotlib would interpret text between two `$` as mathematics.
    known = [name.replace("$", r"\$") for name in class_names]
    names = {label: known[label] if label < len(known) else f"class {label}" for label in classes}
    columns = -(-min(len(classes), _MOST_LISTED) // _LEGEND_ROWS)
    figure = Figure(figsize=(7.6 + 1.9 * columns, 7.9), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    _draw_points(axes, points_N2, labels_N, many=classes[-1] >= len(_COLOURS))
    axes.set_aspect("equal", adjustable="datalim")
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_color("#D0D0D0")
    axes.set_title(title.replace("$", r"\$"), loc="left", color=_INK, fontweight="bold")
    _draw_legend(figure, names, columns)
    if len(classes) <= _MOST_NAMED:
        _write_names(figure, axes, points_N2, labels_N, names)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", metadata={"Software": None})


def _principal(x_NH: Tensor, num: int) -> Tensor:
    """Return coordinates (N, num) along the directions of the largest variance, padded with zeros if necessary."""
    x_NH = x_NH - x_NH.mean(dim=0)
    # Computed from the covariance, whose size does not grow with the number of images.
    directions = torch.linalg.eigh(x_NH.T @ x_NH).eigenvectors.flip(1)[:, :num]
    largest = directions.gather(0, directions.abs().argmax(dim=0, keepdim=True))
    points = x_NH @ (directions * largest.sign())
    return torch.nn.functional.pad(points, (0, num - points.shape[1]))


def _draw_points(axes: Any, points_N2: NDArray[np.float64], labels_N: NDArray[np.int64], *, many: bool) -> None:
    size = float(np.clip(40_000 / len(points_N2), 5, 40))
    # In random order, so that the last class does not cover the others.
    order = np.random.default_rng(0).permutation(len(points_N2))
    for group in np.unique(labels_N // len(_COLOURS)):
        rows = order[labels_N[order] // len(_COLOURS) == group]
        colours = [_COLOURS[label % len(_COLOURS)] for label in labels_N[rows]]
        marker = _MARKERS[group % len(_MARKERS)] if many else "o"
        axes.scatter(*points_N2[rows].T, s=size, c=colours, marker=marker, alpha=0.75, linewidths=0)


def _write_names(
    figure: Figure, axes: Any, points_N2: NDArray[np.float64], labels_N: NDArray[np.int64], names: dict[int, str]
) -> None:
    """Write each class's name at the median of its points, or below it, so that names do not overlap."""
    outline = [withStroke(linewidth=3, foreground="white")]
    texts = []
    for label, name in names.items():
        x, y = np.median(points_N2[labels_N == label], axis=0)
        texts.append(
            axes.text(x, y, name, ha="center", va="center", fontsize="small", fontweight="bold", color=_INK,
                      path_effects=outline)
        )  # fmt: skip
    figure.draw_without_rendering()  # computes the positions of everything
    figure.set_layout_engine("none")
    taken: list[Any] = []
    for text in sorted(texts, key=lambda text: -float(text.get_position()[1])):
        box = text.get_window_extent()
        moved = 0
        while any(box.translated(0, -moved).overlaps(other) for other in taken):
            moved += 1
        taken.append(box.translated(0, -moved))
        x, y = axes.transData.transform(text.get_position())
        text.set_position(axes.transData.inverted().transform((x, y - moved)))


def _draw_legend(figure: Figure, names: dict[int, str], columns: int) -> None:
    many = max(names) >= len(_COLOURS)
    listed = list(names.items())[:_MOST_LISTED]
    entries = [
        Line2D(
            [], [], linestyle="", marker=_MARKERS[label // len(_COLOURS) % len(_MARKERS)] if many else "o",
            color=_COLOURS[label % len(_COLOURS)], markersize=6, label=name,
        )
        for label, name in listed
    ]  # fmt: skip
    title = None if len(listed) == len(names) else f"the first {len(listed)} of {len(names)} classes"
    figure.legend(
        handles=entries, loc="outside right upper", ncols=columns, frameon=False, fontsize="small", labelcolor=_INK,
        title=title, handletextpad=0.2, columnspacing=0.8, borderaxespad=1.2,
    )  # fmt: skip
