"""A map of the representations: every image a point, coloured by its class."""

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

# Petroff's ten colours (2021), chosen by a survey among those that colour-blind readers can tell apart.
_COLOURS = (
    "#3f90da", "#ffa90e", "#bd1f01", "#832db6", "#94a4a2", "#a96b59", "#e76300", "#b9ac70", "#717581", "#92dadd",
)  # fmt: skip
_MARKERS = ("o", "^", "s", "X", "v", "D", "P", "<", "*", ">")  # past ten classes, a shape for every ten
_INK = "#333333"
_MOST_NAMED = 20  # classes whose names stand on the map itself
_MOST_LISTED = 100  # classes that the legend lists
_LEGEND_ROWS = 34
_PERPLEXITY = 30.0
_REDUCED = 50  # dimensions that t-SNE starts from, as its authors do
_ROUNDING = 1e-12  # of the largest value: what float64 makes of equal ones


def project(features_NH: Tensor, method: MapMethod = "tsne", *, seed: int = 0) -> NDArray[np.float64]:
    """Two coordinates (N, 2) for every representation (N, H).

    Args:
        features_NH: at least two, finite.
        method: `pca` keeps the two directions of the largest variance, signed so that the largest weight of each is
            positive; `tsne` keeps neighbourhoods (van der Maaten and Hinton 2008), starting from PCA.
        seed: of t-SNE.

    Representations that are all the same, those of a collapsed encoder, are all at 0.

    Raises:
        ValueError: fewer than two representations, or some that are not finite.
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
    # Of unit size, whatever the representations': t-SNE's C code ends the process where float32 makes zeros of them.
    reduced = (_principal(x_NH, min(_REDUCED, *x_NH.shape)) / spread).to(torch.float32).numpy()
    points = TSNE(2, perplexity=perplexity, init="pca", learning_rate="auto", random_state=seed).fit_transform(reduced)
    return np.asarray(points, np.float64)


def aligned_map(
    features_NH: Tensor, method: MapMethod, before_N2: NDArray[np.float64] | None = None, *, seed: int = 0
) -> NDArray[np.float64]:
    """A map (N, 2) that can be laid beside others of the same images: one round of a run after another.

    Args:
        features_NH, method, seed: as in :func:`project`.
        before_N2: the map of the round before. This one is turned, and mirrored if need be, to lie onto it as closely
            as it can (orthogonal Procrustes), which changes no distance.

    The points are centred, with a root mean square distance of 1 from the centre. Raises ValueError as `project` does.
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
    """Writes a PNG of the points, coloured by class, with the classes' names.

    Args:
        path: of the PNG; folders on the way are made.
        points_N2: from :func:`project`.
        labels_N: class numbers.
        class_names: by number; classes without one are called by their number.
        title: says the data, the number of images and the method.

    Every ten classes share their colours with the next ten and differ from them in shape. The picture depends on the
    arguments alone: no pyplot, no global state, no date.
    """
    classes = [int(label) for label in np.unique(labels_N)]
    names = {label: class_names[label] if label < len(class_names) else f"class {label}" for label in classes}
    columns = -(-min(len(classes), _MOST_LISTED) // _LEGEND_ROWS)
    figure = Figure(figsize=(7.6 + 1.9 * columns, 7.9), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    _draw_points(axes, points_N2, labels_N, many=len(classes) > len(_COLOURS))
    axes.set_aspect("equal", adjustable="datalim")
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_color("#D0D0D0")
    axes.set_title(title, loc="left", color=_INK, fontweight="bold")
    _draw_legend(figure, names, columns)
    if len(classes) <= _MOST_NAMED:
        _write_names(figure, axes, points_N2, labels_N, names)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", metadata={"Software": None})


def _principal(x_NH: Tensor, num: int) -> Tensor:
    """Coordinates (N, num) along the directions of the largest variance; zeros where there are fewer."""
    x_NH = x_NH - x_NH.mean(dim=0)
    # From the covariance: its size does not grow with the number of images.
    directions = torch.linalg.eigh(x_NH.T @ x_NH).eigenvectors.flip(1)[:, :num]
    largest = directions.gather(0, directions.abs().argmax(dim=0, keepdim=True))
    points = x_NH @ (directions * largest.sign())
    return torch.nn.functional.pad(points, (0, num - points.shape[1]))


def _draw_points(axes: Any, points_N2: NDArray[np.float64], labels_N: NDArray[np.int64], *, many: bool) -> None:
    size = float(np.clip(40_000 / len(points_N2), 5, 40))
    # In random order, or the last class would lie on top of the others.
    order = np.random.default_rng(0).permutation(len(points_N2))
    for group in np.unique(labels_N // len(_COLOURS)):
        rows = order[labels_N[order] // len(_COLOURS) == group]
        colours = [_COLOURS[label % len(_COLOURS)] for label in labels_N[rows]]
        marker = _MARKERS[group % len(_MARKERS)] if many else "o"
        axes.scatter(*points_N2[rows].T, s=size, c=colours, marker=marker, alpha=0.75, linewidths=0)


def _write_names(
    figure: Figure, axes: Any, points_N2: NDArray[np.float64], labels_N: NDArray[np.int64], names: dict[int, str]
) -> None:
    """Each class's name at the median of its points, or as far below as it takes to leave the others readable."""
    outline = [withStroke(linewidth=3, foreground="white")]
    texts = []
    for label, name in names.items():
        x, y = np.median(points_N2[labels_N == label], axis=0)
        texts.append(
            axes.text(x, y, name, ha="center", va="center", fontsize="small", fontweight="bold", color=_INK,
                      path_effects=outline)
        )  # fmt: skip
    figure.draw_without_rendering()  # only now is known where everything lies
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
    many = len(names) > len(_COLOURS)
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
