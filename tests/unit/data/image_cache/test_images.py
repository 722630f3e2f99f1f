"""Reading from a cache gives the same bits, whether streamed or from device memory, whole or as squares."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedssl.data import conform
from fedssl.data.image_batches import ImageBatch, join, random_views, take, take_each
from fedssl.data.image_cache import CachedData, CachedImages, load_cached
from fedssl.data.images import ImageData
from fedssl.errors import DataError
from fedssl.protocol.data import DataConfig, WindowConfig

_CPU = torch.device("cpu")


@pytest.fixture(params=[8, 16])
def cached(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[CachedData, DataConfig]:
    """Return cached images of 8 bits in three channels, or of 16 bits in one."""
    rng = np.random.default_rng(0)
    for number in range(30):
        height, width = rng.integers(20, 60, 2)
        if request.param == 8:
            image = Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8))
        else:
            image = Image.fromarray(rng.integers(0, 4096, (height, width)).astype(np.uint16))
        (tmp_path / "images" / "a").mkdir(parents=True, exist_ok=True)
        image.save(tmp_path / "images" / "a" / f"{number:02}.png")
    window = None if request.param == 8 else WindowConfig(values=(0, 4095))
    data = DataConfig(channels=3 if request.param == 8 else 1, image_size=16, cache_size=24, window=window)
    return load_cached(str(tmp_path / "images"), data, processes=1), data


def test_streamed_and_resident_images_have_the_same_bits(cached: tuple[CachedData, DataConfig]) -> None:
    images, data = cached[0].images, cached[1]
    resident = images.resident(_CPU)
    batches = list(torch.randperm(30, generator=torch.Generator().manual_seed(0)).split(8))
    assert torch.equal(images[:], resident[:])
    for one, other in zip(take_each(images, batches), take_each(resident, batches), strict=True):
        views = [random_views(each, data, torch.Generator().manual_seed(1)) for each in (one, other)]
        assert torch.equal(*views)
        assert views[0].shape == (len(one), data.channels, 16, 16)
        assert views[0].min() >= 0
        assert views[0].max() <= 1
        assert views[0].std() > 0.05


def test_batches_read_ahead_equal_those_read_one_by_one(cached: tuple[CachedData, DataConfig]) -> None:
    images = cached[0].images
    batches = [torch.tensor([3, 1]), torch.tensor([0]), torch.tensor([7, 8, 9])]
    for ahead, indices in zip(take_each(images, batches), batches, strict=True):
        alone = take(images, indices)
        assert torch.equal(ahead.pixels, alone.pixels)
        assert ahead.sizes is not None
        assert alone.sizes is not None
        assert torch.equal(ahead.sizes, alone.sizes)
    assert list(take_each(images, [])) == []


def test_reading_stops_when_the_batches_are_closed(cached: tuple[CachedData, DataConfig]) -> None:
    batches = cached[0].images.batches([torch.tensor([0])] * 100)
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    with pytest.raises(StopIteration):
        next(batches)


def test_squares_equal_those_of_conform(cached: tuple[CachedData, DataConfig]) -> None:
    data, config = cached
    plain = config.model_copy(update={"cache_size": None})
    for number in range(5):
        whole = data.images.batch(torch.tensor([number])).pixels.numpy()
        expected = conform(ImageData(whole), plain).images
        np.testing.assert_array_equal(data.squares(np.array([number])).images, expected)
    assert torch.equal(data.images[torch.tensor([4, 2])], data.images.index_select(0, torch.tensor([4, 2])))
    assert torch.equal(data.images[2:5], data.images[torch.tensor([2, 3, 4])])


def test_a_subset_has_its_images_labels_and_digests(cached: tuple[CachedData, DataConfig]) -> None:
    data = cached[0]
    part = data.subset(np.array([5, 3]))
    assert part.digests == (data.digests[5], data.digests[3])
    assert torch.equal(part.images[:], data.images[torch.tensor([5, 3])])
    assert part.labels is not None
    assert part.labels.tolist() == [0, 0]


@pytest.mark.parametrize("through_parts", [False, True])
def test_pixels_that_changed_on_disk_are_an_error(
    cached: tuple[CachedData, DataConfig], *, through_parts: bool
) -> None:
    images = cached[0].subset(np.array([9, 2, 4])).images
    good = images[:1]
    with images.path.open("r+b") as file:
        file.seek(int(images.offsets[1]))
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))
    used = CachedImages.from_parts(*images.parts()) if through_parts else images
    assert torch.equal(used[:1], good)
    for read in (
        lambda: used[1:2],
        lambda: used.batch(torch.tensor([0, 1])),
        lambda: used.resident(torch.device("cpu")),
    ):
        with pytest.raises(DataError, match="are damaged: remove this folder and start again"):
            read()


def test_parts_give_the_same_images_and_a_replaced_cache_is_refused(cached: tuple[CachedData, DataConfig]) -> None:
    images = cached[0].subset(np.array([9, 2, 4])).images
    values, rows = images.parts()
    assert torch.equal(CachedImages.from_parts(values, rows)[:], images[:])
    images.path.rename(images.path.with_name("kept"))
    images.path.write_bytes(images.path.with_name("kept").read_bytes())
    with pytest.raises(DataError, match="were made again: start again"):
        CachedImages.from_parts(values, rows)


def test_joined_batches_keep_their_images_and_sizes(cached: tuple[CachedData, DataConfig]) -> None:
    images, data = cached[0].images, cached[1]
    squares = ImageBatch(images[:2])
    both = join([take(images, torch.tensor([0, 1])), squares])
    assert both.sizes is not None
    assert both.sizes[2:].tolist() == [[16, 16], [16, 16]]
    assert torch.equal(both.pixels[2:, :, :16, :16], squares.pixels)
    assert not both.pixels[2:, :, 16:].any()
    assert join([squares, squares]).sizes is None
    assert random_views(both, data, torch.Generator().manual_seed(0)).shape == (4, data.channels, 16, 16)
