"""The picture of a run: a valid PNG, the same every time, even if data are missing."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedssl.evaluation import plot_curves
from fedssl.evaluation.plots import mean_curve

Losses = Mapping[str, Sequence[tuple[int, float]]]
LOSSES: Losses = {"a": [(1, 2.0), (2, 1.0)], "b": [(2, 3.0), (3, 0.5)]}
MANY: Losses = {f"client-{i}": [(r, float(r + i)) for r in range(1, 50)] for i in range(12)}
ACCURACIES = {"linear probe": (0.82, 0.874), "kNN": (0.8, 0.79)}


@pytest.mark.parametrize(
    ("losses", "accuracies"), [(LOSSES, ACCURACIES), (MANY, {}), ({}, ACCURACIES), ({}, {}), ({"a": [(1, 1.0)]}, {})]
)
def test_a_picture_is_written_even_if_data_are_missing(
    tmp_path: Path, losses: Losses, accuracies: dict[str, tuple[float, float]]
) -> None:
    path = tmp_path / "deep" / "curves.png"
    plot_curves(path, losses, accuracies)
    with Image.open(path) as image:
        assert image.format == "PNG"
        assert image.width > 900 if losses or accuracies else True
        shown = np.asarray(image.convert("L"))
    if losses or accuracies:
        assert shown.std() > 5, "something is drawn"


def test_equal_data_give_equal_bytes(tmp_path: Path) -> None:
    for name in ("1.png", "2.png"):
        plot_curves(tmp_path / name, LOSSES, ACCURACIES)
    assert (tmp_path / "1.png").read_bytes() == (tmp_path / "2.png").read_bytes()


def test_the_mean_is_over_the_clients_of_each_round() -> None:
    assert mean_curve(LOSSES) == [(1, 2.0), (2, 2.0), (3, 0.5)]


def test_pyplot_is_never_imported() -> None:
    program = "import sys, fedssl.evaluation; sys.exit('matplotlib.pyplot' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=120).returncode == 0
