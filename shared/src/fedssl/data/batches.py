"""The batches of an epoch."""

import torch
from torch import Tensor


def num_batches(num_images: int, batch_size: int, drop_last: bool) -> int:  # noqa: FBT001
    """Return the number of batches of `epoch_batches`. Raises ValueError if `batch_size` is below 2."""
    if batch_size < 2:
        raise ValueError(f"batch_size must be at least 2, got {batch_size}")
    whole, rest = divmod(num_images, batch_size)
    return whole + (rest >= (2 if whole == 0 or not drop_last else batch_size))


def num_trained(num_images: int, batch_size: int, drop_last: bool) -> int:  # noqa: FBT001
    """Return the number of images in the batches of `epoch_batches`."""
    return min(num_images, num_batches(num_images, batch_size, drop_last) * batch_size)


def epoch_batches(
    num_images: int,
    batch_size: int,
    generator: torch.Generator,
    drop_last: bool,  # noqa: FBT001
    device: torch.device | None = None,
) -> list[Tensor]:
    """Return the batches of one epoch, which has every image once, in random order.

    Args:
        num_images: the number of images; with 0 the epoch is empty.
        batch_size: at least 2, because BatchNorm and contrastive losses compare the images of a batch.
        generator: decides the order; one permutation is drawn whatever the other arguments are.
        drop_last: leave out an incomplete last batch, unless it is the only one.
        device: the device of the batches; None means the generator's. The order is copied once per epoch.

    Returns:
        Index tensors (B,) of int64. None has length 1: a single image cannot be trained on, so a client that has no
        more takes no step.

    Raises:
        ValueError: `batch_size` is below 2.
    """
    count = num_batches(num_images, batch_size, drop_last)
    order = torch.randperm(num_images, generator=generator, device=generator.device)
    order = on_device(order, order.device if device is None else device)
    return list(torch.split(order, batch_size))[:count]


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on `device`. The host does not wait for a copy to a GPU, which is made from pinned memory."""
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
