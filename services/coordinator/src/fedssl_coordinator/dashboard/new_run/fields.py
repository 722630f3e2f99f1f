"""The fields of a form, made from a JSON schema: a label in words, a kind, and what can be chosen."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Literal

PREFIX = "spec."
_DEEPEST = 5
_WORDS = {
    "dsr": "DSR",
    "ema": "EMA",
    "fedx": "FedX",
    "fur": "FUR",
    "hsd": "HSD",
    "ldawa": "L-DAWA",
    "dapu": "DAPU",
    "pd": "PD",
    "scaffold": "SCAFFOLD",
    "dim": "width",
    "dims": "widths",
    "eua": "EUA",
    "gpu": "GPU",
    "kl": "KL",
    "knn": "kNN",
    "l2": "L2",
    "lr": "learning rate",
    "mlp": "MLP",
    "num": "number of",
    "rel": "relational",
    "std": "standard deviation",
    "min": "minimum",
    "max": "maximum",
}
ABSENT: Any = object()
"""The default of the settings of an object that does not exist by default."""

Kind = Literal[
    "integer",
    "number",
    "text",
    "choice",
    "yes-no",
    "numbers",
    "several",
    "names",
    "encoders",
    "none",
    "one-of",
    "cards",
]


@dataclass(frozen=True, slots=True)
class Field:
    """One setting, under its dotted key in the spec.

    `none` can only remove the object whose settings are fields too. `one-of` is an object with one of several names and
    `cards` is a list of such objects; the settings of each are in `options`.
    """

    key: str
    kind: Kind
    description: str = ""
    placeholder: str = ""
    choices: tuple[str, ...] = ()
    options: tuple["Option", ...] = ()
    default: Any = None

    @property
    def ticked(self) -> tuple[str, ...]:
        """The choices of `several` that are ticked at first."""
        return () if self.default is ABSENT else tuple(self.default)

    @property
    def name(self) -> str:
        return PREFIX + self.key

    @property
    def label(self) -> str:
        return label(self.key.rsplit(".", 1)[-1])

    @property
    def group(self) -> str:
        """The heading of the fields that describe one object inside the section, or nothing."""
        return ": ".join(label(part) for part in self.key.split(".")[1:-1])

    @property
    def used(self) -> str:
        """The name of the option that applies if the form does not choose one."""
        return str(self.default["name"]) if self.kind == "one-of" else ""


@dataclass(frozen=True, slots=True)
class Option:
    """One of the objects from which a field chooses, with its own settings under `key`."""

    name: str
    key: str
    description: str
    fields: tuple[Field, ...]

    @property
    def label(self) -> str:
        return label(self.name)


def label(name: str) -> str:
    """Return the name of a setting in words.

    >>> label("num_rounds"), label("lease_seconds"), label("max_update_norm")
    ('Number of rounds', 'Lease in seconds', 'Maximum update norm')
    """
    if name == "add_ons":
        return "Add-ons"
    words = name.split("_")
    if len(words) > 1 and words[-1] in ("seconds", "degrees"):
        words[-1:] = ["in", words[-1]]
    text = " ".join(_WORDS.get(word, word) for word in words)
    return text[:1].upper() + text[1:]


def grouped(fields: Sequence[Field]) -> list[tuple[str, list[Field]]]:
    """Return the fields by the object that they describe, in order."""
    return [(group, list(members)) for group, members in groupby(fields, key=lambda field: field.group)]


def all_fields(fields: Sequence[Field]) -> Iterator[Field]:
    """Yield the fields and those of their options."""
    for field in fields:
        yield field
        for option in field.options:
            yield from all_fields(option.fields)


def resolved(root: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema that `schema` refers to: follows references, and leaves out `or null`."""
    if "$ref" in schema:
        found = root["$defs"][schema["$ref"].rsplit("/", 1)[1]]
        return {**resolved(root, found), **{key: value for key, value in schema.items() if key == "default"}}
    options = [option for option in schema.get("anyOf", ()) if option.get("type") != "null"]
    if len(options) == 1:
        return {
            **resolved(root, options[0]),
            **{key: schema[key] for key in ("default", "description") if key in schema},
        }
    return dict(schema)


def fields_of(root: Mapping[str, Any], schema: Mapping[str, Any], prefix: str, default: Any = None) -> Iterator[Field]:
    """Yield a field per setting of an object. `default` is the whole object's, if it is not that of its class."""
    for name, inner in schema.get("properties", {}).items():
        found, key = resolved(root, inner), f"{prefix}{name}"
        if isinstance(default, Mapping) and name in default:
            found["default"] = default[name]
        if found.get("properties") and key.count(".") < _DEEPEST:
            is_absent = default is ABSENT or ("default" in found and found["default"] is None)
            if "anyOf" in inner and not is_absent:
                yield Field(key, "none")
            yield from fields_of(root, found, f"{key}.", ABSENT if is_absent else found.get("default"))
        elif "const" not in found:
            field = _field(root, key, found)
            yield replace(field, default=ABSENT) if default is ABSENT else field


def _field(root: Mapping[str, Any], key: str, schema: Mapping[str, Any]) -> Field:
    default: Any = schema.get("default")
    about = (schema.get("description") or "").replace("\n", " ")
    items = resolved(root, schema.get("items", {}))
    if "discriminator" in schema:
        return Field(key, "one-of", about, options=_options(root, key, schema, [default]), default=default)
    if "discriminator" in items:
        return Field(key, "cards", about, options=_options(root, key, items, default), default=default)
    if "enum" in schema:
        choices = tuple(str(choice) for choice in schema["enum"])
        are_words = all(isinstance(choice, str) for choice in schema["enum"])
        return Field(key, "choice" if are_words else "number", about, written(default), choices, default=default)
    if "enum" in items:
        return Field(key, "several", about, written(default), tuple(items["enum"]), default=default)
    if schema.get("type") == "array":
        kind: Kind = "names" if items.get("type") == "string" else "numbers"
        return Field(key, kind, about, written(default), default=default)
    kinds: dict[str, Kind] = {"integer": "integer", "number": "number", "boolean": "yes-no", "string": "text"}
    if schema.get("type") not in kinds:
        return Field(key, "encoders", about, default=default)  # the only table that is left
    kind = kinds[schema["type"]]
    return Field(key, kind, about, written(default), ("true", "false") if kind == "yes-no" else (), default=default)


def _options(
    root: Mapping[str, Any], key: str, schema: Mapping[str, Any], defaults: Sequence[Mapping[str, Any]]
) -> tuple[Option, ...]:
    by_name = {each["name"]: each for each in defaults}
    found = []
    for name, reference in schema["discriminator"]["mapping"].items():
        option, inside = resolved(root, {"$ref": reference}), f"{key}.{name}"
        fields = tuple(fields_of(root, option, f"{inside}.", by_name.get(name)))
        found.append(Option(name, inside, summary(option), fields))
    return tuple(found)


def summary(schema: Mapping[str, Any]) -> str:
    """Return the first paragraph of a description, in one line."""
    return " ".join((schema.get("description") or "").partition("\n\n")[0].split())


def written(value: Any) -> str:
    """Return a value as a person writes it into its field.

    >>> written([8, 16]), written([]), written(True), written(0.5), written(None)
    ('8, 16', 'none', 'true', '0.5', '')
    """
    match value:
        case None:
            return ""
        case str():
            return value
        case list() | tuple():
            return ", ".join(map(written, value)) or "none"
        case _:
            return json.dumps(value)


def split(text: str) -> list[str]:
    """Return the words of a list, which commas or spaces separate and brackets may surround."""
    return [] if text == "none" else [word.strip("\"'") for word in re.split(r"[,\s]+", text.strip(" []()")) if word]
