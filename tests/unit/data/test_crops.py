"""Crops of whole images: crops of squares equal the views of `augment`, and all others lie where they should."""

import numpy as np
import pytest
import torch

from fedssl.data import random_view, to_float
from fedssl.data.crops import random_crop
from fedssl.data.image_cache.images import ImageBatch
from fedssl.protocol.data import AugmentationConfig, DataConfig

_NOTHING = {"flip": 0, "jitter": 0, "greyscale": 0}


def _batch(*sizes: tuple[int, int], channels: int = 3) -> ImageBatch:
    """Return images on a canvas of zeros. The first channel of a pixel is its row, and the second its column."""
    height, width = (max(size[dim] for size in sizes) for dim in (0, 1))
    pixels = torch.zeros((len(sizes), channels, height, width), dtype=torch.uint8)
    for canvas, (own_height, own_width) in zip(pixels, sizes, strict=True):
        canvas[0, :own_height, :own_width] = torch.arange(own_height)[:, None]
        canvas[1, :own_height, :own_width] = torch.arange(own_width)
    return ImageBatch(pixels, torch.tensor(sizes, dtype=torch.float32))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"crop": "padded", "padding": 3},
        {"crop": "padded", "padding": 3, "padding_mode": "reflect", "rotation_degrees": 40},
        {"rotation_degrees": 180},
        {"crop": "none", "blur": 0.5, "solarize": 0.5},
        {"crop": "none", "flip": 0},
    ],
)
def test_views_of_squares_of_the_runs_size_equal_those_of_random_view(settings: dict[str, object]) -> None:
    config = AugmentationConfig.model_validate(settings)
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (70, 3, 16, 16), dtype=torch.uint8, generator=generator)
    sizes = torch.full((70, 2), 16.0)
    data = DataConfig(image_size=16, cache_size=16, augmentation=config)
    found = random_crop(ImageBatch(pixels, sizes), data, torch.Generator().manual_seed(1))
    expected = random_view(to_float(pixels), config, torch.Generator().manual_seed(1))
    # A value at the threshold of solarize may fall on either side of it, and then changes by 1/255.
    tolerance = 5e-3 if "solarize" in settings else 2e-4
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=0)


def test_without_a_crop_the_central_square_is_shown() -> None:
    data = DataConfig(image_size=8, cache_size=16, augmentation=AugmentationConfig(crop="none", **_NOTHING))
    views = 255 * random_crop(_batch((16, 30), (28, 16)), data, torch.Generator().manual_seed(0))
    # Half the size: pixel i of a view lies between the pixels 2i and 2i + 1 of the square.
    steps = 2 * torch.arange(8) + 0.5
    torch.testing.assert_close(views[0, 0, :, 0], steps, atol=1e-3, rtol=0)
    torch.testing.assert_close(views[0, 1, 0], 7 + steps, atol=1e-3, rtol=0)
    torch.testing.assert_close(views[1, 0, :, 0], 6 + steps, atol=1e-3, rtol=0)
    torch.testing.assert_close(views[1, 1, 0], steps, atol=1e-3, rtol=0)


def test_resized_crops_reach_every_part_of_an_image_and_nothing_beyond_it() -> None:
    data = DataConfig(image_size=16, cache_size=20, augmentation=AugmentationConfig(min_scale=0.1, **_NOTHING))
    sizes = [(20, 40), (40, 20), (20, 23)] * 200
    views = 255 * random_crop(_batch(*sizes), data, torch.Generator().manual_seed(0))
    rows, columns = views[:, 0], views[:, 1]
    for kind, (height, width) in enumerate(sizes[:3]):
        own_rows, own_columns = rows[kind::3], columns[kind::3]
        for place, last in ((own_rows, height - 1), (own_columns, width - 1)):
            assert -1e-3 <= place.min() < 0.5
            assert last - 0.5 < place.max() <= last + 1e-3
        # The share of the area is between 0.1 and 1. The aspect in pixels is between 3/4 and 4/3, unless the image
        # ends.
        high = own_rows[:, -1, 0] - own_rows[:, 0, 0]
        wide = own_columns[:, 0, -1] - own_columns[:, 0, 0]
        small = (high < 0.8 * height) & (wide < 0.8 * width)
        ratios = (wide / high)[small]
        assert len(ratios) > 50
        assert ratios.min() > 0.7
        assert ratios.max() < 1.4


def test_a_flip_mirrors_the_crop() -> None:
    flipped = AugmentationConfig(crop="none", **{**_NOTHING, "flip": 1})
    data = DataConfig(image_size=16, cache_size=16, augmentation=flipped)
    views = 255 * random_crop(_batch((16, 16)), data, torch.Generator().manual_seed(0))
    torch.testing.assert_close(views[0, 1, 0], torch.arange(15.0, -1, -1), atol=1e-3, rtol=0)


def test_a_view_does_not_depend_on_the_other_images_of_its_batch() -> None:
    data = DataConfig(image_size=16, cache_size=20, augmentation=AugmentationConfig())
    together = random_crop(_batch((20, 31), (37, 20)), data, torch.Generator().manual_seed(0))
    alone = random_crop(_batch((20, 31)), data, torch.Generator().manual_seed(0))
    torch.testing.assert_close(together[:1], alone, atol=1e-4, rtol=0)


def test_pixels_beyond_an_image_are_black() -> None:
    config = AugmentationConfig(crop="padded", padding=8, **_NOTHING)
    data = DataConfig(image_size=16, cache_size=16, augmentation=config)
    white = ImageBatch(torch.full((200, 1, 16, 24), 255, dtype=torch.uint8), torch.tensor([[16.0, 16.0]] * 200))
    white.pixels[:, :, :, 16:] = 0
    views = random_crop(white, DataConfig(channels=1, **data.model_dump(exclude={"channels"})),
                        torch.Generator().manual_seed(0))  # fmt: skip
    shares = (views > 0.5).float().mean(dim=(1, 2, 3)).numpy()
    assert np.isclose(views.unique().numpy()[:, None], [0, 1], atol=1e-3).any(axis=1).all()
    assert shares.min() < 0.4
    assert shares.max() == 1
