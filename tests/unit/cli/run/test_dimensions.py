"""The notation of a client's dimensions."""

import pytest

from fedssl.cli.run.dimensions import ranges


@pytest.mark.parametrize(
    ("numbers", "text"),
    [((), ""), ((4,), "4"), ((0, 1), "0-1"), ((0, 2, 4), "0, 2, 4"), ((0, 1, 2, 7, 8, 11), "0-2, 7-8, 11")],
)
def test_consecutive_dimensions_are_written_as_ranges(numbers: tuple[int, ...], text: str) -> None:
    assert ranges(numbers) == text
