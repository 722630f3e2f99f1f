"""`fedssl doctor`: whether this machine is set up correctly, and what to do if it is not."""

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedssl.cli.arguments import TokenFileOption, UrlOption
from fedssl.cli.connection.choice import chosen_connection
from fedssl.cli.errors import ChecksFailed, UsageError
from fedssl.cli.output import Format, FormatOption, show_json, show_table

if TYPE_CHECKING:
    from fedssl.client.environment import Target


def doctor(
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="Images for a worker on this machine: a sample is decoded, and what is not used is counted.",
        ),
    ] = None,
    url: UrlOption = None,
    token_file: TokenFileOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Check versions, GPU, disk space, data, and the coordinator: its address, clock, servers, and your token.

    Exits with 1 if something is wrong. A note is not an error: what it names works, but may not be what you want.
    """
    from fedssl.cli.doctor.checks import coordinator, this_machine
    from fedssl.cli.doctor.findings import Check, Found

    found = list(this_machine(data))
    target = _target(url, token_file)
    if isinstance(target, UsageError):
        found.append(Check("coordinator", Found.NOTE, str(target), "nothing, if you only run simulations"))
    else:
        found += coordinator(target)
    wrong = [check.name for check in found if check.found is Found.WRONG]
    if output is Format.JSON:
        show_json({"ok": not wrong, "checks": [asdict(check) for check in found]})
    else:
        show_table(["", "check", "found", "what to do"], [(c.found, c.name, c.what, c.todo or None) for c in found])
    if wrong:
        raise ChecksFailed(f"{len(wrong)} of {len(found)} checks found a problem: {', '.join(wrong)}")


def _target(url: str | None, token_file: Path | None) -> "Target | UsageError":
    """Return the coordinator to check. Raises UsageError if one was named explicitly and cannot be used."""
    from fedssl.cli.connection.target import find_target

    asked = url or token_file or chosen_connection.get()
    try:
        return find_target(url, token_file, connection=chosen_connection.get())
    except UsageError as error:
        if asked or {"FEDSSL_URL", "FEDSSL_CONNECTION"} & os.environ.keys():
            raise
        return error
