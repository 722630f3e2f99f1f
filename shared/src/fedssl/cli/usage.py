"""Wrong usage of a command, reported in one line like all other errors. Typer's own report has four lines."""

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from fedssl.cli.exit_codes import USAGE
from fedssl.files import NO_SPACE
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
    except (RuntimeError, FileNotFoundError) as error:
        problem = _missing_folder(error)
        if problem is None:
            raise
        typer.echo(f"{prefix}: {problem}", err=True)
        raise typer.Exit(USAGE) from None


def in_words(error: OSError) -> str:
    """Return the reason of the operating system, with the file that it is about, if that is known.

    What standard output has not written yet is discarded if it cannot be: Python would report it again at the end.
    """
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    reason = error.strerror or str(error)
    if error.filename:
        return f"{error.filename}: {reason}"
    if error.errno in (*NO_SPACE, errno.EFBIG):
        return f"standard output, or a file, cannot be written: {reason}"
    return reason


def _missing_folder(error: Exception) -> str | None:
    """Return what is wrong if the error comes from a missing home folder or current directory, else None."""
    if isinstance(error, FileNotFoundError):
        is_below = error.filename is None or not Path(os.fsdecode(error.filename)).is_absolute()
        return "the current directory no longer exists: change to another one" if is_below and _is_lost() else None
    if str(error).startswith("Could not determine home directory"):  # of pathlib
        return "a path begins with the home folder of a user without one: set HOME, or write the path without ~"
    return None


def _is_lost() -> bool:
    try:
        Path.cwd()
    except FileNotFoundError:
        return True
    return False


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
