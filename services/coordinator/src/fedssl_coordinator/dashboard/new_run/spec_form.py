"""A run's spec as a form: a spec from the values of its fields, their values from a spec, and errors next to them.

An empty field is left out of the spec, so that its default applies. Lists are written with commas; objects such as
add-ons are chosen and have fields of their own.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import ValidationError

from fedssl.protocol.methods import METHOD_CONFIGS
from fedssl.protocol.model import EncoderConfig, read_encoder
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.validation import validation_problems
from fedssl_coordinator.dashboard.new_run.fields import (
    ABSENT,
    PREFIX,
    Field,
    Option,
    all_fields,
    fields_of,
    grouped,
    resolved,
    split,
    summary,
    written,
)

CLIENT = "client."
"""Before a client's name: the field that is sent if the client is picked."""
CLIENTS = f"{PREFIX}cohort.clients"
"""The field of the names of clients, to which those that are picked belong."""

_TOP = "run"
_SECTIONS = (
    "method",
    "cohort",
    "training",
    "evaluation",
    "model",
    "data",
    "watch",
    "robustness",
    "aggregation",
    "upload",
    "secure_aggregation",
    "public_data",
    "partition",
)
_TITLES = {
    _TOP: "Run",
    "cohort": "Clients",
    "training": "Local training",
    "watch": "Collapse alarms",
    "public_data": "Public images",
}
_OPEN = (_TOP, "method", "cohort", "training", "evaluation")
_MISSING = object()


@dataclass(frozen=True, slots=True)
class Section:
    """Settings that belong together."""

    name: str
    title: str
    description: str
    fields: list[Field]
    is_open: bool

    @property
    def groups(self) -> list[tuple[str, list[Field]]]:
        return grouped(self.fields)

    @property
    def keys(self) -> list[str]:
        return [field.key for field in all_fields(self.fields)]


@dataclass(frozen=True, slots=True)
class SettingError:
    """An error in the setting with a dotted key, or in the whole spec if the key is empty."""

    key: str
    text: str
    label: str = ""


@dataclass(frozen=True, slots=True)
class CheckedForm:
    """A form's spec, or the errors in it."""

    spec: RunSpec | None
    errors: list[SettingError]
    given: dict[str, Any]


@cache
def _schema_of_spec() -> dict[str, Any]:
    return RunSpec.model_json_schema()


@cache
def sections(method: str) -> list[Section]:
    """Return the form for a method. Raises KeyError if the method does not exist."""
    whole = _schema_of_spec()
    top = {"properties": {name: whole["properties"][name] for name in ("name", "num_rounds", "seed")}}
    made = [Section(_TOP, _TITLES[_TOP], "", [*fields_of(whole, top, "")], True)]
    for name in _SECTIONS:
        root = METHOD_CONFIGS[method].model_json_schema() if name == "method" else whole
        schema = root if name == "method" else resolved(root, whole["properties"][name])
        fields = [field for field in fields_of(root, schema, f"{name}.") if field.key != "method.name"]
        fields.sort(key=lambda field: ("one-of", "cards").index(field.kind) + 1 if field.options else 0)
        description = summary(schema)
        if whole["properties"][name].get("default", _MISSING) is None:
            description += " Left out if all of its fields are empty."
        title = _TITLES.get(name, name.replace("_", " ").capitalize())
        made.append(Section(name, title, description, fields, name in _OPEN))
    return made


def check(method: str, form: Mapping[str, str]) -> CheckedForm:
    """Return the form's spec, or its errors."""
    fields = [field for section in sections(method) for field in section.fields]
    given: dict[str, Any] = {"method": {"name": method}}
    errors = _read(fields, form, given, 0)
    try:
        spec = RunSpec.model_validate(given)
    except ValidationError as error:
        keys = {field.key: field for field in all_fields(fields)}
        found = [(_key(one.location, method, keys), one.message) for one in validation_problems(error)[:20]]
        errors += [SettingError(key, text, keys[key].label if key in keys else "") for key, text in found]
        return CheckedForm(None, errors, given)
    return CheckedForm(None if errors else spec, errors, given)


def values_of(spec: Mapping[str, Any], method: str) -> dict[str, str]:
    """Return the values of the form's fields for a spec, without those that equal the default."""
    # Not validated, because some methods have no valid spec that consists only of defaults.
    defaults = RunSpec().model_copy(update={"method": METHOD_CONFIGS[method](name=method)}).model_dump(mode="json")
    fields = [field for section in sections(method) for field in section.fields]
    return _values(fields, spec, defaults, 0)


def _read(fields: Sequence[Field], form: Mapping[str, str], given: dict[str, Any], start: int) -> list[SettingError]:
    """Put the values of the fields into `given`, whose keys are those of the fields from the character `start` on."""
    errors, removed = [], ""
    for field in fields:
        try:
            value, wrong = _value(field, form)
            errors += wrong
            if value is _MISSING:
                continue
            if removed and field.key.startswith(f"{removed}."):
                raise ValueError(f"leave this empty: {removed} is set to none")
            removed = field.key if field.kind == "none" else removed
            _put(given, field.key[start:].split("."), value)
        except ValueError as error:
            errors.append(SettingError(field.key, str(error), field.label))
    return errors


def _value(field: Field, form: Mapping[str, str]) -> tuple[Any, list[SettingError]]:
    """Return the value of one field, or _MISSING, and the errors in its options. Raises ValueError."""
    text = form.get(field.name, "").strip()
    match field.kind:
        case "one-of":
            option = next((one for one in field.options if one.name == (text or field.used)), None)
            if option is None:
                raise ValueError(f"choose one of {', '.join(one.name for one in field.options)}")
            value, errors = _object(option, form, field.default if option.name == field.used else {})
            return (_MISSING if value == field.default else value), errors
        case "cards":
            return _cards(field, form)
        case "several":
            chosen = [choice for choice in field.choices if form.get(f"{field.name}.{choice}")]
            return (chosen if chosen and chosen != field.default else _MISSING), []
        case "names":
            boxes = form if field.name == CLIENTS else ()
            picked = sorted(name.removeprefix(CLIENT) for name in boxes if name.startswith(CLIENT))
            found = list(dict.fromkeys([*picked, *split(text)]))
            return (found or _MISSING), []
        case _:
            return (_scalar(field.kind, text) if text else _MISSING), []


def _object(
    option: Option, form: Mapping[str, str], base: Mapping[str, Any]
) -> tuple[dict[str, Any], list[SettingError]]:
    given: dict[str, Any] = json.loads(json.dumps({**base, "name": option.name}))  # a copy that may be changed
    return given, _read(option.fields, form, given, len(option.key) + 1)


def _cards(field: Field, form: Mapping[str, str]) -> tuple[Any, list[SettingError]]:
    """Return the chosen objects. They keep the order of the field itself, which names those of a copied run."""
    if field.name not in form:
        return _MISSING, []
    defaults = {each["name"]: each for each in field.default}
    order = [*split(form[field.name]), *defaults, *(option.name for option in field.options)]
    chosen = sorted((one for one in field.options if form.get(PREFIX + one.key)), key=lambda one: order.index(one.name))
    found = [_object(option, form, defaults.get(option.name, {})) for option in chosen]
    value = [each for each, _ in found]
    return (_MISSING if value == field.default else value), [error for _, errors in found for error in errors]


def _scalar(kind: str, text: str) -> Any:
    match kind:
        case "text" | "choice":
            return text
        case "numbers":
            return [_number(word, "write numbers with commas between them, such as 32, 64") for word in split(text)]
        case "encoders":
            return _encoders(text)
        case "none":
            return None
        case "integer" | "number" if text == "none":
            return None
        case "integer":
            return _number(text, "write a whole number")
        case "number":
            return _number(text, "write a number such as 0.05 or 1e-4")
        case _:
            return _number_or_bool(text, "choose yes or no")


def _number(text: str, what: str) -> Any:
    value = _number_or_bool(text, what)
    if isinstance(value, bool):
        raise ValueError(what)  # else `true` would be the number 1
    return value


def _number_or_bool(text: str, what: str) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(what) from None
    if not isinstance(value, int | float):
        raise ValueError(what)
    return value


def _encoders(text: str) -> Any:
    if text == "declared":
        return text
    lines = [line.partition("=") for line in text.splitlines() if line.strip()]
    if not all(encoder.strip() for _, _, encoder in lines):
        raise ValueError("write `declared`, or one line per client, such as client-1 = resnet18")
    return {name.strip(): read_encoder(encoder) for name, _, encoder in lines}


def _put(spec: dict[str, Any], path: list[str], value: Any) -> None:
    for name in path[:-1]:
        if not isinstance(spec.get(name), dict):
            spec[name] = {}
        spec = spec[name]
    spec[path[-1]] = value


def _values(fields: Sequence[Field], spec: Mapping[str, Any], defaults: Any, start: int) -> dict[str, str]:
    values: dict[str, str] = {}
    for field in fields:
        path = field.key[start:]
        value, default = _nested(spec, path), _nested(defaults, path)
        if value is _MISSING or value == default or (field.kind == "none" and value is not None):
            continue
        match field.kind:
            case "one-of":
                values |= {field.name: value["name"], **_of_option(field, value)}
            case "cards":
                values[field.name] = ",".join(each["name"] for each in value)
                for each in value:
                    values |= {f"{field.name}.{each['name']}": "on", **_of_option(field, each)}
            case "several":
                values |= {f"{field.name}.{choice}": "on" for choice in value}
            case "encoders":
                values[field.name] = value if isinstance(value, str) else _written_encoders(value)
            case "none":
                values[field.name] = "null"
            case _ if value is not None:
                values[field.name] = written(value)
            case _ if field.placeholder:
                values[field.name] = "none"
    return values


def _of_option(field: Field, value: Mapping[str, Any]) -> dict[str, str]:
    option = next(one for one in field.options if one.name == value["name"])
    defaults = [field.default] if field.kind == "one-of" else field.default
    own = next((each for each in defaults if each["name"] == option.name), None)
    return _values(option.fields, value, own or _usual(option), len(option.key) + 1)


def _usual(option: Option) -> dict[str, Any]:
    usual: dict[str, Any] = {}
    for field in option.fields:
        if field.default is not ABSENT and field.kind != "none":
            _put(usual, field.key[len(option.key) + 1 :].split("."), field.default)
    return usual


def _written_encoders(encoders: Mapping[str, Mapping[str, Any]]) -> str:
    usual = EncoderConfig().model_dump(mode="json")
    lines = []
    for client, encoder in encoders.items():
        other = {name: value for name, value in encoder.items() if name == "name" or value != usual[name]}
        table = ", ".join(f"{name} = {json.dumps(value)}" for name, value in other.items())
        lines.append(f"{client} = {encoder['name'] if len(other) == 1 else f'{{ {table} }}'}")
    return "\n".join(lines)


def _key(loc: tuple[int | str, ...], method: str, keys: Mapping[str, Field]) -> str:
    """Return the key of the field with the error: without the method's name and the places in lists."""
    parts = [str(part) for index, part in enumerate(loc) if not (index == 1 and loc[0] == "method" and part == method)]
    whole = ".".join(part for part in parts if not part.isdigit())
    best = (key for key in sorted(keys, key=len, reverse=True) if whole == key or whole.startswith(f"{key}."))
    return next(best, whole)


def _nested(spec: Any, key: str) -> Any:
    """Return the value at a dotted key, which may be an object or null; _MISSING if there is no value."""
    value = spec
    for name in key.split("."):
        if not isinstance(value, Mapping) or name not in value:
            return _MISSING
        value = value[name]
    return value
