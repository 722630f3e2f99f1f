"""The picture of a partition: a valid PNG that shows the counts, with the same bytes every time."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedssl.data import plot_partition
from fedssl.data.partition_plot import _colours

TWO = np.array([[30, 0], [0, 30]])


def _pixels(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        assert image.format == "PNG"
        return np.asarray(image.convert("RGB")).reshape(-1, 3)


def _share(pixels: np.ndarray, colour: np.ndarray) -> float:
    return float((np.abs(pixels - np.round(255 * colour[:3])).max(axis=1) <= 1).mean())


@pytest.mark.parametrize(
    ("num_clients", "num_classes"),
    [
        *[(1, 1), (5, 10), (6, 200)],
        pytest.param(100, 10, marks=pytest.mark.full),
        pytest.param(50, 100, marks=pytest.mark.full),
        pytest.param(1000, 11, marks=pytest.mark.full),
    ],
)
def test_any_number_of_clients_and_classes_is_drawn(tmp_path: Path, num_clients: int, num_classes: int) -> None:
    counts = np.random.default_rng(0).integers(0, 50, (num_clients, num_classes))
    path = tmp_path / "deep" / "picture.png"
    plot_partition(path, counts, ["one", "two"][:num_classes], title="title", subtitle="subtitle")
    with Image.open(path) as image:
        assert 900 < image.width <= 2200
        assert image.height > 700
    assert _pixels(path).std() > 20, "something is drawn"


def test_dollar_signs_are_drawn_and_not_parsed_as_mathematics(tmp_path: Path) -> None:
    odd = r"$\none$ of 5"
    plot_partition(tmp_path / "odd.png", TWO, [odd, "b"], title=odd, subtitle=odd)
    assert _pixels(tmp_path / "odd.png").std() > 20, "something is drawn"


def test_areas_are_proportional_to_the_counts(tmp_path: Path) -> None:
    """One of two classes has three times as many images, so it has three times as many pixels outside the legend."""
    path = tmp_path / "picture.png"
    plot_partition(path, np.array([[30, 10], [60, 20]]))
    first, second = (_share(_pixels(path), colour) for colour in _colours(2))
    assert 2.6 < first / second < 3.4


def test_a_class_that_no_client_has_is_only_in_the_legend(tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    plot_partition(path, np.array([[30, 0, 30]]))
    shares = [_share(_pixels(path), colour) for colour in _colours(3)]
    assert 0 < shares[1] < 0.05 * shares[0]


def test_colours_also_differ_in_grey() -> None:
    """Neighbours in a stack differ in lightness too, for print and for colour-blind readers."""
    for num_classes in (10, 100, 200):
        grey = _colours(num_classes)[:, :3] @ np.array([0.299, 0.587, 0.114])
        assert np.abs(np.diff(grey)).min() > 0.03
    assert len(np.unique(_colours(10), axis=0)) == 10


def test_a_partition_without_images_is_drawn(tmp_path: Path) -> None:
    plot_partition(tmp_path / "picture.png", np.zeros((3, 2), np.int64))
    assert (tmp_path / "picture.png").exists()


def test_equal_counts_give_equal_bytes(tmp_path: Path) -> None:
    for name in ("1.png", "2.png"):
        plot_partition(tmp_path / name, TWO, ["a", "b"], title="t")
    assert (tmp_path / "1.png").read_bytes() == (tmp_path / "2.png").read_bytes()


def test_matplotlib_is_imported_only_to_draw() -> None:
    source = "import sys, fedssl.data; sys.exit('matplotlib' in sys.modules or 'scipy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", source], check=False).returncode == 0
