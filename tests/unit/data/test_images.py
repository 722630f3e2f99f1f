"""Equal images give equal results in torch, however the array was created."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from fedssl.data import ImageData, conform
from fedssl.data.images import prepare, with_common_classes
from fedssl.errors import DataError
from fedssl.protocol.data import DataConfig, WindowConfig

Array = NDArray[np.uint8]
LAYOUTS: dict[str, Callable[[Array], Array]] = {
    "as it is": lambda images: images,
    "grey with a new axis": lambda images: np.ascontiguousarray(images[:, 0])[:, None],
    "channels last": lambda images: np.ascontiguousarray(images.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2),
    "every second of many": lambda images: np.repeat(images, 2, axis=0)[::2],
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_is_converted_to_one_memory_layout(name: str) -> None:
    images = np.random.default_rng(0).integers(0, 256, (6, 1, 12, 12), np.uint8)
    convolution = nn.Conv2d(1, 8, 3, stride=2, padding=1).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    expected = convolution(torch.from_numpy(images).float())
    data = ImageData(LAYOUTS[name](images))
    for found in (data, data.subset(np.arange(6))):
        assert found.images.strides == (144, 144, 12, 1)
        h = convolution(torch.from_numpy(found.images).float())
        assert (h.stride(), torch.equal(h, expected)) == (expected.stride(), True)


def test_an_array_that_is_already_in_order_is_not_copied() -> None:
    images = np.zeros((6, 3, 12, 12), np.uint8)
    assert np.shares_memory(ImageData(images).images, images)


def test_grey_images_of_the_right_size_become_three_equal_channels() -> None:
    grey = np.arange(2 * 8 * 8, dtype=np.uint8).reshape(2, 1, 8, 8)
    conformed = conform(ImageData(grey), DataConfig(channels=3, image_size=8)).images
    assert np.array_equal(conformed, np.repeat(grey, 3, axis=1))


def test_registered_images_are_windowed_before_they_are_scaled() -> None:
    images = ImageData(np.random.default_rng(0).integers(0, 256, (3, 1, 20, 20), np.uint8))
    whole = DataConfig(channels=1, image_size=20, window=WindowConfig(values=(50, 150)))
    expected = np.rint(np.clip((images.images.astype(float) - 50) / 100, 0, 1) * 32_767)
    assert np.abs(prepare(images, whole).images - expected).max() <= 1
    small = DataConfig(channels=1, image_size=10, window=WindowConfig(values=(50, 150)))
    assert np.array_equal(prepare(images, small).images, conform(prepare(images, whole), small).images)


def test_a_window_beyond_8_bits_is_refused_for_registered_images() -> None:
    data = DataConfig(channels=1, image_size=8, window=WindowConfig(values=(0, 4095)))
    with pytest.raises(DataError, match="images have 8 bits per value: the window of the spec is from 0 to 4,095"):
        prepare(ImageData(np.zeros((1, 1, 8, 8), np.uint8)), data)


def test_data_sets_with_common_classes_keep_their_groups() -> None:
    pixels, groups = np.zeros((2, 1, 8, 8), np.uint8), np.array([4, 4])
    first = ImageData(pixels, np.array([0, 1]), ("a", "c"), groups=groups)
    second = ImageData(pixels, np.array([0, 0]), ("b",))
    found = with_common_classes([first, second])
    assert [each.labels.tolist() for each in found if each.labels is not None] == [[0, 2], [1, 1]]
    assert [each.groups is groups for each in found] == [True, False]
    [unlabelled, _] = with_common_classes([first, ImageData(pixels)])
    assert (unlabelled.labels, unlabelled.groups is groups) == (None, True)
