"""The views of whole batches on a GPU, captured once as a CUDA graph and then replayed.

Views are about a hundred small kernels. The host needs about a millisecond to launch them, which is longer than a small
network's captured step takes. Replayed, they are one launch, and the same bits: a replay draws the numbers that the
generator would have given, and advances it.
"""

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from fedssl.data.image_batches import each_view
from fedssl.data.image_cache.images import ImageBatch
from fedssl.engine.cuda_graphs import recording
from fedssl.protocol.data import DataConfig

NUM_EAGER_BATCHES = 2
"""Eager batches before the capture, so that libraries are initialised and constants are on the device."""
MOST_NUMBERS = 2**24
"""The most pixels times channels of all views of a batch. Larger views take longer than their launches, and much
memory."""


class RecordedViews:
    """Makes the views of one spec's batches: `each_view`, replayed if that is possible."""

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size
        self._can_record = True
        self._key: tuple[object, ...] | None = None
        self._num_eager = 0
        self._capture: _Capture | None = None

    def __call__(
        self, batches: Sequence[ImageBatch], data: DataConfig, generator: torch.Generator
    ) -> tuple[Tensor, ...]:
        """Return what :func:`each_view` returns."""
        if not self._can_record or not self._suits(batches):
            return each_view(batches, data, generator)
        key = (data, _places(batches), *((each.shape, each.dtype) for each in _distinct(batches)))
        if key != self._key:
            self._key, self._num_eager, self._capture = key, 0, None
        if self._num_eager < NUM_EAGER_BATCHES:
            self._num_eager += 1
            return each_view(batches, data, generator)
        if self._capture is None:
            try:
                self._capture = _Capture(batches, data)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                self._can_record = False
                warnings.warn(f"the views cannot be recorded and are made eagerly: {error}", stacklevel=2)
                return each_view(batches, data, generator)
        return self._capture.replay(batches, generator)

    def _suits(self, batches: Sequence[ImageBatch]) -> bool:
        """Return whether the batches are whole, of images of one size, and small."""
        is_whole = all(len(each) == self._batch_size and each.sizes is None for each in batches)
        return is_whole and sum(each.pixels.numel() for each in batches) <= MOST_NUMBERS


class _Capture:
    """The views of one batch as a CUDA graph, with memory for its pixels and a generator of its own."""

    def __init__(self, batches: Sequence[ImageBatch], data: DataConfig) -> None:
        self._pixels = [each.clone() for each in _distinct(batches)]
        self._generator = torch.Generator(self._pixels[0].device)
        self._graph = torch.cuda.CUDAGraph()
        inside = [ImageBatch(self._pixels[place]) for place in _places(batches)]
        with recording(self._graph, [self._generator]):
            self._views = each_view(inside, data, self._generator)

    def replay(self, batches: Sequence[ImageBatch], generator: torch.Generator) -> tuple[Tensor, ...]:
        """Return copies, because the next replay overwrites the views."""
        for place, pixels in zip(self._pixels, _distinct(batches), strict=True):
            place.copy_(pixels)
        self._generator.set_state(generator.get_state())
        self._graph.replay()
        generator.set_state(self._generator.get_state())
        return tuple(view.clone() for view in self._views)


def _distinct(batches: Sequence[ImageBatch]) -> list[Tensor]:
    """Return the pixels of the batches, each tensor once: the views of a batch are made of the same pixels."""
    return list({id(each.pixels): each.pixels for each in batches}.values())


def _places(batches: Sequence[ImageBatch]) -> tuple[int, ...]:
    """Return where each batch's pixels are in `_distinct`."""
    numbers = {id(pixels): number for number, pixels in enumerate(_distinct(batches))}
    return tuple(numbers[id(each.pixels)] for each in batches)
