"""Build specs from layers: nested tables of keys and values, each of which overrides the ones before."""

import copy
import functools
from collections.abc import Iterator, Mapping
from typing import Any

from fedssl.protocol.runs import RunSpec

Values = dict[str, Any]


def overlay(base: Mapping[str, Any], *changes: Mapping[str, Any]) -> Values:
    """Return a copy of `base` with the changes applied in turn: tables are merged by key, anything else is replaced.

    A table with another `name` replaces the whole table, because the keys of one method mean nothing to another.

    >>> overlay({"method": {"name": "fedu", "mu": 1}, "seed": 0}, {"method": {"name": "fedema"}})
    {'method': {'name': 'fedema'}, 'seed': 0}
    >>> overlay({"training": {"batch_size": 128, "local_epochs": 5}}, {"training": {"batch_size": 64}})
    {'training': {'batch_size': 64, 'local_epochs': 5}}
    """
    return copy.deepcopy(functools.reduce(_merged, changes, dict(base)))


def _merged(base: Mapping[str, Any], change: Mapping[str, Any]) -> Values:
    """Return `base` with `change` applied. What only one of them has is shared with it."""
    merged = dict(base)
    for key, value in change.items():
        below = merged.get(key)
        renamed = isinstance(value, Mapping) and isinstance(below, dict) and value.get("name") not in (
            None, below.get("name")
        )  # fmt: skip
        if isinstance(value, Mapping) and isinstance(below, dict) and not renamed:
            merged[key] = _merged(below, value)
        else:
            merged[key] = value
    return merged


def changed(spec: RunSpec, values: Values) -> RunSpec:
    """Return the spec with some of its values changed. Raises pydantic's error if the result is not a valid spec."""
    return RunSpec.model_validate(overlay(spec.model_dump(mode="json"), values))


def differences(first: Mapping[str, Any], second: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the keys whose values differ, as written in a spec, with both values; None stands for a missing key.

    >>> list(differences({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}}))
    [('a.c', 2, 3)]
    """
    for key in sorted(first.keys() | second.keys()):
        before, after = first.get(key), second.get(key)
        place = f"{path}{key}"
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            yield from differences(before, after, f"{place}.")
        elif before != after:
            yield place, before, after
