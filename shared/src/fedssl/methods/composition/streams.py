"""The further image streams that a batch may contain besides its views, with one augmented image per image.

- `references`: as many other random images of the client, from a second pass that is shuffled independently (FedX);
- `rotated`: the batch's own images in one more view, in quarter turns (Orchestra); `quarter_turns` states how far;
- `public`: as many random public images (FedCA).
"""

from collections.abc import Callable

import torch

from fedssl.data.batches import distinct_batches, epoch_batches, on_device
from fedssl.data.image_batches import index_device, take
from fedssl.data.image_cache.images import ImageBatch
from fedssl.errors import DataError, MethodError
from fedssl.methods.api import ClientData, Context

REFERENCES, ROTATED, PUBLIC = "references", "rotated", "public"

Draw = Callable[[int, torch.Tensor], dict[str, ImageBatch]]
"""Returns images by stream, from the number of the epoch's images before a batch and the batch's indices (B,)."""


def draw_batches(data: ClientData, generator: torch.Generator, ctx: Context) -> list[torch.Tensor]:
    """Return the indices of one epoch's batches, drawn as the spec's `data.distinct_groups` requires.

    `generator` is on the CPU. Raises DataError if the images lack the groups that the spec asks for.
    """
    training, place = ctx.spec.training, index_device(data.images)
    if not ctx.spec.data.distinct_groups:
        batches = epoch_batches(len(data), training.batch_size, generator, training.drop_last, place)
    elif data.groups is None:
        raise DataError(
            "these images have no groups, which data.distinct_groups needs: leave it out, or use DICOM files, an array "
            "`groups` in the .npz file, or a file of labels with a column `group`"
        )
    else:
        batches = distinct_batches(data.groups, training.batch_size, generator, training.drop_last, place)
    return batches[: training.num_steps(len(batches))]


def draw_streams(streams: frozenset[str], data: ClientData, epoch: int, ctx: Context) -> Draw:
    """Return a function that draws the named streams for the batches of one epoch, in the order of the names."""
    # Drawn on the CPU, so that every device sees the images in the same order, and for the whole epoch at once.
    references = public = torch.empty(0, dtype=torch.int64)
    if REFERENCES in streams:
        order = torch.Generator().manual_seed(ctx.seed(f"references/{epoch}"))
        if batches := draw_batches(data, order, ctx):
            references = torch.cat(batches)
    if PUBLIC in streams:
        if ctx.public is None:
            raise MethodError("the method trains on public images, and the spec names none in `public_data`")
        order = torch.Generator().manual_seed(ctx.seed(f"public/{epoch}"))
        chosen = torch.randint(len(ctx.public), (len(data),), generator=order)
        public = on_device(chosen, index_device(ctx.public.images))

    def draw(num_drawn: int, indices: torch.Tensor) -> dict[str, ImageBatch]:
        batch = slice(num_drawn, num_drawn + len(indices))
        images: dict[str, ImageBatch] = {}
        if ctx.public is not None and PUBLIC in streams:
            images[PUBLIC] = take(ctx.public.images, public[batch])
        if REFERENCES in streams:
            images[REFERENCES] = take(data.images, references[batch])
        if ROTATED in streams:
            images[ROTATED] = take(data.images, indices)
        return images

    return draw


def quarter_turns(num_images: int, device: torch.device) -> torch.Tensor:
    """Return how far each image of `rotated` is turned, in quarters: 0, 1, 2, 3, 0, ... in the batch's (random)
    order."""
    return torch.arange(num_images, device=device) % 4


def turned(images_BCHW: torch.Tensor) -> torch.Tensor:
    """Return square images, turned by their `quarter_turns`."""
    result = images_BCHW.clone()
    for quarters in range(1, 4):
        result[quarters::4] = torch.rot90(images_BCHW[quarters::4], quarters, dims=(2, 3))
    return result
