"""Explanations of invalid specs, in a line per key: for the command line and for Python."""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from fedssl.errors import SpecError
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.validation import message_of

_MAX_LINES = 20


def spec_of(values: "RunSpec | Mapping[str, Any]", name: str = "the spec") -> RunSpec:
    """Return the run spec with these keys and values. Raises SpecError, with a line per wrong key.

    >>> spec_of({"num_rouds": 3})
    Traceback (most recent call last):
        ...
    fedssl.errors.SpecError: the spec is not a run spec:
      num_rouds: there is no such key; did you mean num_rounds?
    """
    if isinstance(values, RunSpec):
        return values
    if not isinstance(values, Mapping):
        raise SpecError(f"{name} must be a RunSpec or a table of keys and values, not {type(values).__name__}")
    try:
        return RunSpec.model_validate(values)
    except ValidationError as error:
        raise SpecError(f"{name} is not a run spec:\n" + "\n".join(explain(error, RunSpec))) from None


def explain(error: ValidationError, model: type[BaseModel]) -> list[str]:
    """Describe each wrong key in one line, under its name in the spec: `training.batch_size: ...`."""
    found = error.errors(include_url=False)
    lines = [_line(dict(entry), model) for entry in found[:_MAX_LINES]]
    return lines if len(found) <= _MAX_LINES else [*lines, f"and {len(found) - _MAX_LINES} more"]


def _line(entry: dict[str, Any], model: type[BaseModel]) -> str:
    kind, context, given = entry["type"], entry.get("ctx", {}), entry.get("input")
    place, owner = _place(entry["loc"], model)
    if kind == "extra_forbidden":
        return f"  {place}: there is no such key{_suggestion(place.rpartition('.')[2], list(_fields(owner)))}"
    if kind == "union_tag_invalid":
        names = [name.strip(" '") for name in str(context["expected_tags"]).split(",")]
        return f"  {place}.name: there is no {str(context['tag'])!r} here{_suggestion(str(context['tag']), names)}"
    if kind == "union_tag_not_found":
        return f"  {place}.name: must be given"
    if kind == "missing":
        return f"  {place}: must be given"
    if kind in ("model_type", "model_attributes_type"):
        return f"  {place}: must be a table of keys and values (it is {given!r})"
    message = message_of(entry).removeprefix("Input ")
    if kind == "value_error":  # raised by a validator of fedssl, whose message names the keys
        return f"  {message}"
    actual = f" (it is {given!r})" if isinstance(given, str | int | float | bool | None) else ""
    return f"  {place or 'the spec'}: {message}{actual}"


def _place(location: Sequence[str | int], model: type[BaseModel]) -> tuple[str, type[BaseModel] | None]:
    """Return the key as written in the spec, and the model that has it.

    If a table's `name` decides which keys it has, pydantic's location contains that name as one more step.
    """
    written: list[str] = []
    owner: type[BaseModel] | None = model
    candidates: list[type[BaseModel]] = []
    for depth, part in enumerate(location):
        named = {_fields(kind)["name"].default: kind for kind in candidates if "name" in _fields(kind)}
        if part in named and depth < len(location) - 1:
            owner = named[part]
            candidates = []
            continue
        written.append(str(part))
        if isinstance(part, int):
            continue
        owner = owner if not candidates else candidates[0]
        candidates = _models(getattr(_fields(owner).get(part), "annotation", None))
    return ".".join(written), owner


def _models(annotation: Any) -> list[type[BaseModel]]:
    """Return the models that an annotation mentions."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [kind for part in get_args(annotation) for kind in _models(part)]


def _fields(owner: type[BaseModel] | None) -> dict[str, Any]:
    return {} if owner is None else dict(owner.model_fields)


def _suggestion(word: str, known: Sequence[str]) -> str:
    if close := get_close_matches(word, known, n=1):
        return f"; did you mean {close[0]}?"
    return f"; known: {', '.join(known)}" if known else ""
