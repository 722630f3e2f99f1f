"""`fedssl connection`: the user's named coordinators."""

from typing import Annotated

import typer
from pydantic import SecretStr, ValidationError

from fedssl.cli.arguments import TokenFileOption
from fedssl.cli.connection.completion import complete_connection
from fedssl.cli.connection.file import (
    Connections,
    NamedConnection,
    connections_path,
    read_connections,
    write_connections,
)
from fedssl.cli.errors import UsageError
from fedssl.cli.output import Format, FormatOption, note, show_json, show_result, show_table
from fedssl.protocol.validation import first_problem

_EPILOG = (
    "The names are kept in connections.json in $XDG_CONFIG_HOME/fedssl, or in ~/.config/fedssl if that is not set. "
    "Only you can read the file. `fedssl --connection NAME ...` uses a connection for one command, FEDSSL_CONNECTION "
    "for one shell, and `fedssl connection use NAME` for every command that is not given another coordinator."
)

app = typer.Typer(
    help="Name the coordinators that you work with.\n\n"
    "Example: `fedssl connection add hospital https://fl.example.org --token-file token`",
    epilog=_EPILOG,
    no_args_is_help=True,
)

NameArgument = Annotated[
    str, typer.Argument(metavar="NAME", help="A connection's name.", autocompletion=complete_connection)
]


@app.command()
def add(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Lower-case letters, digits, `.`, `_` and `-`.")],
    url: Annotated[str, typer.Argument(metavar="URL", help="Address of the coordinator, for example https://HOST.")],
    *,
    token_file: TokenFileOption = None,
    copy_token: Annotated[
        bool, typer.Option("--copy-token", help="Store the token itself, not only the path of its file.")
    ] = False,
    use: Annotated[bool, typer.Option("--use", help="Use this connection from now on.")] = False,
    replace: Annotated[bool, typer.Option("--replace", help="Replace the connection that has this name.")] = False,
    output: FormatOption = Format.TABLE,
) -> None:
    """Give a coordinator a name.

    Without --token-file, its token comes from FEDSSL_TOKEN or FEDSSL_TOKEN_FILE. The first connection that you add is
    used from now on, as with --use.
    """
    from fedssl.cli.connection.target import read_token

    if copy_token and token_file is None:
        raise UsageError("--copy-token needs --token-file FILE, the file with the token to copy")
    known = read_connections()
    if name in known.connections and not replace:
        raise UsageError(f"there is a connection {name!r} already: choose another name, or give --replace")
    token = None if token_file is None else read_token(token_file)
    try:
        added = NamedConnection(
            url=url,
            token=SecretStr(token) if token and copy_token else None,
            token_file=token_file.absolute() if token_file and not copy_token else None,
        )
        current = name if use or known.current is None else known.current
        changed = Connections(current=current, connections={**known.connections, name: added})
    except ValidationError as error:
        first = first_problem(error)
        option = {"url": "URL", "token_file": "--token-file"}.get(str(first.location[-1]))
        if option is not None:
            raise UsageError(f"{option}: {first.message}") from None
        raise UsageError(
            f"NAME: {name!r} cannot name a connection: use at most 63 lower-case letters, digits, `.`, `_` and `-`, "
            "with a letter or digit at both ends"
        ) from None
    write_connections(changed)
    in_use = "; it is in use" if current == name else ""
    remark = f"{name} is {added.url}, stored in {connections_path()}{in_use}"
    show_result(_document(name, added, is_current=current == name), remark, output)


@app.command("ls")
def list_connections(output: FormatOption = Format.TABLE) -> None:
    """List the connections. Tokens are not shown, only where they are stored."""
    known = read_connections()
    found = [_document(name, known.connections[name], is_current=name == known.current) for name in known.connections]
    if output is Format.JSON:
        show_json(found)
    elif found:
        show_table(
            ["", "name", "url", "token"], [("*" if row["current"] else "", *list(row.values())[:3]) for row in found]
        )
    else:
        note("there are no connections yet: `fedssl connection add NAME URL --token-file FILE`")


@app.command()
def use(name: NameArgument, output: FormatOption = Format.TABLE) -> None:
    """Use a connection from now on, for every command that is not given another coordinator."""
    known = read_connections()
    chosen = known.get(name)
    write_connections(known.model_copy(update={"current": name}))
    show_result(_document(name, chosen, is_current=True), f"{name} ({chosen.url}) is in use", output)


@app.command("rm")
def remove(name: NameArgument, output: FormatOption = Format.TABLE) -> None:
    """Remove a connection. The coordinator and the token's file are not changed."""
    known = read_connections()
    removed = known.get(name)
    kept = {other: connection for other, connection in known.connections.items() if other != name}
    current = None if known.current == name else known.current
    write_connections(known.model_copy(update={"current": current, "connections": kept}))
    in_use = "; no connection is in use now" if known.current == name else ""
    show_result(_document(name, removed, is_current=False), f"{name} is removed{in_use}", output)


def _document(name: str, connection: NamedConnection, *, is_current: bool) -> dict[str, object]:
    place = None if connection.token is None else "kept here"
    if connection.token_file is not None:
        place = str(connection.token_file)
    return {"name": name, "url": connection.url, "token": place, "current": is_current}
