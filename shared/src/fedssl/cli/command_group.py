"""The root of the command tree: where an error becomes one line on the terminal and an exit code."""

import errno
import os
import sys
from typing import Any

import typer

from fedssl.cli.exit_codes import FAILED, USAGE
from fedssl.cli.lazy_group import LazyGroup
from fedssl.cli.usage import OneLineUsage, in_words
from fedssl.errors import FedSSLError
from fedssl.wording import printable

_TRAIN_EXTRA = ("torch", "torchvision", "sklearn", "matplotlib", "PIL")  # what fedssl[train] installs


class CommandGroup(OneLineUsage, LazyGroup):
    """Turns each error that fedssl raises on purpose, and wrong usage, into one clear line and an exit code.

    `--connection NAME` is an option of the root that is accepted anywhere on the command line.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, connection_first(args))

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except FedSSLError as error:
            from fedssl.cli.error_codes import exit_code

            message, code = str(error), exit_code(error)
        except ModuleNotFoundError as error:
            if error.name not in _TRAIN_EXTRA:
                raise
            message = f"this command needs {error.name}, which is not installed here: pip install 'fedssl[train]'"
            code = USAGE
        except (RuntimeError, MemoryError) as error:
            if not _is_out_of_memory(error):
                raise
            message = "out of memory: use fewer or smaller images, a smaller model, or another device"
            code = USAGE
        except OSError as error:
            if error.errno == errno.EPIPE:  # `fedssl run ls | head`
                raise
            message, code = in_words(error), FAILED
        typer.secho(f"error: {printable(message)}", err=True, fg=typer.colors.RED if _use_colour() else None)
        raise typer.Exit(code)


def _is_out_of_memory(error: Exception) -> bool:
    if "torch" not in sys.modules:  # a command that does not compute; torch need not be installed
        return isinstance(error, MemoryError)
    from fedssl.engine.devices import is_out_of_memory

    return is_out_of_memory(error)


def connection_first(args: list[str]) -> list[str]:
    """Return the arguments with `--connection NAME` moved to the front.

    >>> connection_first(["run", "ls", "--connection", "site"])
    ['--connection', 'site', 'run', 'ls']
    """
    end = args.index("--") if "--" in args else len(args)
    for place, word in enumerate(args[:end]):
        width = 2 if word == "--connection" else 1 if word.startswith("--connection=") else 0
        if width:
            return [*args[place : place + width], *args[:place], *args[place + width :]]
    return args


def _use_colour() -> bool:
    return sys.stderr is not None and sys.stderr.isatty() and "NO_COLOR" not in os.environ
