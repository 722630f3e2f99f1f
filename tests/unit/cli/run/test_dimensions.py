"""How a client's dimensions are written."""

import pytest

from fedssl.cli.run.dimensions import ranges


@pytest.mark.parametrize(
    ("numbers", "text"),
    [((), ""), ((4,), "4"), ((0, 1), "0-1"), ((0, 2, 4), "0, 2, 4"), ((0, 1, 2, 7, 8, 11), "0-2, 7-8, 11")],
)
def test_neighbours_are_written_together(numbers: tuple[int, ...], text: str) -> None:
    assert ranges(numbers) == text
