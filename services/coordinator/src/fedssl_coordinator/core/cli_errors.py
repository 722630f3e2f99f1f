"""Reports missing or invalid settings, and an unreachable database, in one line without a traceback."""

import re
from typing import Any

import typer
from pydantic import ValidationError

from fedssl.cli.lazy_group import Group
from fedssl.cli.usage import OneLineUsage
from fedssl.protocol.validation import validation_problems

_PASSWORD = re.compile(r"//([^:/@\s]+):[^@\s]+@")


class OneLineErrorGroup(OneLineUsage, Group):
    """A group of commands that report expected errors in one line on stderr and exit with status 2."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except ValidationError as error:
            if error.title != "Settings":
                raise
            message = f"{validation_message(error, prefix='FEDSSL_')}; docs/operations.md lists the settings"
        except Exception as error:
            from sqlalchemy.exc import OperationalError  # not at the top: beat uses no database

            if not isinstance(error, OperationalError):
                raise
            reason = _PASSWORD.sub(r"//\1:***@", str(error.orig).strip().partition("\n")[0])
            has_answered = getattr(error.orig, "sqlstate", None) is not None
            what = "refused" if has_answered else "does not answer at the address in FEDSSL_DATABASE_URL"
            message = f"the database {what}: {reason}"
        typer.echo(f"error: {message}", err=True)
        raise typer.Exit(2)


def validation_message(error: ValidationError, *, prefix: str = "") -> str:
    """Return a line that names each invalid value. With a prefix, values are named as environment variables."""
    messages = []
    for problem in validation_problems(error):
        name = prefix + problem.place.upper() if prefix else problem.place
        if problem.kind == "missing":
            messages.append(f"{name} must be set")
        else:
            messages.append(f"{name}: {problem.message}" if problem.place else problem.message)
    return "; ".join(messages)
