"""The contrast of the style sheet's colours."""

import re
from pathlib import Path

import pytest

import fedssl_coordinator.dashboard

TOKENS = (Path(fedssl_coordinator.dashboard.__file__).parent / "static" / "tokens.css").read_text()
PALETTES = [
    dict(re.findall(r"--([\w-]+): (#\w{6});", block)) for block in re.findall(r"\{([^{}]*--bg[^{}]*)\}", TOKENS)
]


def _luminance(colour: str) -> float:
    shares = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("fill", ["fill", "quiet", "warn-fill", "bad-fill"])
def test_a_bar_has_a_contrast_of_three_to_one_against_its_track_and_its_background(fill: str) -> None:
    assert len(PALETTES) == 3
    for palette in PALETTES:
        for ground in ("line", "surface", "bg"):
            low, high = sorted(_luminance(palette[name]) for name in (fill, ground))
            assert (high + 0.05) / (low + 0.05) >= 3, (palette, ground)
