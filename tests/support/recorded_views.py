"""The views of some batches, recorded and eager, on any device."""

import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import ClassVar

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fedssl.data.image_batches import MakeViews, each_view
from fedssl.data.image_cache.images import ImageBatch
from fedssl.engine import recorded_views
from fedssl.protocol.data import DataConfig


class ViewsProgram(recorded_views._Capture):
    """A recording of views that needs no GPU: torch.fx stands in for the CUDA graph."""

    made: ClassVar[list["ViewsProgram"]] = []

    def __init__(self, batches: Sequence[ImageBatch], data: DataConfig) -> None:
        self._pixels = [each.clone() for each in recorded_views._distinct(batches)]
        self._generator = torch.Generator()
        inside = [ImageBatch(self._pixels[place]) for place in recorded_views._places(batches)]
        program = make_fx(lambda: each_view(inside, data, self._generator))()
        self._views = tuple(torch.empty_like(view) for view in program())
        self._graph = SimpleNamespace(replay=lambda: [*map(torch.Tensor.copy_, self._views, program())])
        self.made.append(self)


STRONG = {"blur": 0.5, "solarize": 0.2, "rotation_degrees": 10, "flip_vertical": 0.5, "stain": 0.1}
DATA = {
    "as by default": DataConfig(channels=3, image_size=8),
    "normalised, all operations": DataConfig(channels=3, image_size=8, mean=(0.5,) * 3, augmentation=STRONG),
    "second view": DataConfig(channels=3, image_size=8, augmentation=STRONG, second_view={"blur": 0.1}),
}


def assert_equal_views(make_views: MakeViews, data: DataConfig, device: str, num_images: int = 4) -> None:
    """Make the views of several whole batches, an incomplete one and a whole one, in two epochs with their own
    seeds.

    Each batch has two views and another stream. Views that were made earlier must not change.
    """
    pixels = [torch.randint(256, (num_images, 3, 8, 8), dtype=torch.uint8, device=device) for _ in range(6)]
    pairs = list(itertools.pairwise(pixels))
    pairs.insert(4, (pixels[0][1:], pixels[1][1:]))
    for seed in (1, 2):
        generators = [torch.Generator(device).manual_seed(seed) for _ in range(2)]
        found, expected = (
            [make([ImageBatch(one), ImageBatch(one), ImageBatch(other)], data, generator) for one, other in pairs]
            for make, generator in zip((make_views, each_view), generators, strict=True)
        )
        for one, other in zip(found, expected, strict=True):
            assert all(map(torch.equal, one, other))
        assert torch.equal(*(torch.rand(3, device=device, generator=generator) for generator in generators))
