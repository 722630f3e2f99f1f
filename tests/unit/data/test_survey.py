"""The summary of a folder of images."""

from pathlib import Path

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
