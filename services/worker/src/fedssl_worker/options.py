"""Command-line options from a settings model: one option for each field that is not a secret."""

import inspect
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from pydantic import BaseModel, SecretStr, ValidationError
from pydantic.fields import FieldInfo

from fedssl.protocol.validation import describe_problems

F = TypeVar("F", bound=Callable[..., None])

_PARSED = (bool, int, float, Path)
"""Types whose text the command line checks by itself. The model reads every other type from its text."""


@dataclass(frozen=True, slots=True)
class WhenUnset:
    """Annotates a field without a default value with the text that `--help` shows as its default."""

    shown: str


def options_of(model: type[BaseModel], *more: inspect.Parameter) -> Callable[[F], F]:
    """Return a decorator that gives a command with `**options` one option per field of the model, and `more` options.

    The command receives None for an option that is not given. Its environment variable, or the default, then applies.
    """

    def decorate(command: F) -> F:
        fields = {name: field for name, field in model.model_fields.items() if _value_type(field) is not SecretStr}
        parameters = [_parameter(name, field) for name, field in fields.items()]
        command.__dict__["__signature__"] = inspect.Signature([*parameters, *more])
        return command

    return decorate


def describe_mistakes(error: ValidationError, model: type[BaseModel]) -> str:
    """Return every mistake with its option: `--coordinator: must be given`."""

    def name_of(place: tuple[int | str, ...]) -> str:
        name = str(place[0]) if place else "settings"
        return _option_name(name) if name in model.model_fields else name

    return describe_problems(error, name_of, {"missing": "must be given"})


def _parameter(name: str, field: FieldInfo) -> inspect.Parameter:
    kind = _value_type(field)
    shown = _shown_default(field)
    ending = f"  [default: {shown}]" if shown else ""
    option = typer.Option(_option_name(name), help=f"{field.description or ''}{ending}", show_default=False)
    annotation = Annotated[(kind if kind in _PARSED else str) | None, option]  # type: ignore[valid-type]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _option_name(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _shown_default(field: FieldInfo) -> str:
    """Return the text of the default, empty if there is none to show."""
    for each in field.metadata:
        if isinstance(each, WhenUnset):
            return each.shown
    return "" if field.is_required() or field.default in (None, False) else str(field.default)


def _value_type(field: FieldInfo) -> Any:
    """Return the type of a field's value, without None; that of its first value for a Literal."""
    kinds = [kind for kind in _members(field.annotation) if kind is not types.NoneType]
    first = kinds[0]
    return type(typing.get_args(first)[0]) if typing.get_origin(first) is typing.Literal else first


def _members(annotation: Any) -> tuple[Any, ...]:
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return typing.get_args(annotation) if is_union else (annotation,)
