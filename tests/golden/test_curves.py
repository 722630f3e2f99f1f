"""Three rounds of every method give the numbers that are in git, so that a change of them is noticed and documented."""

from pathlib import Path
from typing import Any

import pytest

from fedssl.protocol.methods import METHOD_CONFIGS
from golden import curve
from golden.specs import CURVES, NUM_ROUNDS, spec_of, write_data
from support.methods import methods_of_this_run


@pytest.mark.parametrize("name", methods_of_this_run(CURVES))
def test_three_rounds_reproduce_the_golden_curve(name: str, rewrites: bool, tmp_path: Path) -> None:  # noqa: FBT001
    path = curve.FOLDER / f"{name}.json"
    write_data(tmp_path)
    found = curve.draw(spec_of(name), tmp_path)
    if rewrites:
        curve.write(path, found)
    assert curve.differences(curve.read(path), found) == []


def test_every_curve_has_three_rounds() -> None:
    assert {name: spec_of(name).num_rounds for name in CURVES} == dict.fromkeys(CURVES, NUM_ROUNDS)


def test_every_curve_file_belongs_to_a_curve() -> None:
    assert sorted(path.name for path in curve.FOLDER.iterdir()) == sorted(f"{name}.json" for name in CURVES)


def _parts(part: str) -> set[str]:
    """Return the names that the spec's schema knows for one part of a method."""
    fields = METHOD_CONFIGS["fedsimclr"].model_json_schema()["properties"]
    schema = fields[part].get("items", fields[part])
    return set(schema["discriminator"]["mapping"])


@pytest.mark.parametrize("part", ["add_ons", "merge", "reducer"])
def test_every_part_occurs_in_a_curve(part: str) -> None:
    def used(name: str) -> list[Any]:
        chosen = spec_of(name).method.model_dump()[part]
        return [each["name"] for each in (chosen if isinstance(chosen, (list, tuple)) else [chosen])]

    assert _parts(part) == {each for name in CURVES for each in used(name)}


def test_every_method_has_its_own_curve() -> None:
    assert {name: spec_of(name).method.name for name in METHOD_CONFIGS} == {name: name for name in METHOD_CONFIGS}
