"""The further image streams that a batch may bring beside its views, one augmented image each.

- `references`: as many other random images of the client, from a second pass that is shuffled independently (FedX);
- `rotated`: the batch's own images in one more view, turned by quarter turns (Orchestra); `quarter_turns` says how far;
- `public`: as many random images of those that everybody holds (FedCA).
"""

from collections.abc import Callable

import torch

from fedssl.artifacts.tensors import Tensors
from fedssl.errors import MethodError
from fedssl.methods.api import ClientData, Context

REFERENCES, ROTATED, PUBLIC = "references", "rotated", "public"

Draw = Callable[[int, torch.Tensor], Tensors]
"""From a batch's number in the epoch and its indices (B,) to uint8 images (B, C, size, size) by stream."""


def draw_streams(streams: frozenset[str], data: ClientData, epoch: int, ctx: Context) -> Draw:
    """Draws the named streams for the batches of one epoch, in the order of the names."""
    batch_size = ctx.spec.training.batch_size
    # Drawn on the CPU, so that every device sees the images in one order.
    shuffled = torch.randperm(len(data), generator=torch.Generator().manual_seed(ctx.seed(f"references/{epoch}")))
    public_order = torch.Generator().manual_seed(ctx.seed(f"public/{epoch}"))

    def public(indices: torch.Tensor) -> torch.Tensor:
        if ctx.public is None:
            raise MethodError("the method trains on public images, and the spec names none in `public_data`")
        chosen = torch.randint(len(ctx.public), (len(indices),), generator=public_order)
        return ctx.public.images[chosen.to(ctx.public.images.device)]

    def draw(number: int, indices: torch.Tensor) -> Tensors:
        device = data.images.device
        images: Tensors = {}
        if PUBLIC in streams:
            images[PUBLIC] = public(indices)
        if REFERENCES in streams:
            images[REFERENCES] = data.images[shuffled.roll(-number * batch_size)[: len(indices)].to(device)]
        if ROTATED in streams:
            images[ROTATED] = data.images[indices.to(device)]
        return images

    return draw


def quarter_turns(num_images: int, device: torch.device) -> torch.Tensor:
    """How far each image of `rotated` is turned, in quarters: 0, 1, 2, 3, 0, ... in the batch's (random) order."""
    return torch.arange(num_images, device=device) % 4


def turned(images_BCHW: torch.Tensor) -> torch.Tensor:
    """Square images, turned by their `quarter_turns`."""
    result = images_BCHW.clone()
    for quarters in range(1, 4):
        result[quarters::4] = torch.rot90(images_BCHW[quarters::4], quarters, dims=(2, 3))
    return result
