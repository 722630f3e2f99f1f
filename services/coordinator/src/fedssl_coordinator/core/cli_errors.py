"""What a person is told of settings that are missing or wrong, and of a database that does not answer."""

import re
from typing import Any

import typer
from pydantic import ValidationError
from sqlalchemy.exc import OperationalError
from typer.core import TyperGroup

_PASSWORD = re.compile(r"//([^:/@\s]+):[^@\s]+@")


class SaidPlainly(TyperGroup):
    """Commands whose mistakes end in one line on stderr and status 2, and not in a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except ValidationError as error:
            if error.title != "Settings":
                raise
            said = f"{in_words(error, prefix='FEDSSL_')}; docs/operations.md lists the settings"
        except OperationalError as error:
            reason = _PASSWORD.sub(r"//\1:***@", str(error.orig).strip().partition("\n")[0])
            has_answered = getattr(error.orig, "sqlstate", None) is not None
            what = "refused" if has_answered else "does not answer at the address in FEDSSL_DATABASE_URL"
            said = f"the database {what}: {reason}"
        typer.echo(f"error: {said}", err=True)
        raise typer.Exit(2)


def in_words(error: ValidationError, *, prefix: str = "") -> str:
    """What is wrong with which value; with a prefix, values are variables of the environment."""
    said = []
    for problem in error.errors(include_url=False, include_input=False, include_context=False):
        name = ".".join(str(part) for part in problem["loc"])
        message = str(problem["msg"]).removeprefix("Value error, ")
        shown = prefix + name.upper() if prefix else name
        said.append(
            f"{shown} must be set" if problem["type"] == "missing" else f"{shown}: {message}" if name else message
        )
    return "; ".join(said)
