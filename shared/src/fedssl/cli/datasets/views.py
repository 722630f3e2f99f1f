"""`fedssl data views`: a picture of the random views that a run trains on."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from fedssl.cli.output import note
from fedssl.cli.specs import read_spec
from fedssl.data.augment import to_float
from fedssl.data.contents import readable
from fedssl.data.datasets import list_files, load_conformed
from fedssl.data.decode_file import Damaged, decode_file, decode_whole
from fedssl.data.image_batches import join, views_before_normalisation
from fedssl.data.image_cache.images import ImageBatch
from fedssl.data.image_files import ImageFiles
from fedssl.data.reading import Reading
from fedssl.data.survey import spread
from fedssl.errors import DataError
from fedssl.files import replaced_file
from fedssl.protocol.data import DataConfig

_GAP = 2  # pixels between two images
_PAPER = 255


def draw_views(
    name_or_path: str, spec: str, changes: list[str] | None, out: Path, num_images: int, num_views: int, seed: int
) -> None:
    """Write a PNG with one row per image: the prepared image, then random views, first and second ones in turn."""
    data = read_spec(spec, changes).data
    prepared, batch = _images(name_or_path, data, num_images)
    generator = torch.Generator().manual_seed(seed)
    second = data.model_copy(update={"augmentation": data.second_view or data.augmentation})
    kinds = [second if number % 2 else data for number in range(num_views)]
    columns = [prepared, *(views_before_normalisation(batch, kind, generator) for kind in kinds)]
    out.parent.mkdir(parents=True, exist_ok=True)
    with replaced_file(out) as incoming:
        Image.fromarray(_sheet(torch.stack(columns, dim=1))).save(incoming, "PNG")
    note(f"{out}: {len(batch)} images in rows; the first column is the prepared image, the others are random views")


def _images(name_or_path: str, data: DataConfig, num: int) -> tuple[Tensor, ImageBatch]:
    """Return some images as squares (n, C, S, S) with values 0..1, and in the form from which the run makes views.

    Raises DataError.
    """
    files = list_files(name_or_path, "train")
    if files is not None:
        return _decoded(files, data, num)
    if data.cache_size is not None:
        raise DataError(
            f"data.cache_size is for folders of image files, and {name_or_path} is another kind: leave it out"
        )
    images = load_conformed(name_or_path, "train", data).images
    if not len(images):
        raise DataError(f"{name_or_path} has no images")
    chosen = torch.from_numpy(np.array(images[spread(range(len(images)), num)]))
    return to_float(chosen), ImageBatch(chosen)


def _decoded(files: ImageFiles, data: DataConfig, num: int) -> tuple[Tensor, ImageBatch]:
    files = replace(files, reading=Reading.of(data))
    names, found = [], []
    for name in spread(files.names, num):
        try:
            found.append(_tensor(decode_file(files, name, data.channels, data.image_size)[0]))
            names.append(name)
        except Damaged as error:
            note(f"{readable(name)} is left out, because it cannot be read: {error.why}")
    if not found:
        raise DataError(f"none of the {num} images that were chosen from {files.title} can be read: give more --images")
    squares = torch.stack(found)
    if data.cache_size is None:
        return to_float(squares), ImageBatch(squares)
    whole = [_tensor(decode_whole(files, name, data.channels, data.cache_size)[0]) for name in names]
    return to_float(squares), join([ImageBatch(each[None], _size(each)) for each in whole])


def _size(image_CHW: Tensor) -> Tensor:
    return torch.tensor([image_CHW.shape[1:]], dtype=torch.float32)


def _tensor(pixels_CHW: NDArray[np.generic]) -> Tensor:
    return torch.from_numpy(np.array(pixels_CHW, order="C"))  # a copy, since the pixels of PIL are read-only


def _sheet(views_NKCHW: Tensor) -> NDArray[np.uint8]:
    """Return a picture (H, W, 3) with a row per image and a column per view."""
    num_rows, num_columns, channels, size, _ = views_NKCHW.shape
    shown = views_NKCHW[:, :, :3] if channels >= 3 else views_NKCHW[:, :, :1].expand(-1, -1, 3, -1, -1)
    step = size + _GAP
    sheet = np.full((num_rows * step + _GAP, num_columns * step + _GAP, 3), _PAPER, np.uint8)
    pixels = (shown.clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 1, 3, 4, 2).numpy()
    for row in range(num_rows):
        for column in range(num_columns):
            top, left = _GAP + row * step, _GAP + column * step
            sheet[top : top + size, left : left + size] = pixels[row, column]
    return sheet
