"""Views: what each operation does to an image, and that the same generator gives the same bits."""

import math

import numpy as np
import pytest
import torch
from PIL import Image

from fedssl.data import AUGMENTATIONS, normalize, random_view, to_float
from fedssl.models import import_torchvision
from fedssl.protocol.data import AugmentationConfig, DataConfig

OFF = AugmentationConfig(crop="none", flip=0, jitter=0, brightness=0, contrast=0, saturation=0, hue=0, greyscale=0)


def _only(**settings: object) -> AugmentationConfig:
    return OFF.model_copy(update=settings)


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _images(batch: int = 64, channels: int = 3, size: int = 16) -> torch.Tensor:
    return torch.rand(batch, channels, size, size, generator=_generator(99))


def test_a_view_without_operations_is_the_image() -> None:
    x = _images()
    assert torch.equal(random_view(x, OFF, _generator()), x)


@pytest.mark.parametrize("name", AUGMENTATIONS)
@pytest.mark.parametrize("channels", [1, 3])
def test_presets_give_valid_and_varied_views(name: str, channels: int) -> None:
    one = _images(1, channels)
    x = one.expand(64, -1, -1, -1)
    before = x.clone()
    view = random_view(x, AUGMENTATIONS[name], _generator())
    assert view.shape == x.shape
    assert view.dtype == torch.float32
    assert 0 <= view.min() <= view.max() <= 1
    assert torch.equal(x, before)
    assert len({v.numpy().tobytes() for v in view}) > 16, "every sample draws its own parameters"


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_the_same_generator_gives_the_same_view(name: str) -> None:
    x = _images()
    first, second = (random_view(x, AUGMENTATIONS[name], _generator(3)) for _ in range(2))
    assert torch.equal(first, second)
    assert not torch.equal(first, random_view(x, AUGMENTATIONS[name], _generator(4)))


def test_geometry_does_not_depend_on_the_other_operations() -> None:
    """All numbers are drawn at once: adding blur changes neither a crop nor any later draw."""
    x = _images()
    crop = _only(crop="resized", min_scale=0.3)
    plain_generator, blurred_generator = _generator(), _generator()
    plain = random_view(x, crop, plain_generator)
    blurred = random_view(x, crop.model_copy(update={"blur": 1e-9}), blurred_generator)
    assert torch.equal(plain, blurred)
    assert torch.equal(plain_generator.get_state(), blurred_generator.get_state())


def test_flip_mirrors_the_configured_share() -> None:
    x = _images(400)
    view = random_view(x, _only(flip=0.25), _generator())
    same = (view - x).abs().amax(dim=(1, 2, 3)) < 1e-5
    mirrored = (view - x.flip(3)).abs().amax(dim=(1, 2, 3)) < 1e-5
    assert bool((same ^ mirrored).all())
    assert 70 <= int(mirrored.sum()) <= 130


@pytest.mark.parametrize(("mode", "numpy_mode"), [("zeros", "constant"), ("reflect", "reflect")])
def test_a_padded_crop_is_a_window_of_the_padded_image(mode: str, numpy_mode: str) -> None:
    padding = 3
    x = _images(200)
    view = random_view(x, _only(crop="padded", padding=padding, padding_mode=mode), _generator())
    widths = [(0, 0), (0, 0), (padding, padding), (padding, padding)]
    padded = torch.from_numpy(np.pad(x.numpy(), widths, mode=numpy_mode))  # type: ignore[call-overload]
    seen = set()
    for image, source in zip(view, padded, strict=True):
        windows = source.unfold(1, 16, 1).unfold(2, 16, 1).permute(1, 2, 0, 3, 4)
        distance = (windows - image).abs().amax(dim=(2, 3, 4))
        assert distance.min() < 1e-4
        seen.add(int(distance.argmin()))
    assert len(seen) >= 45, "all 49 shifts should come up"


def test_a_resized_crop_of_full_scale_is_close_to_the_image() -> None:
    """With a scale of 1 and any aspect, the crop is limited by the image along at least one side."""
    ramp = torch.linspace(0, 1, 16).expand(50, 1, 16, 16)
    view = random_view(ramp, _only(crop="resized", min_scale=1.0), _generator())
    assert torch.allclose(view.diff(dim=2), torch.zeros(1), atol=1e-5), "rows of a horizontal ramp stay alike"
    assert bool((view.diff(dim=3) >= -1e-6).all())


def test_a_resized_crop_shows_the_configured_area() -> None:
    """On a horizontal ramp, the range of values is the width of the crop. On a vertical ramp, it is the height."""
    size, num = 64, 2000
    ramp = torch.linspace(0, 1, size)
    x = torch.stack([ramp.expand(size, size), ramp.view(-1, 1).expand(size, size)]).expand(num, 2, size, size)
    view = torch.cat(
        [
            random_view(x[:, i : i + 1], _only(crop="resized", min_scale=0.1, max_scale=0.4), _generator())
            for i in (0, 1)
        ],
        1,
    )
    # Values run over size - 1 steps. The outer pixel centres of a view are (size - 1)/size of its extent apart.
    width, height = (view.amax(dim=(2, 3)) - view.amin(dim=(2, 3))).unbind(1)
    area, aspect = width * height, width / height
    assert 0.09 < area.min() < 0.12
    assert 0.37 < area.max() < 0.41
    assert abs(float(area.mean()) - 0.25) < 0.01
    assert 3 / 4 - 0.02 < aspect.min() < 0.78
    assert 1.3 < aspect.max() < 4 / 3 + 0.02


def test_a_crop_matches_pil_on_the_same_box() -> None:
    """PIL cuts out and resizes the box that the first sample draws."""
    x = _images(1, 1, 32)
    config = _only(crop="resized", min_scale=0.3, max_scale=0.3)
    _, ratio, top, left = torch.rand(1, 15, generator=_generator())[0, :4].tolist()
    ratio = math.exp(math.log(3 / 4) + ratio * (math.log(4 / 3) - math.log(3 / 4)))
    width, height = 32 * math.sqrt(0.3 * ratio), 32 * math.sqrt(0.3 / ratio)
    box_left, box_top = left * (32 - width), top * (32 - height)
    image = Image.fromarray(x[0, 0].numpy())
    box = (box_left, box_top, box_left + width, box_top + height)
    expected = np.asarray(image.resize((32, 32), Image.Resampling.BILINEAR, box=box))
    inner = (slice(3, -3), slice(3, -3))  # PIL repeats the edge of the box; the view uses the pixels beyond it
    view = random_view(x, config, _generator())[0, 0].numpy()
    assert np.abs(view - expected)[inner].max() < 1e-4


def test_rotation_turns_images_by_up_to_the_configured_angle() -> None:
    """The drawn angle is uniform, so one of many samples is turned by almost 90 degrees."""
    x = _images(1, 1, 9).expand(4000, -1, -1, -1)
    view = random_view(x, _only(rotation_degrees=180), _generator())
    turned = torch.rot90(x[:1], 1, (2, 3))
    assert (view - turned).abs().amax(dim=(1, 2, 3)).min() < 0.05
    assert torch.allclose(view[:, :, 4, 4], x[:, :, 4, 4], atol=1e-5), "the centre stays"


def _drawn(name: str, batch: int) -> torch.Tensor:
    columns = [
        "area",
        "aspect",
        "top",
        "left",
        "flip",
        "rotation",
        "jitter",
        "brightness",
        "contrast",
        "saturation",
        "hue",
    ]
    return torch.rand(batch, 15, generator=_generator())[:, columns.index(name)]


@pytest.mark.parametrize("name", ["brightness", "contrast", "saturation"])
@pytest.mark.parametrize("channels", [1, 3])
def test_colour_factors_match_torchvision(name: str, channels: int) -> None:
    """Uses only mid-tones: torchvision clamps after each operation, and rounds the mean only for integer images."""
    functional = import_torchvision().transforms.functional
    x = 0.35 + 0.2 * _images(channels=channels)
    view = random_view(x, _only(jitter=1, **{name: 0.4}), _generator())
    if channels == 1 and name == "saturation":
        assert torch.equal(view, x)
        return
    factors = 1 + 0.4 * (2 * _drawn(name, len(x)) - 1)
    adjust = getattr(functional, f"adjust_{name}")
    expected = torch.stack([adjust(image, float(factor)) for image, factor in zip(x, factors, strict=True)])
    assert torch.allclose(view, expected, atol=2e-4)


def test_colour_operations_are_applied_in_order() -> None:
    functional = import_torchvision().transforms.functional
    x = 0.4 + 0.1 * _images()
    view = random_view(x, _only(jitter=1, brightness=0.2, contrast=0.3, saturation=0.4), _generator())
    for i in range(len(x)):
        expected = x[i]
        for name, strength in (("brightness", 0.2), ("contrast", 0.3), ("saturation", 0.4)):
            factor = float(1 + strength * (2 * _drawn(name, len(x))[i] - 1))
            expected = getattr(functional, f"adjust_{name}")(expected, factor)
        assert torch.allclose(view[i], expected, atol=5e-4)


def test_hue_keeps_greys_and_luma_and_rotates_colours() -> None:
    luma = torch.tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)
    config = _only(jitter=1, hue=0.5)
    grey = _images(32, 1).expand(-1, 3, -1, -1)
    assert torch.allclose(random_view(grey, config, _generator()), grey, atol=1e-5)
    x = 0.45 + 0.1 * _images()
    view = random_view(x, config, _generator())
    assert torch.allclose((view * luma).sum(1), (x * luma).sum(1), atol=1e-5)
    functional = import_torchvision().transforms.functional
    turns = 2 * _drawn("hue", len(x)) - 1
    theirs = torch.stack([functional.adjust_hue(i, float(t) * 0.5) for i, t in zip(x, turns, strict=True)])
    ours, hsv = (y - y.mean(1, keepdim=True) for y in (view, theirs))
    assert float(torch.nn.functional.cosine_similarity(ours, hsv, dim=1).mean()) > 0.9, (
        "same sense and about the same angle"
    )


def test_jitter_and_greyscale_change_the_configured_share() -> None:
    x = 0.3 + 0.4 * _images(1000)
    jittered = random_view(x, _only(jitter=0.3, brightness=0.4), _generator())
    changed = (jittered - x).abs().amax(dim=(1, 2, 3)) > 1e-5
    assert 250 <= int(changed.sum()) <= 350
    view = random_view(x, _only(greyscale=0.2), _generator())
    grey = view.std(dim=1).amax(dim=(1, 2)) < 1e-5
    assert 150 <= int(grey.sum()) <= 250
    assert torch.allclose(view[~grey], x[~grey], atol=1e-5)
    weights = torch.tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)
    assert torch.allclose(view[grey][:, :1], (x[grey] * weights).sum(1, keepdim=True), atol=1e-5)


def test_blur_matches_torchvision() -> None:
    functional = import_torchvision().transforms.functional
    x = _images(size=32)
    view = random_view(x, _only(blur=1, blur_sigma=(0.7, 0.7)), _generator())
    assert torch.allclose(view, functional.gaussian_blur(x, [3, 3], [0.7, 0.7]), atol=1e-5)
    half = random_view(x, _only(blur=0.5), _generator())
    untouched = (half == x).flatten(1).all(1)
    assert 16 <= int(untouched.sum()) <= 48


def test_solarize_inverts_bright_pixels_of_the_configured_share() -> None:
    x = _images(400)
    view = random_view(x, _only(solarize=0.25), _generator())
    inverted = torch.where(x >= 128 / 255, 1 - x, x)
    is_inverted = (view == inverted).flatten(1).all(1)
    assert bool((is_inverted ^ (view == x).flatten(1).all(1)).all())
    assert 70 <= int(is_inverted.sum()) <= 130


def test_to_float_scales_to_one_and_normalize_uses_mean_and_std() -> None:
    pixels = torch.tensor([0, 51, 255], dtype=torch.uint8)
    assert torch.allclose(to_float(pixels), torch.tensor([0.0, 0.2, 1.0]))
    assert pixels.tolist() == [0, 51, 255]
    x = _images()
    assert normalize(x, DataConfig()) is x
    config = DataConfig(mean=(0.1, 0.2, 0.3), std=(0.5, 0.25, 1.0))
    expected = torch.stack([(x[:, 0] - 0.1) / 0.5, (x[:, 1] - 0.2) / 0.25, x[:, 2] - 0.3], dim=1)
    assert torch.allclose(normalize(x, config), expected)
    assert torch.allclose(normalize(x, DataConfig(std=(0.5, 0.5, 0.5))), 2 * x)


def test_channels_that_are_not_colours_keep_their_own_means() -> None:
    """Contrast is relative to the mean of each channel. Saturation, hue and greyscale do not change five channels."""
    x_BCHW = torch.rand(6, 5, 16, 16, generator=torch.Generator().manual_seed(0)) * 0.2 + 0.4
    config = AugmentationConfig(
        crop="none", flip=0, jitter=1, brightness=0, contrast=0.4, saturation=1, hue=0.5, greyscale=1
    )
    view = random_view(x_BCHW, config, torch.Generator().manual_seed(1))
    assert view.shape == x_BCHW.shape
    assert not torch.equal(view, x_BCHW)
    torch.testing.assert_close(view.mean(dim=(2, 3)), x_BCHW.mean(dim=(2, 3)))
    factor = (view - view.mean(dim=(2, 3), keepdim=True)) / (x_BCHW - x_BCHW.mean(dim=(2, 3), keepdim=True))
    torch.testing.assert_close(factor, factor[:, :1, :1, :1].expand_as(factor), rtol=1e-2, atol=1e-2)


def test_a_single_channel_is_jittered_like_one_of_several() -> None:
    x_BCHW = torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    config = AugmentationConfig(crop="none", flip=0, jitter=1)
    one = random_view(x_BCHW, config, torch.Generator().manual_seed(1))
    five = random_view(x_BCHW.repeat(1, 5, 1, 1), config, torch.Generator().manual_seed(1))
    torch.testing.assert_close(five[:, 3:4], one)


def test_a_smaller_view_of_the_whole_image_has_larger_pixels() -> None:
    """Pixel (row, column) has the value (4 row + column) / 16. The centres of 2 x 2 pixels lie between them."""
    image = (torch.arange(16.0) / 16).view(1, 1, 4, 4)
    whole = _only(crop="resized", min_scale=1.0, max_scale=1.0)
    view = random_view(image, whole, _generator(), aspect=(1.0, 1.0), size=2)
    torch.testing.assert_close(view, torch.tensor([[[[2.5, 4.5], [10.5, 12.5]]]]) / 16)


def test_a_smaller_crop_of_the_same_draw_shows_the_same_region() -> None:
    """The mean of a crop of a smooth image hardly depends on its number of pixels."""
    rows, columns = torch.meshgrid(torch.linspace(0, 1, 16), torch.linspace(0, 1, 16), indexing="ij")
    x = ((rows + 2 * columns) / 3).expand(64, 1, -1, -1)
    crop = _only(crop="resized", min_scale=0.1, max_scale=0.6, flip=0.5)
    large, small = (random_view(x, crop, _generator(), size=size) for size in (16, 6))
    assert small.shape == (64, 1, 6, 6)
    torch.testing.assert_close(small.mean(dim=(1, 2, 3)), large.mean(dim=(1, 2, 3)), rtol=0, atol=0.02)
    plain = random_view(x, crop, _generator())
    torch.testing.assert_close(large, plain, rtol=0, atol=1e-4)
