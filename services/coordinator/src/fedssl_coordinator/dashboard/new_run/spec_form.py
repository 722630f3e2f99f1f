"""A run's spec as a form: makes fields from the JSON schema, a spec from their values, and shows errors next to them.

An empty field is left out of the spec, so that its default applies; `null` removes a default. A setting that can be
one of several objects, such as an add-on, is written as JSON.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import ValidationError

from fedssl.protocol.methods import METHOD_CONFIGS
from fedssl.protocol.runs import RunSpec

PREFIX = "spec."
_TOP = "run"
_DEEPEST = 5
_SECTIONS = (
    "method",
    "training",
    "cohort",
    "data",
    "model",
    "evaluation",
    "watch",
    "public_data",
    "partition",
    "robustness",
)
_MISSING = object()
_OPEN = (_TOP, "method", "training", "cohort")


@dataclass(frozen=True, slots=True)
class Field:
    """One setting; `kind`: integer, number, text, choice, yes-no or json."""

    key: str
    kind: str
    description: str
    placeholder: str
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    is_whole: bool = False
    """True for an object whose settings are fields too. Its own field can only be set to `null`."""

    @property
    def name(self) -> str:
        return PREFIX + self.key

    @property
    def label(self) -> str:
        """The key without the section, which is the heading."""
        return self.key.split(".", 1)[1] if "." in self.key else self.key


@dataclass(frozen=True, slots=True)
class Section:
    """Settings that belong together."""

    name: str
    description: str
    fields: list[Field]
    is_open: bool


@dataclass(frozen=True, slots=True)
class SettingError:
    """An error in the setting with a dotted key, or in the whole spec if the key is empty."""

    key: str
    text: str


@dataclass(frozen=True, slots=True)
class CheckedForm:
    """A form's spec, or the errors in it."""

    spec: RunSpec | None
    errors: list[SettingError]
    given: dict[str, Any]


@cache
def sections(method: str) -> list[Section]:
    """Return the form for a method. Raises KeyError if the method does not exist."""
    whole = RunSpec.model_json_schema()
    made = [Section(_TOP, "", [*_fields(whole, _only(whole, ("name", "num_rounds", "seed")), "")], True)]
    for name in _SECTIONS:
        root = METHOD_CONFIGS[method].model_json_schema() if name == "method" else whole
        schema = root if name == "method" else _object(root, whole["properties"][name])
        fields = [field for field in _fields(root, schema, f"{name}.") if field.key != "method.name"]
        description = (schema.get("description") or "").split("\n")[0]
        made.append(Section(name, description, fields, name in _OPEN))
    return made


def check(method: str, form: Mapping[str, str]) -> CheckedForm:
    """Return the form's spec, or its errors."""
    kinds = {field.key: field.kind for section in sections(method) for field in section.fields}
    given: dict[str, Any] = {"method": {"name": method}}
    errors = []
    for key, kind in kinds.items():
        text = form.get(PREFIX + key, "").strip()
        if not text:
            continue
        try:
            _put(given, key.split("."), _value(kind, text))
        except ValueError as error:
            errors.append(SettingError(key, str(error)))
    try:
        spec = RunSpec.model_validate(given)
    except ValidationError as error:
        keys = sorted(kinds, key=len, reverse=True)
        errors += [SettingError(_key(entry["loc"], method, keys), entry["msg"]) for entry in error.errors()[:20]]
        return CheckedForm(None, errors, given)
    return CheckedForm(None if errors else spec, errors, given)


def values_of(spec: Mapping[str, Any], method: str) -> dict[str, str]:
    """Return the values of the form's fields for a spec, without those that equal the default."""
    # Not validated, because some methods have no valid spec that consists only of defaults.
    defaults = RunSpec().model_copy(update={"method": METHOD_CONFIGS[method](name=method)}).model_dump(mode="json")
    values = {}
    for field in (field for section in sections(method) for field in section.fields):
        value, default = _nested(spec, field.key), _nested(defaults, field.key)
        if value is _MISSING or value == default or (field.is_whole and value is not None):
            continue
        if value is None and default is _MISSING and not field.placeholder:
            continue
        is_text = isinstance(value, str) and field.kind in ("text", "choice")
        values[field.name] = value if is_text else json.dumps(value)
    return values


def _only(schema: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {"properties": {name: schema["properties"][name] for name in names}}


def _object(root: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema that `schema` stands for, following references and `or null`."""
    if "$ref" in schema:
        found = root["$defs"][schema["$ref"].rsplit("/", 1)[1]]
        return {**_object(root, found), **{key: value for key, value in schema.items() if key == "default"}}
    options = [option for option in schema.get("anyOf", ()) if option.get("type") != "null"]
    if len(options) == 1:
        return {
            **_object(root, options[0]),
            **{key: schema[key] for key in ("default", "description") if key in schema},
        }
    return dict(schema)


def _fields(root: Mapping[str, Any], schema: Mapping[str, Any], prefix: str) -> Iterator[Field]:
    for name, inner in schema.get("properties", {}).items():
        found, key = _object(root, inner), f"{prefix}{name}"
        if found.get("properties") and key.count(".") < _DEEPEST:
            if "anyOf" in inner and inner.get("default") is not None:
                yield Field(key, "json", "Write null for none; otherwise leave it empty.", "", is_whole=True)
            yield from _fields(root, found, f"{key}.")
        elif "const" not in found:
            yield _field(key, found)


def _field(key: str, schema: Mapping[str, Any]) -> Field:
    default = schema.get("default")
    shown = "" if default is None else str(default) if isinstance(default, str) else json.dumps(default)
    least, most = schema.get("minimum", schema.get("exclusiveMinimum")), schema.get("maximum")
    description = (schema.get("description") or "").replace("\n", " ")
    if "enum" in schema:
        are_words = all(isinstance(choice, str) for choice in schema["enum"])
        choices = tuple(str(choice) for choice in schema["enum"])
        return Field(key, "choice" if are_words else "number", description, shown, choices)
    kind = {"integer": "integer", "number": "number", "boolean": "yes-no", "string": "text"}.get(
        schema.get("type", ""), "json"
    )
    return Field(key, kind, description, shown, ("true", "false") if kind == "yes-no" else (), least, most)


def _value(kind: str, text: str) -> Any:
    if kind in ("text", "choice"):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        words = {
            "integer": "write a whole number",
            "number": "write a number like 0.05 or 1e-4",
            "yes-no": "choose one",
        }
        raise ValueError(words.get(kind, 'write JSON like [64, 128] or {"name": "mean"}')) from None


def _put(spec: dict[str, Any], path: list[str], value: Any) -> None:
    for at, name in enumerate(path[:-1], start=1):
        spec = spec.setdefault(name, {})
        if not isinstance(spec, dict):
            raise ValueError(f"leave this empty: {'.'.join(path[:at])} is {json.dumps(spec)}")
    spec[path[-1]] = value


def _key(loc: tuple[int | str, ...], method: str, keys: list[str]) -> str:
    """Return the key of the field with the error, without the method's name, which pydantic adds to the keys."""
    parts = [str(part) for index, part in enumerate(loc) if not (index == 1 and loc[0] == "method" and part == method)]
    whole = ".".join(parts)
    return next((key for key in keys if whole == key or whole.startswith(f"{key}.")), whole)


def _nested(spec: Mapping[str, Any], key: str) -> Any:
    """Return the value at a dotted key, which may be an object or null; _MISSING if there is no value."""
    value: Any = spec
    for name in key.split("."):
        if not isinstance(value, Mapping) or name not in value:
            return _MISSING
        value = value[name]
    return value
