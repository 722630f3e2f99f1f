"""The picture of what an encoder finds similar: images with their nearest neighbours, before and after training."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from fedssl.data import ImageData
from fedssl.evaluation.features import labels_of
from fedssl.evaluation.neighbours import nearest

NUM_QUERIES, NUM_NEIGHBOURS = 8, 5

# Okabe and Ito's colours, as in the other pictures. The line style repeats the colour, for readers in grey.
_SAME, _OTHER, _INK = "#0072B2", "#D55E00", "#333333"


def choose_queries(labels: Sequence[int], count: int = NUM_QUERIES) -> NDArray[np.int64]:
    """Return the positions of at most `count` images: the first of each class, then the second, and so on.

    >>> choose_queries([0, 0, 1, 0], 3).tolist()
    [0, 2, 1]
    """
    seen: dict[int, int] = {}
    order = []
    for place, label in enumerate(labels):
        seen[label] = seen.get(label, 0) + 1
        order.append((seen[label], label, place))
    return np.array([place for _, _, place in sorted(order)[:count]], np.int64)


def plot_neighbours(
    path: Path, searched: ImageData, queries: ImageData, features: Mapping[str, tuple[Tensor, Tensor]]
) -> dict[str, float]:
    """Write a PNG with a row per query: the image, and its nearest neighbours by cosine similarity.

    Args:
        path: where the PNG is written; missing folders are created.
        searched, queries: labelled images of one shape.
        features: for each encoder by name the representations of `searched` (N, H) and `queries` (Q, H).

    Returns:
        For each encoder the share of the neighbours shown that have the class of their query, 0..1.

    The picture depends only on the arguments: no pyplot, no global state, no date.
    """
    of_searched, of_queries = labels_of(searched).numpy(), labels_of(queries).numpy()
    found = {name: nearest(*pair, k=NUM_NEIGHBOURS).cpu().numpy() for name, pair in features.items()}
    same = {name: of_searched[index] == of_queries[:, None] for name, index in found.items()}
    width = max(index.shape[1] for index in found.values())
    columns = [1.0, *([0.25] + [1.0] * width) * len(found)]
    figure = Figure(figsize=(0.62 * sum(columns), 0.62 * len(queries) + 0.65), dpi=150)
    FigureCanvasAgg(figure)
    top = 1 - 0.55 / (0.62 * len(queries) + 0.65)
    grid = figure.add_gridspec(
        len(queries), len(columns), width_ratios=columns, left=0.01, right=0.99, bottom=0.02, top=top, wspace=0.08,
        hspace=0.08,
    )  # fmt: skip
    for row in range(len(queries)):
        axes = _draw(figure.add_subplot(grid[row, 0]), queries.images[row], is_same=None)
        if row == 0:
            axes.set_title("query", fontsize=8, color=_INK)
        for at, (name, index) in enumerate(found.items()):
            start = 2 + at * (width + 1)
            for place, number in enumerate(index[row]):
                axes = _draw(
                    figure.add_subplot(grid[row, start + place]),
                    searched.images[number],
                    is_same=same[name][row, place],
                )
                if row == 0 and place == 0:
                    title = f"{name}: {same[name].sum()} of {same[name].size} are of the query's class"
                    axes.set_title(title, fontsize=8, color=_INK, loc="left")
    figure.text(
        0.01, 0.995, "Nearest neighbours by cosine similarity", va="top", color=_INK, fontweight="bold", fontsize=10
    )
    figure.text(
        0.99,
        0.995,
        "solid blue: the query's class; dashed orange: another",
        va="top",
        ha="right",
        color=_INK,
        fontsize=7,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", metadata={"Software": None})
    return {name: float(right.mean()) for name, right in same.items()}


def _draw(axes: Any, image_CHW: NDArray[np.uint8], *, is_same: bool | None) -> Any:
    """Draw an image, with a frame unless `is_same` is None."""
    grey = image_CHW.shape[0] == 1
    axes.imshow(image_CHW[0] if grey else image_CHW.transpose(1, 2, 0), cmap="gray" if grey else None, vmin=0, vmax=255)
    axes.set_xticks([])
    axes.set_yticks([])
    for side in axes.spines.values():
        side.set_visible(is_same is not None)
        side.set_color(_SAME if is_same else _OTHER)
        side.set_linestyle("-" if is_same else (0, (3, 2)))
        side.set_linewidth(1.8)
    return axes
