"""A small encoder, and labelled images that it can distinguish by colour."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedssl.embeddings.encoders import Model
from support.encoder_folders import make_small_model

COLOURS = {"blue": (40, 60, 200), "green": (60, 200, 50), "red": (200, 60, 40)}

Scans = Callable[..., Path]


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return make_small_model(tmp_path / "run")


@pytest.fixture(scope="session")
def scans() -> Scans:
    """Return a function that writes a folder per colour, with the given numbers of images. The colours overlap."""

    def write(folder: Path, *nums: int) -> Path:
        rng = np.random.default_rng(0)
        for (name, colour), num in zip(COLOURS.items(), nums, strict=False):
            (folder / name).mkdir(parents=True)
            for number in range(num):
                pixels = np.array(colour) + rng.normal(0, 60, 3) + rng.normal(0, 20, (14, 16, 3))
                Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / name / f"{number:03d}.png")
        return folder

    return write
