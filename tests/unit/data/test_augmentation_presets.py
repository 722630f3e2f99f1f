"""Presets for kinds of images, vertical flips, right angles and stains. Other views keep their bits."""

import math

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from fedssl.data import random_view, to_float
from fedssl.data.crops import random_crop
from fedssl.data.image_cache.images import ImageBatch
from fedssl.protocol.data import AugmentationConfig, DataConfig

_OFF = {"preset": "none"}


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _images(batch: int = 64, channels: int = 3, size: int = 9) -> torch.Tensor:
    return torch.rand(batch, channels, size, size, generator=_generator(99))


def _view(x_BCHW: torch.Tensor, **settings: object) -> torch.Tensor:
    return random_view(x_BCHW, AugmentationConfig.model_validate(settings), _generator())


def test_natural_is_the_default_and_its_dump_has_no_new_key() -> None:
    x = _images()
    assert torch.equal(_view(x, preset="natural"), _view(x))
    assert set(AugmentationConfig().model_dump()).isdisjoint({"preset", "flip_vertical", "right_angles", "stain"})
    assert AugmentationConfig(preset="natural") == AugmentationConfig()


def test_the_new_numbers_are_drawn_after_the_others() -> None:
    """If vertical flips are added to a configuration, its crops and colours do not change."""
    x = _images().mean(dim=2, keepdim=True).expand(-1, -1, 9, -1)  # rows are equal: a vertical flip changes nothing
    plain, flipped = _view(x, min_scale=1.0), _view(x, min_scale=1.0, flip_vertical=1.0)
    torch.testing.assert_close(plain, flipped, atol=1e-5, rtol=0)


@pytest.mark.parametrize("preset", ["natural", "radiograph", "microscopy", "none"])
@pytest.mark.parametrize("channels", [1, 2, 3, 5, 16])
def test_presets_work_with_any_number_of_channels_and_bit_depth(preset: str, channels: int) -> None:
    config = AugmentationConfig.model_validate({"preset": preset})
    for dtype, full in ((torch.uint8, 255), (torch.int16, 32_767)):
        pixels = (_images(32, channels) * full).to(dtype)
        view = random_view(to_float(pixels), config, _generator())
        assert view.shape == pixels.shape
        assert 0 <= view.min() <= view.max() <= 1
        assert (preset == "none") == torch.equal(view, to_float(pixels))
        data = DataConfig(channels=channels, image_size=9, cache_size=9, augmentation=config)
        cropped = random_crop(ImageBatch(pixels, torch.full((32, 2), 9.0)), data, _generator())
        torch.testing.assert_close(cropped, view, atol=5e-4, rtol=0)


def test_given_keys_override_a_preset_and_a_dump_is_read_back_unchanged() -> None:
    config = AugmentationConfig.model_validate({"preset": "radiograph", "rotation_degrees": 3})
    assert (config.rotation_degrees, config.hue, config.flip_vertical) == (3, 0, 0)
    never_upside_down = AugmentationConfig.model_validate({"preset": "microscopy", "flip_vertical": 0, "stain": 0})
    for each in (config, never_upside_down):
        assert AugmentationConfig.model_validate(each.model_dump()) == each
    assert AugmentationConfig.model_validate_json(config.model_dump_json()) == config
    with pytest.raises(ValidationError, match="natural"):
        AugmentationConfig.model_validate({"preset": "x-ray"})


def test_right_angles_and_flips_only_move_pixels() -> None:
    x = _images(400)
    view = _view(x, **_OFF, flip=0.5, flip_vertical=0.5, right_angles=1.0)
    whole = [turned.flip(3) if flip else turned for k in range(4) for flip in (0, 1) for turned in [x.rot90(k, (2, 3))]]
    distances = torch.stack([(view - each).abs().amax(dim=(1, 2, 3)) for each in whole])
    best, which = distances.min(dim=0)
    assert best.max() < 1e-5
    counts = torch.bincount(which, minlength=8)
    assert int(counts.min()) > 25, "each of the eight is equally likely"
    upside = _view(x, **_OFF, flip_vertical=1.0)
    torch.testing.assert_close(upside, x.flip(2), atol=1e-5, rtol=0)
    some = _view(x, **_OFF, right_angles=0.4)
    moved = (some - x).abs().amax(dim=(1, 2, 3)) > 1e-5
    assert 80 <= int(moved.sum()) <= 160  # 0.4 * 3/4 of 400 are 120


def test_stains_match_a_float64_reference() -> None:
    """Applies the Beer-Lambert law in numpy, stain by stain."""
    x, strength = _images(16) * 0.8 + 0.1, 0.3
    view = _view(x, **_OFF, stain=strength)
    generator = _generator()
    torch.rand((16, 15), generator=generator)
    numbers = torch.rand((16, 9), generator=generator).double().numpy()
    stains = np.array([(0.65, 0.70, 0.29), (0.07, 0.99, 0.11), (0.27, 0.57, 0.78)])
    for image, found, drawn in zip(x.double().numpy(), view.numpy(), numbers, strict=True):
        amounts = -np.log(image.transpose(1, 2, 0)) @ np.linalg.inv(stains)
        changed = amounts * (1 + strength * (2 * drawn[3:6] - 1)) + 0.25 * strength * (2 * drawn[6:9] - 1)
        expected = np.clip(np.exp(-(changed @ stains)), 0, 1).transpose(2, 0, 1)
        np.testing.assert_allclose(found, expected, atol=2e-5)
    assert torch.equal(_view(x[:, :1], **_OFF, stain=strength), x[:, :1]), "only three channels have stains"


def test_radiographs_keep_their_upper_side_up_and_are_rotated_slightly() -> None:
    """The image is brighter towards the bottom. No view has its brighter half at the top."""
    rows = torch.linspace(0.2, 0.8, 32).view(1, 1, 32, 1).expand(200, 1, 32, 32)
    view = _view(rows, preset="radiograph")
    assert bool((view[:, :, 20:].mean(dim=(1, 2, 3)) > view[:, :, :12].mean(dim=(1, 2, 3))).all())
    slope = view[:, 0, :, -1].mean(dim=1) - view[:, 0, :, 0].mean(dim=1)
    assert slope.abs().max() < math.tan(math.radians(10)) * 0.6 * 1.2 * 1.3
