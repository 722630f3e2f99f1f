"""The statistics of a data card, computed from files."""

from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image

from fedssl.data import ImageData, save_npz
from fedssl.data.card import card_of, measure, sums_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(12):
        Image.new("L", (40, 30), 255 * (number % 2)).save(tmp_path / f"{number:02}.png")  # below 32: the first bin
    for number in range(12, 24):
        Image.new("RGB", (64, 100), (255, 0, 51)).save(tmp_path / f"{number:02}.png")
    return tmp_path


def test_a_card_has_the_statistics_of_a_folder(folder: Path) -> None:
    (folder / "broken.png").write_bytes(b"")
    card = card_of(measure(str(folder), 3), 10)
    assert card is not None
    assert (card.num_images, card.num_groups) == (24, None)
    assert card.sizes == (12, 0, 12, 0, 0, 0, 0, 0)
    assert card.channels == (12, 0, 12, *[0] * 13)
    # Grey: 6 black, 6 white. Colours: a third each in the last, the first and the third bin.
    black, white, rest = (6 + 12 / 3) / 24, (6 + 12 / 3) / 24, 12 / 3 / 24
    expected = [black, 0, rest, 0, 0, 0, 0, 0, 0, white]
    assert card.histogram == pytest.approx(expected, abs=1e-6)
    assert card_of(measure(str(folder), 3), 25) is None
    assert card_of(measure(str(folder), 3, np.arange(25) % 4), 10) is None, "four patients"


def test_channel_sums_are_those_of_the_pixels(folder: Path) -> None:
    found = measure(str(folder), 3)
    sums = sums_of(found, 10)
    assert sums is not None
    assert sums.means == pytest.approx((6 + 12, 6, 6 + 12 * 0.2))
    assert sums.squares == pytest.approx((6 + 12, 6, 6 + 12 * 0.04))
    assert sums_of(found, 25) is None
    tifffile.imwrite(folder / "deep.tif", np.arange(900, dtype=np.uint16).reshape(30, 30))
    deep = measure(str(folder), 3)
    assert sums_of(deep, 1) is None, "its pixels depend on a window"
    assert card_of(deep, 1) is not None


def test_a_card_of_an_npz_file_counts_its_groups(tmp_path: Path) -> None:
    save_npz(tmp_path / "x.npz", ImageData(np.full((30, 1, 8, 8), 128, np.uint8), groups=np.arange(30) // 2))
    found = measure(str(tmp_path / "x.npz"), 1)
    card = card_of(found, 15)
    assert card is not None
    assert (card.num_images, card.num_groups, card.histogram[5]) == (30, 15, 1.0)
    assert card_of(found, 16) is None
