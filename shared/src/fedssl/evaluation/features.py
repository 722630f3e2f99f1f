"""Representations of a data set under a frozen encoder."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fedssl.data import ImageData, normalize, random_view, to_float
from fedssl.errors import DataError
from fedssl.precision import exact_float32, exact_layout
from fedssl.protocol.data import AugmentationConfig, DataConfig


def extract_features(
    encoder: nn.Module,
    data: ImageData,
    config: DataConfig,
    device: torch.device | str = "cpu",
    batch_size: int = 512,
    *,
    augmentation: AugmentationConfig | None = None,
    seed: int = 0,
    on_progress: Callable[[float], None] = lambda share: None,
) -> Tensor:
    """Return h of every image: float32 (N, H) on `device`, in the order of the data.

    The encoder must already be on `device`. It runs in eval mode and without gradients; its training flags are restored
    afterwards. It runs in float32, not in bfloat16 or TF32, whose rounding an effective rank would count as dimensions.

    Args:
        encoder: from (B, C, S, S) to (B, H).
        data: images, streamed in batches.
        config: shape and normalisation of the images.
        augmentation: one random view of each image instead of the image itself.
        seed: the seed of the views.
        on_progress: called after every batch with the share of the images that is done.

    Raises:
        DataError: the images do not have the shape of `config` (:func:`fedssl.data.conform` changes it).
    """
    require_shape(data, config)
    generator, layout = torch.Generator().manual_seed(seed), exact_layout(device)
    parts = [torch.zeros(0, device=device)]
    with in_eval_mode(encoder), torch.no_grad(), exact_float32(device):
        for start in range(0, len(data), batch_size):
            # A copy, because the array may be memory-mapped and read-only, which torch does not accept.
            x_BCHW = to_float(torch.tensor(data.images[start : start + batch_size]).to(device))
            if augmentation is not None:
                x_BCHW = random_view(x_BCHW, augmentation, generator)
            h_BH: Tensor = encoder(normalize(x_BCHW, config).contiguous(memory_format=layout))
            parts.append(h_BH.float())
            on_progress(min(1.0, (start + batch_size) / len(data)))
    return torch.cat(parts[1:] or parts)


def require_shape(data: ImageData, config: DataConfig) -> None:
    """Raise DataError unless the images have the shape of `config`."""
    shape = (config.channels, config.image_size, config.image_size)
    if data.images.shape[1:] != shape:
        raise DataError(f"the images have shape {data.images.shape[1:]}, the run's are {shape}: conform them first")


def require_finite(*features: Tensor) -> None:
    """Raise ValueError if representations are not finite: an accuracy computed from them would be meaningless."""
    if not all(bool(each.isfinite().all()) for each in features):
        raise ValueError("the features must be finite: the encoder's training has diverged")


def labels_of(data: ImageData) -> Tensor:
    """Return class numbers (N,) of int64, on the CPU. Raises DataError if the images have no labels."""
    if data.labels is None:
        raise DataError("these images have no labels: an encoder is evaluated by how well its output predicts them")
    return torch.tensor(data.labels)


@contextmanager
def in_eval_mode(module: nn.Module) -> Iterator[None]:
    """Put every part of the module into eval mode inside the block, and restore its mode afterwards."""
    training = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, flag in training.items():
            part.training = flag
