"""The picture of nearest neighbours before and after training."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedssl.data import ImageData
from fedssl.evaluation import nearest, plot_neighbours
from fedssl.evaluation.neighbour_plot import choose_queries

RNG = np.random.default_rng(0)


def images(count: int, channels: int) -> ImageData:
    return ImageData(RNG.integers(0, 256, (count, channels, 8, 8), dtype=np.uint8), np.arange(count) % 3)


def test_the_nearest_images_have_the_largest_cosines() -> None:
    searched = torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 3.0]])

    assert nearest(searched, torch.tensor([[5.0, 0.1], [0.0, 1.0]]), k=2).tolist() == [[0, 2], [1, 2]]
    assert nearest(searched, torch.tensor([[1.0, 0.0]]), k=9).shape == (1, 3)


def test_queries_cover_as_many_classes_as_possible() -> None:
    assert choose_queries([5, 5, 5, 1, 1, 2], 4).tolist() == [3, 5, 0, 4]


@pytest.mark.full(but=1)
@pytest.mark.parametrize("channels", [3, 1])
def test_the_picture_is_reproducible_and_the_share_of_the_same_class_is_returned(tmp_path: Path, channels: int) -> None:
    searched, queries = images(12, channels), images(3, channels)
    perfect = (torch.eye(3)[searched.labels], torch.eye(3)[queries.labels])
    random = (torch.from_numpy(RNG.normal(size=(12, 4))), torch.from_numpy(RNG.normal(size=(3, 4))))

    found = [plot_neighbours(tmp_path / name, searched, queries, {"before": random, "after": perfect}) for name in "ab"]

    assert found[0] == found[1]
    # Four images of each class are searched, and five neighbours are shown.
    assert found[0]["after"] == 0.8
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    with Image.open(tmp_path / "a") as picture:
        assert picture.format == "PNG"
        assert np.asarray(picture.convert("L")).std() > 5
