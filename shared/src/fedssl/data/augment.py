"""Random views, computed for a whole batch at once on the device that holds it.

Every sample draws its own parameters. Geometry (crop, flip, rotation) is one affine map per sample and one
`grid_sample`; colour (brightness, contrast, saturation, hue, greyscale) is one affine map of the pixel values per
sample, because each of these operations is affine. Two CPU cores compute tens of thousands of views per second; with
transforms of single images they compute some thousands.

The views differ from those of `torchvision.transforms`, which published code uses:

- the operations have the fixed order that `AugmentationConfig` states; torchvision shuffles those of colour;
- values are clamped to 0..1 once, after all colour operations, not after each of them;
- hue rotates the colour about the grey axis in YIQ; torchvision rotates the hue of HSV;
- a resized crop that does not fit is made to fit by shortening its longer side; torchvision draws another one;
- crops start at fractions of a pixel and are interpolated linearly;
- rotation samples the image beyond the crop's corners if the image extends there; torchvision fills them with black.
"""

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from fedssl.data.batches import on_device
from fedssl.protocol.data import AugmentationConfig, DataConfig

# One column of uniform numbers for each purpose, whether or not the config uses it, so that the same generator gives
# the same crop with and without blur, on any device. Append new purposes at the end.
_COLUMNS = (
    "area", "aspect", "top", "left", "flip", "rotation", "jitter", "brightness", "contrast", "saturation", "hue",
    "greyscale", "blur", "blur_sigma", "solarize",
)  # fmt: skip
# Drawn after these, and only by a config that uses them, so that the others' numbers do not change. Append here.
_MORE_COLUMNS = (
    "flip_vertical", "right_angles", "quarter", "stain_0", "stain_1", "stain_2", "shift_0", "shift_1", "shift_2",
)  # fmt: skip
ASPECT = (3 / 4, 4 / 3)
"""The smallest and the largest ratio of a resized crop's width to its height."""
_LUMA = (0.299, 0.587, 0.114)
_RGB_TO_YIQ = torch.tensor([_LUMA, (0.596, -0.274, -0.322), (0.211, -0.523, 0.312)], dtype=torch.float64)
# Optical densities of red, green and blue per stain: haematoxylin, eosin and DAB (Ruifrok and Johnston 2001, table 2).
_STAINS = torch.tensor([(0.65, 0.70, 0.29), (0.07, 0.99, 0.11), (0.27, 0.57, 0.78)], dtype=torch.float64)
_LEAST_INTENSITY = 1 / 255
_SHIFT_PER_STAIN = 0.25  # shift of the optical density, per strength
_SOLARIZE_THRESHOLD = 128 / 255
_MOST_TAPS = 5  # with 7 taps a grouped convolution is as fast on a CPU, with 23 taps it is twice as fast


def to_float(images: Tensor) -> Tensor:
    """Convert prepared pixels of any shape, uint8 0..255 or int16 0..32,767, to float32 values 0..1."""
    return images.to(torch.float32).mul_(1 / (255 if images.dtype == torch.uint8 else torch.iinfo(torch.int16).max))


def normalize(images_BCHW: Tensor, config: DataConfig) -> Tensor:
    """Return (x - mean) / std for each channel of images with values 0..1, or the images if neither is set."""
    if config.mean is None and config.std is None:
        return images_BCHW
    device, dtype = images_BCHW.device, images_BCHW.dtype
    mean = _constant(config.mean or (0.0,) * config.channels, device, dtype).view(-1, 1, 1)
    std = _constant(config.std or (1.0,) * config.channels, device, dtype).view(-1, 1, 1)
    return (images_BCHW - mean) / std


def random_view(
    images_BCHW: Tensor,
    config: AugmentationConfig,
    generator: torch.Generator,
    *,
    aspect: tuple[float, float] = ASPECT,
    size: int | None = None,
) -> Tensor:
    """Return one random view of every image.

    Args:
        images_BCHW: float32 values 0..1, of any number of channels, on any device. They are not changed.
        config: the operations and their strengths.
        generator: the source of all randomness: one draw of (B, 15) uniform numbers, whatever the config is, and one
            of (B, 9) if it has vertical flips, right angles or stains. Its device may differ from that of the images;
            a CPU generator gives the same views on every device.
        aspect: the smallest and the largest ratio of a resized crop's width to its height.
        size: the height and width of the views, for resized crops of square images; if None, those of the images.

    Returns:
        Views of the same dtype and device, with values 0..1; the images themselves if `config` does nothing.

    Nothing is read back from the device, and no shape depends on the random numbers, so a GPU never waits for the host.
    """
    draw = draw_numbers(len(images_BCHW), config, generator, images_BCHW.device)
    with torch.autocast(images_BCHW.device.type, enabled=False):  # in bf16 a colour matrix would have only 8 bits
        return after_geometry(_geometry(images_BCHW, config, draw, aspect, size), config, draw)


def draw_numbers(
    num_images: int, config: AugmentationConfig, generator: torch.Generator, device: torch.device
) -> dict[str, Tensor]:
    """Return all random numbers of a batch of views, each (B,) and uniform in 0..1, by purpose."""
    more = _MORE_COLUMNS if config.flip_vertical or config.right_angles or config.stain else ()
    found: dict[str, Tensor] = {}
    for columns in filter(None, (_COLUMNS, more)):
        shape = (num_images, len(columns))
        uniform = torch.rand(shape, generator=generator, device=generator.device, dtype=torch.float32)
        found.update(zip(columns, on_device(uniform, device).unbind(1), strict=True))
    return found


def turned(config: AugmentationConfig, draw: dict[str, Tensor]) -> tuple[Tensor, Tensor] | None:
    """Return the cosine and sine (B,) of each view's rotation, or None if the config has none.

    Right angles are exact, so that they only move pixels.
    """
    if config.rotation_degrees == 0 and config.right_angles == 0:
        return None
    angle = (2 * draw["rotation"] - 1) * math.radians(config.rotation_degrees)
    cos, sin = angle.cos(), angle.sin()
    if config.right_angles == 0:
        return cos, sin
    quarter = (draw["quarter"] * 4).floor().clamp_(max=3) * (draw["right_angles"] < config.right_angles)
    right_cos = (quarter == 0).to(cos.dtype) - (quarter == 2).to(cos.dtype)
    right_sin = (quarter == 1).to(cos.dtype) - (quarter == 3).to(cos.dtype)
    return cos * right_cos - sin * right_sin, sin * right_cos + cos * right_sin


def upturned(config: AugmentationConfig, draw: dict[str, Tensor]) -> Tensor | None:
    """Return -1 for each view that is flipped up-down and 1 for the others (B,), or None if the config has no flips."""
    if config.flip_vertical == 0:
        return None
    return 1 - 2 * (draw["flip_vertical"] < config.flip_vertical).to(torch.float32)


def after_geometry(x_BCHW: Tensor, config: AugmentationConfig, draw: dict[str, Tensor]) -> Tensor:
    """Return views after all operations that follow crop, flip and rotation."""
    if config.stain > 0 and x_BCHW.shape[1] == 3:
        x_BCHW = _stain(x_BCHW, config, draw)
    x_BCHW = _colour(x_BCHW, config, draw)
    if config.blur > 0:
        x_BCHW = _blur(x_BCHW, config, draw)
    if config.solarize > 0:
        chosen = (draw["solarize"] < config.solarize).view(-1, 1, 1, 1)
        x_BCHW = torch.where(chosen & (x_BCHW >= _SOLARIZE_THRESHOLD), 1 - x_BCHW, x_BCHW)
    return x_BCHW


@functools.lru_cache(maxsize=64)
def _constant(values: tuple[float, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return a constant vector that is copied to the device only once, because the device waits for every copy."""
    with torch.inference_mode(mode=False):
        return torch.tensor(values, device=device, dtype=dtype)


def _geometry(
    x_BCHW: Tensor,
    config: AugmentationConfig,
    draw: dict[str, Tensor],
    crop_aspect: tuple[float, float],
    size: int | None,
) -> Tensor:
    """Apply crop, flip and rotation as one affine map from the view's pixels to the image's."""
    rotation, vertical = turned(config, draw), upturned(config, draw)
    if size is None and config.crop == "none" and config.flip == 0 and rotation is None and vertical is None:
        return x_BCHW
    height, width = x_BCHW.shape[-2:]
    scale_y, scale_x, top, left = _crop_box(config, draw, height, width, crop_aspect)
    # With align_corners the coordinates -1 and 1 are the centres of the first and the last pixel. The centre of a
    # view's pixel i is at left + (i + 1/2) scale, in pixels from the image's edge, hence these shifts.
    shift_x = scale_x - 1 + (2 * left + scale_x - 1) / (width - 1)
    shift_y = scale_y - 1 + (2 * top + scale_y - 1) / (height - 1)
    mirrored = 1 - 2 * (draw["flip"] < config.flip).to(x_BCHW.dtype)
    cos, sin = (torch.ones_like(scale_x), torch.zeros_like(scale_x)) if rotation is None else rotation
    if vertical is not None:
        scale_y = scale_y * vertical
    y_H, x_W = (_places(n, size, x_BCHW) for n in (height, width))
    # From the view to the image: rotate, mirror, then map to the crop's box. affine_grid would take seven times longer.
    column_x = (scale_x * mirrored * cos).view(-1, 1, 1) * x_W + shift_x.view(-1, 1, 1)
    row_y = (scale_y * cos).view(-1, 1, 1) * y_H.view(-1, 1) + shift_y.view(-1, 1, 1)
    if rotation is not None:
        aspect = (width - 1) / (height - 1)
        column_x = column_x - (scale_x * mirrored * sin / aspect).view(-1, 1, 1) * y_H.view(-1, 1)
        row_y = row_y + (scale_y * sin * aspect).view(-1, 1, 1) * x_W
    shape = (len(x_BCHW), len(y_H), len(x_W))
    grid_BHW2 = torch.stack([column_x.expand(shape), row_y.expand(shape)], dim=-1)
    return F.grid_sample(x_BCHW, grid_BHW2, mode="bilinear", padding_mode=outside(config), align_corners=True)


def _places(length: int, size: int | None, like: Tensor) -> Tensor:
    """Return the centres of the pixels along one side of a view of the whole image.

    -1 and 1 are the centres of the image's first and last pixel. The fewer pixels a view has than `length`, the larger
    they are.
    """
    if size is None:
        return torch.linspace(-1, 1, length, device=like.device, dtype=like.dtype)
    centres = (2 * torch.arange(size, device=like.device, dtype=like.dtype) + 1) / size - 1
    return centres * (length / (length - 1))


def _crop_box(
    config: AugmentationConfig, draw: dict[str, Tensor], height: int, width: int, aspect: tuple[float, float]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return height and width as shares of the image, and top and left of the corner in pixels, each (B,)."""
    one, zero = torch.ones_like(draw["area"]), torch.zeros_like(draw["area"])
    if config.crop == "padded":
        return one, one, *padded_shifts(config, draw)
    if config.crop == "none":
        return one, one, zero, zero
    area = config.min_scale + (config.max_scale - config.min_scale) * draw["area"]
    low, high = (math.log(ratio) for ratio in aspect)
    ratio = torch.exp(low + (high - low) * draw["aspect"])
    scale_x = (area * ratio).sqrt().clamp(max=1)
    scale_y = (area / ratio).sqrt().clamp(max=1)
    return scale_y, scale_x, draw["top"] * (1 - scale_y) * height, draw["left"] * (1 - scale_x) * width


def padded_shifts(config: AugmentationConfig, draw: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return how far a padded crop is moved down and to the right, in pixels of the view, each (B,)."""
    steps = 2 * config.padding + 1
    down, right = ((draw[name] * steps).floor().clamp_(max=steps - 1) - config.padding for name in ("top", "left"))
    return down, right


def outside(config: AugmentationConfig) -> str:
    """Return grid_sample's mode for pixels outside the image."""
    if config.crop == "resized" and config.rotation_degrees == 0:
        return "border"  # at most half a pixel is outside; resizing repeats the edge there
    return "reflection" if config.padding_mode == "reflect" else "zeros"


def _stain(x_BCHW: Tensor, config: AugmentationConfig, draw: dict[str, Tensor]) -> Tensor:
    """Vary the amount of each stain in RGB images of stained tissue, and clamp to 0..1.

    The optical density -log x of a pixel is a sum of its stains (Beer and Lambert). Each is multiplied by a factor in
    1 - stain .. 1 + stain, and a small constant amount is added, as in Tellez et al. (2018, 10.1109/TMI.2018.2820199).
    """
    dtype, device = x_BCHW.dtype, x_BCHW.device
    stains_33 = _constant(tuple(_STAINS.flatten().tolist()), device, dtype).view(3, 3)
    inverse_33 = _constant(tuple(torch.linalg.inv(_STAINS).flatten().tolist()), device, dtype).view(3, 3)
    factors_B3 = 1 + config.stain * (2 * torch.stack([draw[f"stain_{i}"] for i in range(3)], dim=1) - 1)
    shifts_B3 = config.stain * _SHIFT_PER_STAIN * (2 * torch.stack([draw[f"shift_{i}"] for i in range(3)], dim=1) - 1)
    density_B3P = -x_BCHW.flatten(2).clamp(min=_LEAST_INTENSITY).log()
    # Densities are rows: d = s M, so s' M = d M^-1 diag(factors) M + shifts M; here transposed for columns of pixels.
    mix_B33 = (inverse_33 * factors_B3[:, None, :]) @ stains_33
    offset_B31 = (shifts_B3 @ stains_33)[:, :, None]
    changed_B3P = torch.baddbmm(offset_B31, mix_B33.transpose(1, 2), density_B3P)
    return (-changed_B3P).exp().clamp_(0, 1).view_as(x_BCHW)


def _colour(x_BCHW: Tensor, config: AugmentationConfig, draw: dict[str, Tensor]) -> Tensor:
    """Apply brightness, contrast, saturation, hue and greyscale, and clamp to 0..1."""
    channels = x_BCHW.shape[1]
    strengths = (config.brightness, config.contrast, *((config.saturation, config.hue) if channels == 3 else ()))
    jittered = config.jitter > 0 and any(strengths)
    if not jittered and (config.greyscale == 0 or channels != 3):
        return x_BCHW
    brightness = _factor("brightness", config.brightness, config, draw)
    contrast = _factor("contrast", config.contrast, config, draw)
    if channels == 1:
        mean = x_BCHW.mean(dim=(1, 2, 3))
        scale, offset = brightness * contrast, brightness * (1 - contrast) * mean
        return torch.addcmul(offset.view(-1, 1, 1, 1), x_BCHW, scale.view(-1, 1, 1, 1)).clamp_(0, 1)
    if channels != 3:  # not colours: each channel keeps its own mean
        mean_BC = x_BCHW.mean(dim=(2, 3))
        scale_B1, offset_BC = (brightness * contrast)[:, None], (brightness * (1 - contrast))[:, None] * mean_BC
        return torch.addcmul(offset_BC[..., None, None], x_BCHW, scale_B1[..., None, None]).clamp_(0, 1)
    flat_BCP = x_BCHW.flatten(2)
    luma_C = _constant(_LUMA, x_BCHW.device, x_BCHW.dtype)
    offset = brightness * (1 - contrast) * (flat_BCP.mean(dim=2) @ luma_C)
    mix_B33 = _chroma_matrix(config, draw, x_BCHW.dtype) * (brightness * contrast).view(-1, 1, 1)
    # Saturation, hue and greyscale do not change greys, so the offset passes through them unchanged.
    return torch.baddbmm(offset.view(-1, 1, 1), mix_B33, flat_BCP).clamp_(0, 1).view_as(x_BCHW)


def _factor(name: str, strength: float, config: AugmentationConfig, draw: dict[str, Tensor]) -> Tensor:
    """Return (B,): uniform in 1 - strength .. 1 + strength for samples whose colours are jittered, else 1."""
    return 1 + (draw["jitter"] < config.jitter) * strength * (2 * draw[name] - 1)


def _chroma_matrix(config: AugmentationConfig, draw: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
    """Return (B, 3, 3): hue after saturation, or the grey of the pixel. Rows sum to 1, so greys do not change."""
    saturation = _factor("saturation", config.saturation, config, draw)
    saturation = torch.where(draw["greyscale"] < config.greyscale, 0.0, saturation)
    turn = (draw["jitter"] < config.jitter) * config.hue * (2 * draw["hue"] - 1) * (2 * math.pi)
    # In YIQ the grey axis is Y; saturation scales the (I, Q) plane and hue rotates it: Y part + cos part + sin part.
    weights_B3 = torch.stack([torch.ones_like(turn), saturation * turn.cos(), saturation * turn.sin()], dim=1)
    return (weights_B3.to(dtype) @ _constant(_chroma_parts(), turn.device, dtype).view(3, 9)).view(-1, 3, 3)


@functools.cache
def _chroma_parts() -> tuple[float, ...]:
    """Return three matrices of RGB (3, 3), row by row.

    They project to the grey axis, project to the (I, Q) plane, and rotate that plane by 90 degrees from red to yellow,
    as in HSV.
    """
    to_yiq, to_rgb = _RGB_TO_YIQ, torch.linalg.inv(_RGB_TO_YIQ)
    grey, plane = torch.outer(to_rgb[:, 0], to_yiq[0]), to_rgb[:, 1:] @ to_yiq[1:]
    turned = torch.outer(to_rgb[:, 1], to_yiq[2]) - torch.outer(to_rgb[:, 2], to_yiq[1])
    return tuple(torch.stack([grey, plane, turned]).flatten().tolist())


def _blur(x_BCHW: Tensor, config: AugmentationConfig, draw: dict[str, Tensor]) -> Tensor:
    """Apply Gaussian blur to the chosen samples, with a kernel of a tenth of the image, as in SimCLR, or 3 pixels.

    All samples are filtered, so that no shape depends on the number of chosen ones; the other samples' kernel is a
    single 1.
    """
    low, high = config.blur_sigma
    sigma_B1 = (low + (high - low) * draw["blur_sigma"]).unsqueeze(1)
    size = max(3, x_BCHW.shape[-1] // 20 * 2 + 1)
    at_S = torch.arange(size, device=x_BCHW.device) - size // 2
    gaussian_BS = torch.softmax(-(at_S**2) / (2 * sigma_B1**2), dim=1)
    chosen_B1 = (draw["blur"] < config.blur).unsqueeze(1)
    kernel_BS = torch.where(chosen_B1, gaussian_BS, (at_S == 0).to(gaussian_BS.dtype)).to(x_BCHW.dtype)
    filtered = _filtered_by_taps if size <= _MOST_TAPS else _filtered_by_convolution
    return filtered(x_BCHW, kernel_BS).clamp_(0, 1)


def _filtered_by_taps(x_BCHW: Tensor, kernel_BS: Tensor) -> Tensor:
    """Filter each sample with its kernel, vertically and horizontally, as a sum of shifted copies."""
    batch, size = kernel_BS.shape
    first, *others = kernel_BS.view(batch, size, 1, 1, 1).unbind(1)
    for dim in (2, 3):
        length, reach = x_BCHW.shape[dim], size // 2
        before, after = x_BCHW.narrow(dim, 1, reach), x_BCHW.narrow(dim, length - 1 - reach, reach)
        padded = torch.cat([before.flip(dim), x_BCHW, after.flip(dim)], dim)  # reflected; faster than F.pad
        x_BCHW = padded.narrow(dim, 0, length) * first
        for start, tap in enumerate(others, 1):
            x_BCHW.addcmul_(padded.narrow(dim, start, length), tap)
    return x_BCHW


def _filtered_by_convolution(x_BCHW: Tensor, kernel_BS: Tensor) -> Tensor:
    """Do the same with a convolution that has one group per channel and sample, for many taps."""
    batch, channels, height, width = x_BCHW.shape
    kernels, size = kernel_BS.repeat_interleave(channels, 0), kernel_BS.shape[1]
    flat = F.pad(x_BCHW.reshape(1, batch * channels, height, width), [size // 2] * 4, mode="reflect")
    flat = F.conv2d(flat, kernels.view(-1, 1, size, 1), groups=batch * channels)
    flat = F.conv2d(flat, kernels.view(-1, 1, 1, size), groups=batch * channels)
    return flat.view(batch, channels, height, width)
