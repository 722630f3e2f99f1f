"""The arguments of `fedssl compare`: methods by name, variants, and changes for all methods or for one."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from types import NoneType
from typing import Any

from fedssl.cli.datasets.fetching import data_folder as known_data_folder
from fedssl.cli.errors import UsageError
from fedssl.cli.specs import apply_change, read_values
from fedssl.errors import SpecError
from fedssl.experiments.overlays import overlay
from fedssl.experiments.variants import Variant, parse_method

_TABLES = ("method", "partition", "cohort", "training", "evaluation")
"""The sections of the spec that a comparison reads, or to which it adds keys, before the spec is validated."""


class ResultFormat(StrEnum):
    """How results are written."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"


def read_variants(
    spec: str, methods: str | None, variants: Sequence[str], changes: Sequence[str]
) -> tuple[dict[str, Any], list[Variant]]:
    """Return the spec's values with the changes for all methods, and the variants with their own. Raises SpecError."""
    base = read_values(spec)
    own = _apply(base, changes)
    names = [text.strip() for text in (methods or "").split(",") if text.strip()]
    if methods is not None and not names:
        raise UsageError(f"--methods {methods}: give methods by name, for example fedbyol,fedsimclr")
    if not names and not variants:
        names = [str((base.get("method") or {}).get("name", "fedalignuniform"))]
    found = [Variant(name, *parse_method(name)) for name in names] + [read_variant(text) for text in variants]
    return base, _with_own(found, own)


def read_rungs(
    ladder: str, setting: str | None, variants: Sequence[str], changes: Sequence[str], data_folder: Path | None
) -> tuple[dict[str, Any], list[Variant], str]:
    """Return a ladder's spec, its rungs and baselines with further variants, and its seeds as text.

    The changes apply as in :func:`read_variants`. A known data set is also found as an image folder or .npz file in the
    folder of data sets. Raises SpecError, and DataError if the data set is missing.
    """
    from fedssl.data.catalogue import KNOWN
    from fedssl.experiments.ladders import read_ladder
    from fedssl.experiments.reproduction import dataset_places

    found = read_ladder(ladder)
    base = overlay(found.setting(setting), {"name": f"{ladder} {setting or next(iter(found.settings))}"})
    own = _apply(base, changes)
    used = [base.get(section) or {} for section in ("partition", "evaluation")]
    sections = [section for section in used if section.get("dataset") in KNOWN]
    places = dataset_places({section["dataset"] for section in sections}, data_folder or known_data_folder())
    for section in sections:
        section["dataset"] = places[section["dataset"]]
    further = [read_variant(text) for text in variants]
    return base, _with_own(found.variants(base) + further, own), ",".join(map(str, found.seeds))


def _apply(base: dict[str, Any], changes: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Apply the changes for all methods to `base`, and return those for one method, by its name.

    Raises SpecError if a section of `base` is something other than a table, which a variant's keys would replace.
    """
    own: dict[str, dict[str, Any]] = {}
    for change in changes:
        target, colon, rest = change.partition(":")
        if colon and "=" not in target:
            apply_change(own.setdefault(target.strip(), {}), rest)
        else:
            apply_change(base, change)
    for section in _TABLES:
        if not isinstance(base.get(section), Mapping | NoneType):
            raise SpecError(f"{section}: must be a table of keys and values (it is {base[section]!r})")
    return own


def _with_own(variants: list[Variant], own: Mapping[str, Mapping[str, Any]]) -> list[Variant]:
    names = [variant.name for variant in variants]
    if unknown := sorted(own.keys() - set(names)):
        raise UsageError(f"--set {unknown[0]}:... is for a method that is not compared; compared are "
                         f"{', '.join(names)}")  # fmt: skip
    return [replace(each, changes=overlay(each.changes, own.get(each.name, {}))) for each in variants]


def read_variant(text: str) -> Variant:
    """Parse NAME=METHOD[:KEY=VALUE,...]. A comma inside brackets or quotes belongs to the value. Raises UsageError."""
    name, equals, rest = text.partition("=")
    method, _, parameters = rest.partition(":")
    if not equals or not name.strip() or not method.strip():
        raise UsageError(f"--variant {text}: write it as NAME=METHOD or NAME=METHOD:KEY=VALUE,KEY=VALUE")
    changes: dict[str, Any] = {}
    for change in split_outside_brackets(parameters):
        apply_change(changes, change)
    return Variant(name.strip(), *parse_method(method), changes=changes)


def split_outside_brackets(text: str) -> list[str]:
    """Split at the commas that are outside brackets and quotes.

    >>> split_outside_brackets('a=1,b=[2,3],c="x,y"')
    ['a=1', 'b=[2,3]', 'c="x,y"']
    """
    parts, depth, quote = [""], 0, ""
    for char in text:
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        elif char in "[{(":
            depth += 1
        elif char in ")}]":
            depth -= 1
        elif char == "," and depth == 0:
            parts.append("")
            continue
        parts[-1] += char
    return [part.strip() for part in parts if part.strip()]
