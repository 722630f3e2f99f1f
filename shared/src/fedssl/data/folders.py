"""Image folders: one sub-folder a class, or loose images without labels."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from fedssl.data.images import ImageData
from fedssl.errors import DataError

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
_FORMATS = ("JPEG", "PNG", "BMP", "WEBP")


def read_folder(folder: Path, split: str, image_size: int | None = None, channels: int | None = None) -> ImageData:
    """Decodes all images below a folder.

    The classes are the sub-folders in the order of their names, and so are the images of a class. Images that lie in
    the folder itself are unlabelled. A folder with sub-folders `train` and `test` holds both splits; any other is a
    training split.

    Args:
        folder: the data set.
        split: "train" or "test".
        image_size: shorter side after scaling, in pixels; the middle square is cut out. None: the shorter side of the
            first image.
        channels: 3 or 1; None: 1 if the first image is grey, else 3.

    Raises:
        DataError: there are no images, or one cannot be decoded; the message names it.
    """
    folder = _split_folder(folder, split)
    try:
        class_names, files = _list_images(folder)
    except OSError as error:
        raise DataError(
            f"cannot look through {folder}: {error}; give the user of this process leave to read it"
        ) from error
    if not files:
        raise DataError(f"{folder} holds no images: put them into one sub-folder a class ({', '.join(SUFFIXES)})")
    with _opened(files[0][0]) as first:
        size = image_size if image_size is not None else min(first.size)
        mode = "L" if channels == 1 or (channels is None and first.mode in ("1", "L")) else "RGB"
    images = np.empty((len(files), len(mode) if mode == "RGB" else 1, size, size), np.uint8)
    for row, (path, _) in zip(images, files, strict=True):
        pixels = _decode(path, mode, size)
        row[:] = pixels[np.newaxis] if mode == "L" else pixels.transpose(2, 0, 1)
    labels = np.array([label for _, label in files], np.int64) if class_names else None
    return ImageData(images, labels, class_names)


def _split_folder(folder: Path, split: str) -> Path:
    has = {name: (folder / name).is_dir() for name in ("train", "test")}
    if all(has.values()):
        return folder / split
    if split == "test":
        raise DataError(f"{folder} has no test images: give it two sub-folders, train and test")
    return folder


def _list_images(folder: Path) -> tuple[tuple[str, ...], list[tuple[Path, int]]]:
    """Class names and (file, class number); no class names where the images lie in the folder itself."""
    classes = [child for child in sorted(folder.iterdir()) if child.is_dir() and not child.name.startswith(".")]
    loose = _images_in(folder)
    if loose and classes:
        raise DataError(
            f"{folder} holds both images and sub-folders: move the images into a class, or the folders away"
        )
    if loose:
        return (), [(path, 0) for path in loose]
    return tuple(c.name for c in classes), [(path, label) for label, c in enumerate(classes) for path in _images_in(c)]


def _images_in(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.iterdir()) if path.is_file() and path.suffix.lower() in SUFFIXES]


def _opened(path: Path) -> Image.Image:
    try:
        return Image.open(path, formats=_FORMATS)
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"cannot decode {path}: {error}; repair the image or take it away") from error


def _decode(path: Path, mode: str, size: int) -> NDArray[np.uint8]:
    with _opened(path) as image:
        try:
            # Photographs say in their EXIF data which side is up.
            upright = ImageOps.exif_transpose(image).convert(mode)
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise DataError(f"cannot decode {path}: {error}; repair the image or take it away") from error
    if upright.size != (size, size):
        upright = ImageOps.fit(upright, (size, size), method=Image.Resampling.BILINEAR)
    return np.asarray(upright, np.uint8)
