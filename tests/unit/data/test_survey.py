"""The summary of a folder of images."""

from pathlib import Path

import numpy as np
from PIL import Image

from fedssl.data.datasets import list_files
from fedssl.data.survey import survey


def test_the_sample_of_values_includes_all_channels(tmp_path: Path) -> None:
    # The sample has 2^22 values. If it took every third value of this image, all would be of the first channel.
    Image.new("RGB", (2048, 2048), (10, 120, 250)).save(tmp_path / "0.png", compress_level=1)
    files = list_files(str(tmp_path), "train")
    assert files is not None
    lowest, _, median, _, highest = survey(files, files.names).histograms["8 bits"].percentiles
    assert (lowest, median, highest) == (10, 120, 250)


def test_values_beyond_float32_are_in_the_histogram(tmp_path: Path) -> None:
    np.save(tmp_path / "0.npy", 1.5e308 * np.linspace(-1, 1, 64).reshape(8, 8))
    files = list_files(str(tmp_path), "train")
    assert files is not None
    found = survey(files, files.names).histograms["more than 8 bits"]
    assert found.counts == (2,) * 32
    assert (found.edges[0], found.edges[-1]) == (-1.5e308, 1.5e308)
    assert (found.percentiles[0], found.percentiles[-1]) == (-1.5e308, 1.5e308)
