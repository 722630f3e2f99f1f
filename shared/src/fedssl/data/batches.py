"""The batches of an epoch."""

import torch
from torch import Tensor

from fedssl.errors import DataError


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


def even_batches(num_images: int, batch_size: int, device: torch.device | None = None) -> tuple[Tensor, ...]:
    """Return the indices (B,) of all images in order, in batches of about `batch_size`, on `device` or the CPU.

    There is no batch of a single image: fewer than two images give no batch.
    """
    indices = torch.arange(num_images, device=device)
    return indices.tensor_split(max(1, num_images // batch_size)) if num_images > 1 else ()


def distinct_batches(
    groups: Tensor,
    batch_size: int,
    generator: torch.Generator,
    drop_last: bool,  # noqa: FBT001
    device: torch.device | None = None,
) -> list[Tensor]:
    """Return the batches of one epoch, none of which has two images of a group.

    There are as many as `epoch_batches` gives, and their sizes differ by at most one. A group with more images than
    there are batches has one image in each batch; the generator decides which of its images the epoch leaves out.

    Args:
        groups: int64 (N,) on the CPU, equal for the images of one group.
        batch_size: the largest size of a batch, at least 2.
        generator: decides the order, on the CPU.
        drop_last: leave out what would be an incomplete last batch, unless it is the only one.
        device: the device of the batches; None means the CPU.

    Returns:
        Index tensors (B,) of int64.

    Raises:
        DataError: there are too few groups for two images per batch.
        ValueError: `batch_size` is below 2.
    """
    count = num_batches(len(groups), batch_size, drop_last)
    order = torch.randperm(len(groups), generator=generator)
    if not count:
        return []
    _, group_of = torch.unique(groups[order], return_inverse=True)
    kept = (_number_within(group_of) < count).nonzero().flatten()[: count * batch_size]
    if len(kept) < 2 * count:
        raise DataError(
            f"{count} batches of {len(groups)} images have fewer than two images each, if none has two of one group "
            "(data.distinct_groups): this client has too few groups. Raise training.batch_size, or leave "
            "distinct_groups out"
        )
    # The images of a group, at most as many as there are batches, follow each other and go to the batches in turn.
    grouped = kept[torch.argsort(group_of[kept], stable=True)]
    batches = [order[grouped[first::count].sort().values] for first in range(count)]
    return batches if device is None else [on_device(batch, device) for batch in batches]


def _number_within(group_of: Tensor) -> Tensor:
    """Return the number of each element among those of its group, from 0, in their order (N,)."""
    by_group = torch.argsort(group_of, stable=True)
    sizes = torch.bincount(group_of)
    starts = (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    numbers = torch.empty_like(by_group)
    numbers[by_group] = torch.arange(len(group_of)) - starts
    return numbers


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on `device`. The host does not wait for a copy to a GPU, which is made from pinned memory."""
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
