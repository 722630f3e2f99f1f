"""Representations of a labelled data set under a frozen encoder."""

import torch
from torch import Tensor, nn

from fedssl.data import ImageData, normalize, to_float
from fedssl.errors import DataError
from fedssl.protocol.data import DataConfig


def extract_features(
    encoder: nn.Module,
    data: ImageData,
    config: DataConfig,
    device: torch.device | str = "cpu",
    batch_size: int = 512,
) -> Tensor:
    """h of every image: float32 (N, H) on the CPU, in the order of the data.

    Images are normalised as in training but not augmented. The encoder runs in eval mode, without gradients, on
    `device`, where it must already be; its training flags are as before afterwards.

    Raises:
        DataError: the images do not have the shape that `config` says (:func:`fedssl.data.conform` gives it to them).
    """
    shape = (config.channels, config.image_size, config.image_size)
    if data.images.shape[1:] != shape:
        raise DataError(f"the images have shape {data.images.shape[1:]}, the run's are {shape}: conform them first")
    training = {module: module.training for module in encoder.modules()}
    encoder.eval()
    parts = [torch.zeros(0)]
    try:
        with torch.no_grad():
            for start in range(0, len(data), batch_size):
                # A copy: the array may be memory-mapped and read-only, which torch does not take.
                pixels = torch.tensor(data.images[start : start + batch_size]).to(device)
                h_BH: Tensor = encoder(normalize(to_float(pixels), config))
                parts.append(h_BH.to("cpu", torch.float32))
    finally:
        for module, flag in training.items():
            module.training = flag
    return torch.cat(parts[1:] or parts)
