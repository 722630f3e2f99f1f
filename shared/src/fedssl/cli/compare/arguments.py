"""Reading what `fedssl compare` is to compare: methods by name, variants, and changes for all methods or for one."""

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

from fedssl.cli.errors import UsageError
from fedssl.cli.specs import apply_change, read_values
from fedssl.experiments.overlays import overlay
from fedssl.experiments.variants import Variant, parse_method


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
    own: dict[str, dict[str, Any]] = {}
    for change in changes:
        target, colon, rest = change.partition(":")
        if colon and "=" not in target:
            apply_change(own.setdefault(target.strip(), {}), rest)
        else:
            apply_change(base, change)
    found: list[tuple[str, str, dict[str, Any]]] = [
        (text.strip(), text, {}) for text in (methods or "").split(",") if text.strip()
    ]
    found += [_variant(text) for text in variants]
    if not found:
        method = str((base.get("method") or {}).get("name", "fedalignuniform"))
        found = [(method, method, {})]
    if unknown := sorted(own.keys() - {name for name, _, _ in found}):
        raise UsageError(f"--set {unknown[0]}:... is for a method that is not compared; compared are "
                         f"{', '.join(name for name, _, _ in found)}")  # fmt: skip
    return base, [
        Variant(name, *parse_method(method), changes=overlay(changed, own.get(name, {})))
        for name, method, changed in found
    ]


def _variant(text: str) -> tuple[str, str, dict[str, Any]]:
    """Parse NAME=METHOD[:KEY=VALUE,...]. A comma inside brackets or quotes belongs to the value."""
    name, equals, rest = text.partition("=")
    method, _, parameters = rest.partition(":")
    if not equals or not name.strip() or not method.strip():
        raise UsageError(f"--variant {text}: write it as NAME=METHOD or NAME=METHOD:KEY=VALUE,KEY=VALUE")
    changes: dict[str, Any] = {}
    for change in split_outside_brackets(parameters):
        apply_change(changes, change)
    return name.strip(), method, changes


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
