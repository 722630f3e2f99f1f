"""Windows: hand calculations of the standard's function, percentiles, whole ranges, and the errors."""

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from fedssl.data import to_float, window
from fedssl.data.windowing import NeedsWindow, quantised, range_of, to_unit, with_channels
from fedssl.protocol.data import DataConfig, WindowConfig


def _unit(numbers: object, dtype: type = np.uint16, **config: object) -> list[float]:
    pixels = np.array(numbers, dtype).reshape(1, -1, 1)
    found = to_unit(pixels, WindowConfig.model_validate(config), range_of(pixels.dtype))
    return found.reshape(-1).tolist()


def test_window_is_the_linear_function_of_the_standard() -> None:
    """The example of PS3.3 C.11.2.1.2.1: c = 2048, w = 4096 maps 0..4,095 to 0..1; c = 2048, w = 1 is a threshold."""
    assert window([-1, 0, 4095, 4096], 2048, 4096).tolist() == [0, 0, 1, 1]
    np.testing.assert_allclose(window([1, 2047, 4094], 2048, 4096), [1 / 4095, 2047 / 4095, 4094 / 4095], rtol=1e-12)
    assert window([2047, 2047.5, 2048], 2048, 1).tolist() == [0, 0, 1]
    np.testing.assert_allclose(window([[-1024, 0], [1, 50]], 0, 100), [[0, 50 / 99], [51 / 99, 1]], atol=1e-12)


@pytest.mark.parametrize(("center", "width"), [(0, 0.5), (0, 0), (0, -3), (float("nan"), 2), (0, float("inf"))])
def test_widths_below_one_and_infinite_numbers_are_refused(center: float, width: float) -> None:
    with pytest.raises(ValueError, match="finite center and a width of at least 1"):
        window([1, 2], center, width)


def test_values_percentiles_and_stored_ranges_match_hand_calculations() -> None:
    assert _unit([0, 100, 150, 200, 999], values=(100, 200)) == [0, 0, 0.5, 1, 1]
    assert _unit([-0.5, 0.25, 1], np.float32, values=(0, 1)) == [0, 0.25, 1]
    assert _unit([10, 20, 30, 40, 50], percentiles=(0, 100)) == [0, 0.25, 0.5, 0.75, 1]
    assert _unit([10, 20, 30, 40, 50], percentiles=(25, 75)) == [0, 0, 0.5, 1, 1]
    assert _unit([7, 7, 7], percentiles=(1, 99)) == [0, 0, 0]
    assert _unit([0, 65_535], stored=True) == [0, 1]
    assert _unit([-32_768, 32_767], np.int16, stored=True) == [0, 1]
    assert _unit([-161, 240], np.int16, center=40, width=400) == [0, 1]


@pytest.mark.parametrize(("dtype", "largest"), [(np.float32, 3e38), (np.float64, 1.5e308)])
def test_a_range_may_exceed_the_largest_number_of_its_type(dtype: type, largest: float) -> None:
    assert _unit([-largest, 0, largest], dtype, percentiles=(0, 100)) == [0, 0.5, 1]
    assert _unit([-largest, 0, largest], dtype, values=(-largest, largest)) == [0, 0.5, 1]


def test_percentiles_can_be_computed_per_channel() -> None:
    pixels = np.stack([np.arange(5), 1000 * np.arange(5)], axis=-1).astype(np.uint16)[np.newaxis]
    together = to_unit(pixels, WindowConfig(percentiles=(0, 100)), None)
    apart = to_unit(pixels, WindowConfig(percentiles=(0, 100), per_channel=True), None)
    assert together[0, :, 0].max() <= 0.001
    assert apart[0].tolist() == [[value, value] for value in (0, 0.25, 0.5, 0.75, 1)]


def test_values_that_cannot_be_windowed_are_refused() -> None:
    with pytest.raises(NeedsWindow, match=r"uint16: choose which values .* \[data\.window\]"):
        to_unit(np.zeros((2, 2, 1), np.uint16), None, (0, 65_535))
    with pytest.raises(ValueError, match="does not declare"):
        _unit([0.5], np.float32, stored=True)
    with pytest.raises(ValueError, match="not finite numbers"):
        _unit([0.5, np.nan], np.float32, values=(0, 1))


def test_values_of_16_bits_are_not_reduced_to_8() -> None:
    unit = np.linspace(0, 1, 5000, dtype=np.float32)
    pixels = quantised(unit, 16)
    assert pixels.dtype == np.int16
    assert len(np.unique(pixels)) == 5000
    np.testing.assert_allclose(to_float(torch.from_numpy(pixels)).numpy(), unit, atol=0.5 / 32_767 + 1e-7)
    assert np.array_equal(quantised(unit, 8), np.rint(unit * 255).astype(np.uint8))


def test_only_grey_and_rgb_are_converted_to_each_other() -> None:
    grey = np.full((2, 2, 1), 0.5, np.float32)
    assert with_channels(grey, 3).shape == (2, 2, 3)
    assert np.allclose(with_channels(with_channels(grey, 3), 1), grey)
    with pytest.raises(ValueError, match=r"2 channels, and the run needs 3"):
        with_channels(np.zeros((2, 2, 2), np.float32), 3)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "one of percentiles, values, center with width, stored = true, or voi = true"),
        ({"stored": True, "values": (0, 1)}, "one of percentiles"),
        ({"center": 40}, "belong together"),
        ({"center": 40, "width": 0.5}, "greater than or equal to 1"),
        ({"values": (5, 5)}, "the smaller first"),
        ({"percentiles": (99, 1)}, "the smaller first"),
        ({"percentiles": (0, 101)}, "less than or equal to 100"),
        ({"values": (0, 1), "per_channel": True}, "is for percentiles"),
        ({"values": (0, 1), "bits": 12}, "8 or 16"),
    ],
)
def test_invalid_windows_are_refused(config: dict[str, object], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        WindowConfig.model_validate(config)


def test_a_spec_without_a_window_has_no_window_key() -> None:
    assert "window" not in DataConfig().model_dump()
    assert DataConfig.model_validate({"window": {"stored": True}}).model_dump()["window"]["stored"] is True
