"""Random views whose crops are cut out of images of any size, computed for a whole batch at once.

The draws, and all operations besides crop, flip and rotation, are those of :mod:`fedssl.data.augment`. For images that
are squares of the run's size the views are the same, up to rounding. Otherwise:

- `crop = "resized"` takes its share of the whole image's area, and its aspect is that of the crop in pixels;
- `padded` and `none` start from the middle square, and include what the image has beyond it.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from fedssl.data.augment import ASPECT, after_geometry, draw_numbers, outside, padded_shifts, to_float, turned, upturned
from fedssl.data.image_cache.images import ImageBatch
from fedssl.protocol.data import AugmentationConfig, DataConfig

_AT_ONCE = 64  # bounds the memory, because whole images as floating-point values take much more than their crops


def random_crop(batch: ImageBatch, data: DataConfig, generator: torch.Generator) -> Tensor:
    """Return one random view of every image, float32 (B, C, S, S) with values 0..1, on the device of the images.

    `generator` is the source of all randomness, as in :func:`fedssl.data.random_view`.
    """
    assert batch.sizes is not None, "images of different sizes"
    config, size, device = data.augmentation, data.image_size, batch.pixels.device
    draw = draw_numbers(len(batch), config, generator, device)
    with torch.autocast(device.type, enabled=False):
        points_BHW2 = _points(batch.sizes, size, config, draw)
        return after_geometry(_sampled(batch.pixels, points_BHW2), config, draw)


def _points(sizes_B2: Tensor, size: int, config: AugmentationConfig, draw: dict[str, Tensor]) -> Tensor:
    """Return the place (x, y) in its image of each pixel of a view, (B, S, S, 2), in pixels from the first's centre."""
    height, width, top, left = _boxes(sizes_B2, size, config, draw)
    steps_S = (torch.arange(size, device=sizes_B2.device, dtype=torch.float32) + 0.5) / size - 0.5
    mirrored = 1 - 2 * (draw["flip"] < config.flip).to(torch.float32)
    rotation, vertical = turned(config, draw), upturned(config, draw)
    if rotation is None:
        rotation = torch.ones_like(mirrored), torch.zeros_like(mirrored)
    cos, sin = (each.view(-1, 1, 1) for each in rotation)
    x, y = steps_S.view(1, 1, -1), steps_S.view(1, -1, 1)
    turned_x = mirrored.view(-1, 1, 1) * (cos * x - sin * y)
    turned_y = sin * x + cos * y
    if vertical is not None:
        turned_y = vertical.view(-1, 1, 1) * turned_y
    column = left.view(-1, 1, 1) + width.view(-1, 1, 1) * (0.5 + turned_x) - 0.5
    row = top.view(-1, 1, 1) + height.view(-1, 1, 1) * (0.5 + turned_y) - 0.5
    last_y, last_x = (sizes_B2[:, dim].view(-1, 1, 1) - 1 for dim in (0, 1))
    mode = outside(config)
    if mode == "border":
        column, row = torch.minimum(column.clamp(min=0), last_x), torch.minimum(row.clamp(min=0), last_y)
    elif mode == "reflection":
        column, row = _reflected(column, last_x), _reflected(row, last_y)
    return torch.stack([column, row], dim=-1)


def _boxes(
    sizes_B2: Tensor, size: int, config: AugmentationConfig, draw: dict[str, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the height, width, top and left of each crop in pixels of its image, each (B,)."""
    height, width = sizes_B2.unbind(1)
    if config.crop != "resized":
        side = torch.minimum(height, width)
        top, left = (height - side) / 2, (width - side) / 2
        if config.crop == "padded":
            down, right = padded_shifts(config, draw)
            top, left = top + down * side / size, left + right * side / size
        return side, side, top, left
    area = (config.min_scale + (config.max_scale - config.min_scale) * draw["area"]) * height * width
    low, high = (math.log(ratio) for ratio in ASPECT)
    ratio = torch.exp(low + (high - low) * draw["aspect"])
    box_width = torch.minimum((area * ratio).sqrt(), width)
    box_height = torch.minimum((area / ratio).sqrt(), height)
    return box_height, box_width, draw["top"] * (height - box_height), draw["left"] * (width - box_width)


def _reflected(place: Tensor, last: Tensor) -> Tensor:
    """Return places reflected at the centres of the first and the last pixel until they are between them."""
    return last - (place.remainder(2 * last) - last).abs()


def _sampled(pixels_BCHW: Tensor, points_BHW2: Tensor) -> Tensor:
    height, width = pixels_BCHW.shape[2:]
    ends = points_BHW2.new_tensor((width - 1, height - 1))
    grid_BHW2 = 2 * points_BHW2 / ends - 1
    parts = [
        F.grid_sample(to_float(pixels), grid, mode="bilinear", padding_mode="zeros", align_corners=True)
        for pixels, grid in zip(torch.split(pixels_BCHW, _AT_ONCE), torch.split(grid_BHW2, _AT_ONCE), strict=True)
    ]
    return torch.cat(parts)
