"""The REST API in the form that a page shows, read from the API's own OpenAPI document."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_VERBS = ("get", "head", "post", "put", "patch", "delete")
_BOUNDS = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below",
           "minLength": "at least {} characters", "maxLength": "at most {} characters"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Value:
    """A parameter or field. `schemas`: the objects that its type names."""

    name: str
    where: str
    type: str
    schemas: tuple[str, ...]
    is_required: bool
    description: str
    default: str
    bounds: str


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path. `body` names a schema or a media type, or is empty.

    `answers` have a status, such a name, and a description.
    """

    verb: str
    path: str
    summary: str
    description: str
    roles: tuple[str, ...]
    parameters: list[Value]
    body: str
    answers: list[tuple[str, str, str]]

    @property
    def id(self) -> str:
        """The fragment of a link to it."""
        words = "".join(letter if letter.isalnum() else "-" for letter in self.path)
        return f"{self.verb}{words}".lower()


@dataclass(frozen=True, slots=True)
class Schema:
    """One object that goes over the wire, or the words that a value may be."""

    name: str
    description: str
    fields: list[Value]
    words: list[str]


def groups(document: Mapping[str, Any]) -> dict[str, list[Operation]]:
    """Return the operations by subject."""
    found: dict[str, list[Operation]] = {}
    for path, verbs in sorted(document["paths"].items()):
        for verb in _VERBS:
            if verb in verbs:
                operation = _operation(verb, path, verbs, document["components"]["responses"])
                found.setdefault((verbs[verb].get("tags") or ["server"])[0], []).append(operation)
    return dict(sorted(found.items()))


def schemas(document: Mapping[str, Any]) -> list[Schema]:
    """Return every object, by name."""
    return [
        Schema(name, schema.get("description", ""), [*_fields(schema)], [str(word) for word in schema.get("enum", ())])
        for name, schema in sorted(document["components"]["schemas"].items())
    ]


def _operation(verb: str, path: str, verbs: Mapping[str, Any], shared: Mapping[str, Any]) -> Operation:
    found = verbs[verb]
    text, _, rest = found.get("description", "").partition("\n\n")
    parameters = [
        _value(one["name"], one["in"], one["schema"], one.get("description", ""), is_required=one["required"])
        for one in [*verbs.get("parameters", ()), *found.get("parameters", ())]
    ]
    answers = [
        (status, _content(answer), answer.get("description", ""))
        for status, answer in found["responses"].items()
        if "$ref" not in answer
    ]
    errors = {status: answer["$ref"] for status, answer in found["responses"].items() if "$ref" in answer}
    if errors:
        named = _content(shared[next(iter(errors.values())).rsplit("/", 1)[1]])
        answers.append((", ".join(errors).replace("default", "any other"), named, ""))
    roles = tuple(role for entry in found.get("security", ()) for allowed in entry.values() for role in allowed)
    return Operation(verb.upper(), path, text or found["summary"], rest, roles, parameters,
                     _content(found.get("requestBody", {})), answers)  # fmt: skip


def _content(part: Mapping[str, Any]) -> str:
    for media_type, inner in part.get("content", {}).items():
        named = _named(inner.get("schema", {}))
        return named[0] if named else media_type
    return ""


def _fields(schema: Mapping[str, Any]) -> Iterator[Value]:
    required = schema.get("required", ())
    for name, inner in schema.get("properties", {}).items():
        yield _value(name, "", inner, inner.get("description", ""), is_required=name in required)


def _value(name: str, where: str, schema: Mapping[str, Any], description: str, *, is_required: bool) -> Value:
    default = schema.get("default")
    bounds = []
    for option in [schema, *schema.get("anyOf", ())]:
        for key, words in _BOUNDS.items():
            if key in option:
                bounds.append(words.format(option[key]) if "{}" in words else f"{words} {option[key]:g}")
    return Value(name, where, _type(schema), tuple(dict.fromkeys(_named(schema))), is_required,
                 description, "" if default is None else str(default), ", ".join(bounds))  # fmt: skip


def _type(schema: Mapping[str, Any]) -> str:
    """Return a type in words."""
    if "$ref" in schema:
        return str(schema["$ref"].rsplit("/", 1)[1])
    if options := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(dict.fromkeys(_type(option) for option in options))
    if "const" in schema or "enum" in schema:
        return " or ".join(str(word) for word in schema.get("enum", [schema.get("const")]))
    match schema.get("type"):
        case "array":
            inner = schema.get("items") or {"anyOf": schema.get("prefixItems", [])}
            return f"list of {_type(inner)}"
        case "object":
            inner = schema.get("additionalProperties")
            return f"map to {_type(inner)}" if isinstance(inner, Mapping) else "object"
        case str() as kind:
            return str(schema.get("format", kind))
    return "any"


def _named(schema: Mapping[str, Any]) -> list[str]:
    """Return the names of the schemas to which this one refers, directly or through nested types."""
    found = [schema["$ref"].rsplit("/", 1)[1]] if "$ref" in schema else []
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), Mapping):
            found += _named(schema[key])
    for key in ("anyOf", "oneOf", "allOf", "prefixItems"):
        for option in schema.get(key, ()):
            found += _named(option)
    return found
