"""Wrong usage of a command, reported in one line like all other errors. Typer's own report has four lines."""

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperGroup

from fedssl.wording import in_one_line


class OneLineUsage(TyperGroup):
    """The root of a command tree, which reports what is wrong with a command line in one line."""

    error_prefix = "error"

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        _print_whatever_the_encoding()
        with _reported(self.error_prefix):
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: Any) -> Any:
        with _reported(self.error_prefix):
            return super().invoke(ctx)


def _print_whatever_the_encoding() -> None:
    """Print a question mark for each character that the terminal's encoding lacks, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


@contextmanager
def _reported(prefix: str) -> Iterator[None]:
    try:
        yield
    except typer.TyperException as error:
        context, message = getattr(error, "ctx", None), _message(error)
        if context is not None and message == context.get_help():  # a group was called without a command
            raise
        typer.echo(f"{prefix}: {_described(message, context)}", err=True)
        raise typer.Exit(error.exit_code) from None


def _message(error: typer.TyperException) -> str:
    """Return Typer's message, with the value that was refused in place of pydantic's remarks about parsing.

    No secret is a command-line argument, so the value may be shown.
    """
    whole, cause = error.format_message(), error.__cause__
    if cause is None:
        return whole
    from pydantic import ValidationError  # only wrong usage needs it

    if not isinstance(cause, ValidationError):
        return whole
    from fedssl.protocol.validation import first_problem

    problem = first_problem(cause).message
    if problem.startswith("Input should "):
        problem = f"{problem.removeprefix('Input ').partition(', unable ')[0]}, not {cause.errors()[0]['input']!r}"
    return whole.removesuffix(error.message) + problem


def _described(message: str, context: Any) -> str:
    """Return Typer's message in the style of this project's errors, with the command whose help explains more."""
    message = in_one_line(message[:1].lower() + message[1:])
    if context is None:
        return message
    end = "" if message.endswith((".", "?")) else "."
    return f"{message}{end} See `{context.command_path} --help`"
