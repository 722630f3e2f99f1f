"""How an epoch is cut into batches."""

import torch
from torch import Tensor


def epoch_batches(num_images: int, batch_size: int, generator: torch.Generator, drop_last: bool) -> list[Tensor]:  # noqa: FBT001
    """One epoch: every image once, in random order.

    Args:
        num_images: how many images there are; with none the epoch is empty.
        batch_size: at least 2, since BatchNorm and contrastive losses compare the images of a batch.
        generator: decides the order; one permutation is drawn whatever the other arguments are.
        drop_last: leave an incomplete last batch out, unless it is the only one.

    Returns:
        Index tensors (B,) of int64 on the generator's device. None has length 1, unless the client has one image only:
        a last batch of one image is left out even without `drop_last`, as it could not be trained on.

    Raises:
        ValueError: `batch_size` is below 2.
    """
    if batch_size < 2:
        raise ValueError(f"batch_size must be at least 2, got {batch_size}")
    order = torch.randperm(num_images, generator=generator, device=generator.device)
    batches = [order[start : start + batch_size] for start in range(0, num_images, batch_size)]
    if len(batches) > 1 and len(batches[-1]) < (batch_size if drop_last else 2):
        batches.pop()
    return batches
