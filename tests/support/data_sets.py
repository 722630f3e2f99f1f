"""Data sets as files, ready to be registered."""

from pathlib import Path

import numpy as np
from safetensors.numpy import save

from fedssl.data import ImageData, load_dataset
from fedssl.data.dataset_files import registered_shape, write_public


def public_bytes(num_images: int = 12, size: int = 8, seed: int = 0) -> bytes:
    """Return the content of a file of random grey public images."""
    images = np.random.default_rng(seed).integers(0, 256, (num_images, 1, size, size), np.uint8)
    return save({"images": images})


def labelled_bytes(num_train: int = 8, num_test: int = 4, seed: int = 0) -> bytes:
    """Return the content of a file of random grey labelled images of four classes."""
    rng = np.random.default_rng(seed)
    return save(
        {
            "train_images": rng.integers(0, 256, (num_train, 1, 8, 8), np.uint8),
            "train_labels": np.arange(num_train) % 4,
            "test_images": rng.integers(0, 256, (num_test, 1, 8, 8), np.uint8),
            "test_labels": np.arange(num_test) % 4,
        }
    )


def write_file(folder: Path, content: bytes) -> Path:
    """Write this content to a file, and return its path."""
    path = folder / "images.safetensors"
    path.write_bytes(content)
    return path


def digits_file(folder: Path, split: str) -> Path:
    """Write all images of one split of the digits to a file, and return its path."""
    images: ImageData = load_dataset("digits", "test" if split == "test" else "train")
    write_public(images, folder / "digits.safetensors", registered_shape(images))
    return folder / "digits.safetensors"
