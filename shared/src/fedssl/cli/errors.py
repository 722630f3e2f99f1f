"""Exit codes, and the one place where an error becomes a line on the terminal."""

import errno
from typing import Any

import typer
from typer.core import TyperGroup

from fedssl.errors import FedSSLError

OK, FAILED, USAGE, UNREACHABLE, NOT_ALLOWED, CONFLICT, STOPPED, PAUSED, TIMED_OUT = range(9)
INTERRUPTED = 130

EXIT_CODES = {
    OK: "done",
    FAILED: "the run failed, `fedssl doctor` found something wrong, or something unexpected happened",
    USAGE: "wrong usage: an option, a spec or a data set that cannot be used",
    UNREACHABLE: "the coordinator does not answer",
    NOT_ALLOWED: "the token is missing, not valid or not allowed to do this",
    CONFLICT: "not found, or not possible in the present state",
    STOPPED: "the run was stopped by an operator (`run wait`, `run watch`, `run submit --watch`)",
    PAUSED: "the run is paused and does not go on by itself (`run wait`)",
    TIMED_OUT: "the run had not ended by the time of --timeout (`run wait`)",
    INTERRUPTED: "interrupted",
}

# By name: naming a class would import the client, and with it pydantic and httpx, for every `--help`.
_CODES = {
    "SpecError": USAGE,
    "DataError": USAGE,
    "ExportError": USAGE,
    "ClientError": USAGE,  # itself, not one of those below: an address or a token that is none
    "ApiError": FAILED,
    "Rejected": USAGE,
    "Unreachable": UNREACHABLE,
    "Untrusted": UNREACHABLE,
    "BadAnswer": UNREACHABLE,
    "Unavailable": UNREACHABLE,
    "NotAuthenticated": NOT_ALLOWED,
    "NotAllowed": NOT_ALLOWED,
    "NotFound": CONFLICT,
    "Conflict": CONFLICT,
    "Gone": CONFLICT,
    "FolderInUseError": CONFLICT,
    "ResultsError": CONFLICT,
    "UsageError": USAGE,
    "NoSuchRun": CONFLICT,
    "NoSuchJob": CONFLICT,
    "RunNotCompleted": FAILED,
    "RunStopped": STOPPED,
    "RunPaused": PAUSED,
    "WaitedTooLong": TIMED_OUT,
    "ChecksFailed": FAILED,
    "EvaluationNotCompleted": FAILED,
}


_COMPUTING = ("torch", "torchvision", "sklearn", "matplotlib", "PIL")  # of fedssl[train]


class UsageError(FedSSLError):
    """The command cannot be carried out as it was given."""


class NoSuchRun(FedSSLError):
    """No run, or more than one, has an id that begins like this."""


class NoSuchJob(FedSSLError):
    """The run has no job to which this could be done."""


class RunNotCompleted(FedSSLError):
    """The run ended, but not by completing."""


class RunStopped(RunNotCompleted):
    """An operator has ended the run."""


class RunPaused(RunNotCompleted):
    """The run goes on only when somebody resumes it."""


class WaitedTooLong(RunNotCompleted):
    """The run has not ended within the time that was given."""


class ChecksFailed(FedSSLError):
    """`fedssl doctor` has found something wrong."""


class EvaluationNotCompleted(FedSSLError):
    """The evaluation ended, but not by completing."""


def exit_code(error: BaseException) -> int:
    """The code of the first of the error's classes that has one.

    >>> exit_code(UsageError("give a run"))
    2
    """
    return next((_CODES[kind.__name__] for kind in type(error).__mro__ if kind.__name__ in _CODES), FAILED)


class CommandGroup(TyperGroup):
    """The root of the command tree: turns errors that fedssl raises on purpose into one clear line and an exit code.

    `--connection NAME` is the root's option, and taken from wherever it stands.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, connection_first(args))

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except FedSSLError as error:
            message, code = str(error), exit_code(error)
        except ModuleNotFoundError as error:
            if error.name not in _COMPUTING:
                raise
            message = f"this needs {error.name}, which is not installed here: pip install 'fedssl[train]'"
            code = USAGE
        except OSError as error:
            if error.errno == errno.EPIPE:  # `fedssl run ls | head`
                raise
            message, code = f"{error.filename}: {error.strerror}" if error.filename else str(error), FAILED
        typer.secho(f"error: {printable(message)}", err=True, fg=typer.colors.RED if _wants_colour() else None)
        raise typer.Exit(code)


def seconds_of(option: str, text: str) -> int:
    """A length of time as a person writes it. Raises UsageError, naming the option.

    >>> seconds_of("--timeout", "30m")
    1800
    """
    from fedssl.protocol.tokens import lifetime

    try:
        return lifetime(text)
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from None


def connection_first(args: list[str]) -> list[str]:
    """The arguments with `--connection NAME` at the front.

    >>> connection_first(["run", "ls", "--connection", "site"])
    ['--connection', 'site', 'run', 'ls']
    """
    end = args.index("--") if "--" in args else len(args)
    for place, word in enumerate(args[:end]):
        width = 2 if word == "--connection" else 1 if word.startswith("--connection=") else 0
        if width:
            return [*args[place : place + width], *args[:place], *args[place + width :]]
    return args


def printable(text: str) -> str:
    """The text without control characters, which a worker's message could use to redraw the terminal.

    >>> printable("declined: \\x1b[2Jno")
    'declined: ?[2Jno'
    """
    return "".join(char if char.isprintable() or char == "\n" else "?" for char in text)


def _wants_colour() -> bool:
    import os
    import sys

    return sys.stderr.isatty() and "NO_COLOR" not in os.environ
