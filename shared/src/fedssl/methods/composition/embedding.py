"""Embeddings for what a part computes from many images at once."""

import copy
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from fedssl.data.augment import normalize, to_float
from fedssl.data.batches import even_batches, on_device
from fedssl.data.image_batches import Images, index_device, random_views, take_each
from fedssl.methods.api import ClientData, Context

_CHUNK = 512


def embed(networks: Sequence[nn.Module], images: Images, ctx: Context) -> torch.Tensor:
    """Return the outputs of `networks`, applied one after the other, for uint8 images (N, C, size, size): float32 (N,
    D).

    The networks run in evaluation mode, so no embedding depends on the other images; their training flags are restored.
    """
    return embed_stages(networks, images, ctx)[-1]


@torch.no_grad()
def embed_stages(networks: Sequence[nn.Module], images: Images, ctx: Context) -> list[torch.Tensor]:
    """Return the outputs of each network in turn, as `embed` computes them."""
    training = {module: module.training for network in networks for module in network.modules()}
    stages: list[list[torch.Tensor]] = [[] for _ in networks]
    try:
        for network in networks:
            network.eval()
        for start in range(0, len(images), _CHUNK):
            x = normalize(to_float(images[start : start + _CHUNK]), ctx.spec.data)
            for network, outputs in zip(networks, stages, strict=True):
                x = network(x)
                outputs.append(x.float())
    finally:
        for module, flag in training.items():
            module.training = flag
    return [torch.cat(outputs) for outputs in stages]


def plain_batches(data: ClientData, ctx: Context) -> Iterator[torch.Tensor]:
    """Yield all images, not augmented, as the encoder takes them, in `even_batches` of about the training's size."""
    for indices in even_batches(len(data), ctx.spec.training.batch_size, index_device(data.images)):
        yield normalize(to_float(data.images[indices]), ctx.spec.data)


@torch.no_grad()
def embed_views(
    networks: Sequence[nn.Module], data: ClientData, num_views: int, purpose: str, ctx: Context
) -> torch.Tensor:
    """Return the outputs of `networks`, float32 (num_views, D), for one augmented view each of `num_views` random
    images. Images repeat if there are fewer.

    As in training, the images of a batch share BatchNorm statistics; the running statistics do not change. `purpose`
    names the random numbers.
    """
    # Drawn on the CPU, so that every device takes the same images.
    order = torch.Generator().manual_seed(ctx.seed(purpose))
    repeats = -(-num_views // len(data))
    chosen = torch.cat([torch.randperm(len(data), generator=order) for _ in range(repeats)])[:num_views]
    generator = ctx.generator(f"{purpose}/views")
    stack = copy.deepcopy(nn.Sequential(*networks)).train()
    num_batches = max(1, num_views // ctx.spec.training.batch_size)  # no batch is smaller than in training
    parts = []
    batches = on_device(chosen, index_device(data.images)).tensor_split(num_batches)
    for images in take_each(data.images, batches):
        parts.append(stack(random_views(images, ctx.spec.data, generator)).float())
    return torch.cat(parts)
