"""`fedssl connection`: coordinators by name, in one file of the user's."""

from typing import TYPE_CHECKING, Annotated

import typer

from fedssl.cli.connection.completion import complete_connection
from fedssl.cli.connection.target import TokenFileOption, read_token
from fedssl.cli.errors import UsageError
from fedssl.cli.output import Format, FormatOption, note, show_json, show_table

if TYPE_CHECKING:
    from fedssl.cli.connection.file import NamedConnection

_EPILOG = (
    "They are kept in connections.json in $XDG_CONFIG_HOME/fedssl, else in ~/.config/fedssl, which only you can read. "
    "`fedssl --connection NAME ...` takes one for a command, FEDSSL_CONNECTION for a shell, `fedssl connection use` "
    "for every command that nothing else tells where to go."
)

app = typer.Typer(help="Name the coordinators that you work with.", epilog=_EPILOG, no_args_is_help=True)

NameArgument = Annotated[
    str, typer.Argument(metavar="NAME", help="A connection's name.", autocompletion=complete_connection)
]


@app.command()
def add(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Lower-case letters, digits, `.`, `_` and `-`.")],
    url: Annotated[str, typer.Argument(metavar="URL", help="Address of the coordinator, https://HOST for example.")],
    *,
    token_file: TokenFileOption = None,
    copy_token: Annotated[
        bool, typer.Option("--copy-token", help="Keep the token itself, and not only where its file is.")
    ] = False,
    use: Annotated[bool, typer.Option("--use", help="Use it from now on.")] = False,
    replace: Annotated[bool, typer.Option("--replace", help="In place of one of that name.")] = False,
    output: FormatOption = Format.TABLE,
) -> None:
    """Name a coordinator. Without --token-file its token comes from FEDSSL_TOKEN or FEDSSL_TOKEN_FILE.

    The first one is used from now on, as with --use.
    """
    from pydantic import SecretStr, ValidationError

    from fedssl.cli.connection.file import Connections, NamedConnection, connections_path, read_connections
    from fedssl.cli.connection.file import write_connections as write

    if copy_token and token_file is None:
        raise UsageError("--copy-token needs --token-file FILE, which holds the token to copy")
    known = read_connections()
    if name in known.connections and not replace:
        raise UsageError(f"there is a connection {name!r}: take another name, or --replace")
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
        first = error.errors(include_input=False)[0]
        where = "URL" if first["loc"][-1:] == ("url",) else "NAME"
        raise UsageError(f"{where}: {first['msg'].removeprefix('Value error, ')}") from None
    write(changed)
    if output is Format.JSON:
        show_json(_document(name, added, is_current=current == name))
    else:
        note(f"{name} is {added.url}, in {connections_path()}" + ("; in use" if current == name else ""))


@app.command("ls")
def list_connections(output: FormatOption = Format.TABLE) -> None:
    """List the connections; of their tokens only where they are."""
    from fedssl.cli.connection.file import read_connections

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
    """Use a connection from now on, wherever nothing else says where to go."""
    from fedssl.cli.connection.file import read_connections, write_connections

    known = read_connections()
    chosen = known.get(name)
    write_connections(known.model_copy(update={"current": name}))
    if output is Format.JSON:
        show_json(_document(name, chosen, is_current=True))
    else:
        note(f"{name} ({chosen.url}) is in use")


@app.command("rm")
def remove(name: NameArgument, output: FormatOption = Format.TABLE) -> None:
    """Forget a connection. The coordinator, and a token's own file, stay as they are."""
    from fedssl.cli.connection.file import read_connections, write_connections

    known = read_connections()
    gone = known.get(name)
    left = {other: connection for other, connection in known.connections.items() if other != name}
    current = None if known.current == name else known.current
    write_connections(known.model_copy(update={"current": current, "connections": left}))
    if output is Format.JSON:
        show_json(_document(name, gone, is_current=False))
    else:
        note(f"{name} is forgotten" + ("; no connection is in use now" if known.current == name else ""))


def _document(name: str, connection: "NamedConnection", *, is_current: bool) -> dict[str, object]:
    place = None if connection.token is None else "kept here"
    if connection.token_file is not None:
        place = str(connection.token_file)
    return {"name": name, "url": connection.url, "token": place, "current": is_current}
