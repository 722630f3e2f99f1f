"""A small encoder, and folders of images for it."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedssl.embeddings.encoders import Model
from support.encoder_folders import make_small_model

Photos = Callable[[Path, int], Path]


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return make_small_model(tmp_path / "run")


@pytest.fixture(scope="session")
def photos() -> Photos:
    """Return a function that writes that many images, of different sizes, into two classes. One has a sub-folder."""

    def write(folder: Path, num: int) -> Path:
        rng = np.random.default_rng(0)
        for number in range(num):
            below = ("cats", "dogs/old")[number % 2]
            (folder / below).mkdir(parents=True, exist_ok=True)
            pixels = rng.integers(0, 256, (14 + number % 5, 16, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(folder / below / f"{number:04d}.png")
        return folder

    return write
