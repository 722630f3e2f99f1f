"""A small encoder, and folders of images for it."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedssl.embeddings.encoders import Model, load_model
from support.federation import tiny_spec
from support.pulled import pulled

DATA = {"channels": 3, "image_size": 12, "mean": [0.5, 0.4, 0.3], "std": [0.25, 0.2, 0.3]}

Photos = Callable[[Path, int], Path]


@pytest.fixture
def model(tmp_path: Path) -> Model:
    folder = tmp_path / "run"
    folder.mkdir()
    pulled(folder, tiny_spec(data=DATA))
    return load_model(folder)


@pytest.fixture(scope="session")
def photos() -> Photos:
    """Writes so many images of different sizes into two classes, one of which has a sub-folder."""

    def write(folder: Path, num: int) -> Path:
        rng = np.random.default_rng(0)
        for number in range(num):
            below = ("cats", "dogs/old")[number % 2]
            (folder / below).mkdir(parents=True, exist_ok=True)
            pixels = rng.integers(0, 256, (14 + number % 5, 16, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(folder / below / f"{number:04d}.png")
        return folder

    return write
