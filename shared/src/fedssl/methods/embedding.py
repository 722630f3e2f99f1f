"""Embeddings for what a part computes from many images at once."""

import copy
from collections.abc import Sequence

import torch
from torch import nn

from fedssl.data.augment import normalize, random_view, to_float
from fedssl.methods.api import ClientData, Context

_CHUNK = 512


@torch.no_grad()
def embed(networks: Sequence[nn.Module], images: torch.Tensor, ctx: Context) -> torch.Tensor:
    """What `networks`, one on the other, make of uint8 images (N, C, size, size): float32 (N, D) on their device.

    In evaluation mode, so that no embedding depends on the other images; the training flags are as before afterwards.
    """
    stack = nn.Sequential(*networks)
    training = {module: module.training for module in stack.modules()}
    stack.eval()
    try:
        chunks = (images[start : start + _CHUNK] for start in range(0, len(images), _CHUNK))
        parts = [stack(normalize(to_float(chunk), ctx.spec.data)).float() for chunk in chunks]
    finally:
        for module, flag in training.items():
            module.training = flag
    return torch.cat(parts)


@torch.no_grad()
def embed_views(
    networks: Sequence[nn.Module], data: ClientData, num_views: int, purpose: str, ctx: Context
) -> torch.Tensor:
    """What `networks` make of one augmented view each of `num_views` random images, repeated where there are fewer.

    As in training, where the images of a batch share BatchNorm statistics; the running ones do not move. Float32
    (num_views, D). `purpose` names the random numbers.
    """
    # Drawn on the CPU, so that every device takes the same images.
    order = torch.Generator().manual_seed(ctx.seed(purpose))
    repeats = -(-num_views // len(data))
    chosen = torch.cat([torch.randperm(len(data), generator=order) for _ in range(repeats)])[:num_views]
    generator = ctx.generator(f"{purpose}/views")
    stack = copy.deepcopy(nn.Sequential(*networks)).train()
    num_batches = max(1, num_views // ctx.spec.training.batch_size)  # none is smaller than in training
    parts = []
    for indices in chosen.tensor_split(num_batches):
        images = to_float(data.images[indices.to(data.images.device)])
        views = random_view(images, ctx.spec.data.augmentation, generator)
        parts.append(stack(normalize(views, ctx.spec.data)).float())
    return torch.cat(parts)
