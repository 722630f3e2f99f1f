"""The contrast of the style sheet's colours."""

import re
from pathlib import Path

import pytest

import fedssl_coordinator.dashboard

STATIC = Path(fedssl_coordinator.dashboard.__file__).parent / "static"
STYLES = "".join(path.read_text() for path in STATIC.glob("*.css"))
PALETTES = [
    dict(re.findall(r"--([\w-]+): (#\w{6});", block)) for block in re.findall(r"\{([^{}]*--bg: [^{}]*)\}", STYLES)
]


def _luminance(colour: str) -> float:
    shares = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _contrast(one: str, other: str) -> float:
    low, high = sorted(map(_luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("fill", ["fill", "quiet", "warn-fill", "bad-fill"])
def test_a_bar_has_a_contrast_of_three_to_one_against_its_track_and_its_background(fill: str) -> None:
    assert len(PALETTES) == 3
    for palette in PALETTES:
        for ground in ("line", "surface", "bg"):
            assert _contrast(palette[fill], palette[ground]) >= 3, (palette, ground)


def test_the_marks_of_the_timeline_and_of_its_key_have_three_to_one() -> None:
    drawn = re.findall(r'\b\w: \[(?:\d+, )+"([\w-]+)"\]', (STATIC / "gantt.js").read_text())
    assert len(drawn) == 11
    keys = re.findall(r"\.k-(?:ok|exp|rej|dec|wait|train) \{[^}]*var\(--([\w-]+)\)", STYLES)
    assert len(keys) == 6
    for palette in PALETTES:
        for name in {*drawn, *keys}:
            assert _contrast(palette[name], palette["surface"]) >= 3, (palette, name)
