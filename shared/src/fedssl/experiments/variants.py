"""The variants of a comparison: methods by name, methods with add-ons, and methods with other parameters."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any, TypeVar, get_args

from pydantic import ValidationError

from fedssl.errors import SpecError
from fedssl.experiments.overlays import Values, overlay
from fedssl.protocol.explanation import explain
from fedssl.protocol.methods import METHOD_CONFIGS
from fedssl.protocol.methods.add_ons import AnyAddOn
from fedssl.protocol.runs import RunSpec

ADD_ONS: dict[str, type] = {kind.model_fields["name"].default: kind for kind in get_args(get_args(AnyAddOn)[0])}
NUM_EVALUATIONS = 10
LOCAL_ONLY, CENTRALISED = "local-only", "centralised"

T = TypeVar("T")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,59}")


@dataclass(frozen=True, slots=True)
class Variant:
    """One method of a comparison, further add-ons, and changes of the spec.

    `changes` are nested tables. Their keys are those of the spec (`training`), names of add-ons with their parameters
    (`dsr`), or keys of the method (`temperature`, `merge`). `pooled` gives all images to one client.
    """

    name: str
    method: str
    add_ons: tuple[str, ...] = ()
    changes: Mapping[str, Any] = field(default_factory=dict)
    pooled: bool = False

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise SpecError(f"{self.name!r} cannot name a variant: use at most 60 letters, digits and . _ + -")
        known(self.method, METHOD_CONFIGS, "method")
        for name in self.add_ons:
            known(name, ADD_ONS, "add-on")


def baselines_of(variant: Variant) -> list[Variant]:
    """Return the same method without a federation: each client by itself, and all images at one client."""
    alone = {**variant.changes, "merge": {"name": "local"}, "reducer": {"name": "none"}}
    return [
        replace(variant, name=LOCAL_ONLY, changes=alone),
        replace(variant, name=CENTRALISED, pooled=True),
    ]


def has_traffic(name: str) -> bool:
    """Return False for the baseline whose images are in one place: no weights travel."""
    return name != CENTRALISED


def parse_method(text: str) -> tuple[str, tuple[str, ...]]:
    """Return a method's name and the names of its add-ons.

    >>> parse_method("fedmoco+fedx")
    ('fedmoco', ('fedx',))
    """
    method, *add_ons = (part.strip() for part in text.split("+"))
    return method, tuple(add_ons)


def values_of(base: Mapping[str, Any], variant: Variant, seed: int) -> Values:
    """Return the spec of one variant at one seed, without validating it.

    The seed applies to the run and to the partition, so that every method gets the same clients. The base's own method
    keeps its parameters; any other method starts from its defaults.
    """
    own = dict(base.get("method") or {})
    method = own if own.get("name") == variant.method else {"name": variant.method}
    changes: Values = {}
    for key, value in variant.changes.items():
        if key in RunSpec.model_fields:
            changes[key] = value
        elif key in ADD_ONS:
            if not isinstance(value, Mapping):
                raise SpecError(f"{key} is an add-on, whose parameters have values: write {key}.PARAMETER={value}")
            method = _with_add_on(method, key, value)
        else:
            method = overlay(method, {key: value})
    for name in variant.add_ons:
        method = _with_add_on(method, name, {})
    seeded: Values = {"name": f"{variant.name} seed {seed}", "seed": seed}
    if base.get("partition") is not None:
        seeded["partition"] = {"seed": seed, **({"pooled": True} if variant.pooled else {})}
    if variant.pooled:
        seeded["cohort"] = {"clients": None, "min_clients": 1, "min_updates": None, "fraction": 1.0}
    return overlay(overlay({**base, "method": method}, seeded), changes)


def build_spec(values: Mapping[str, Any]) -> RunSpec:
    """Return a variant's validated spec; if it has no evaluation, add one. Raises SpecError with the first reasons."""
    spec = _validated(values)
    if spec.partition is None:
        raise SpecError("a comparison needs images: add a [partition] section to the spec")
    if spec.central_evaluation is not None:
        return spec
    every = max(1, spec.num_rounds // NUM_EVALUATIONS)
    own: Values = {"every": every} if spec.evaluation is None else {**spec.evaluation.model_dump(), "at": "both"}
    try:
        return _validated({**values, "evaluation": {**own, "dataset": spec.partition.dataset}})
    except SpecError as error:
        raise SpecError(
            f"a comparison evaluates the coordinator's encoder, and cannot evaluate this one: {error}"
        ) from None


def _validated(values: Mapping[str, Any]) -> RunSpec:
    try:
        return RunSpec.model_validate(values)
    except ValidationError as error:
        reasons = [line.strip() for line in explain(error, RunSpec)]
        raise SpecError("; ".join(reasons[:3])) from None


def _with_add_on(method: Values, name: str, parameters: Mapping[str, Any]) -> Values:
    """Return the method with one of its add-ons changed, or with another add-on."""
    config = METHOD_CONFIGS[method["name"]]
    default = config.model_fields["add_ons"].default
    present = method.get(
        "add_ons", [part.model_dump(mode="json", exclude_unset=True) | {"name": part.name} for part in default]
    )
    if not isinstance(present, Sequence) or not all(isinstance(part, Mapping) for part in present):
        raise SpecError(f"method.add_ons: must be a list of tables, such as [{{name = {name!r}}}] (it is {present!r})")
    if any(part.get("name") == name for part in present):
        changed = [overlay(part, parameters) if part.get("name") == name else part for part in present]
    else:
        changed = [*present, {"name": name, **parameters}]
    return {**method, "add_ons": changed}


def known(name: str, table: Mapping[str, T], what: str) -> T:
    """Return the value of a name. Raises SpecError, which names a similar one or all, if there is none."""
    if name not in table:
        close = get_close_matches(name, table, n=1)
        raise SpecError(f"there is no {what} {name!r}; " + (f"did you mean {close[0]}?" if close else ", ".join(table)))
    return table[name]
