"""`fedssl token`: the secrets by which operators and workers are known."""

from pathlib import Path
from typing import Annotated, Literal
from uuid import UUID

import typer

from fedssl.cli.connection import CONNECTION_HELP, TokenFileOption, UrlOption, connect
from fedssl.cli.errors import UsageError
from fedssl.cli.output import Format, FormatOption, note, show_json, show_table

app = typer.Typer(help="Make and revoke access tokens.", epilog=CONNECTION_HELP, no_args_is_help=True)


@app.command()
def create(
    role: Annotated[Literal["operator", "worker"], typer.Option(help="What the token's owner may do.")],
    client_name: Annotated[
        str | None, typer.Option("--client", help="The data owner's name, for a worker's token.")
    ] = None,
    label: Annotated[str, typer.Option(help="A note for people.")] = "",
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the secret to a new file that only you can read.")
    ] = None,
    url: UrlOption = None,
    token_file: TokenFileOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Make a token. Its secret is shown this once, alone on standard output, or goes to the file in --out."""
    if (role == "worker") != (client_name is not None):
        raise UsageError("a worker's token needs --client NAME; an operator's has none")
    if out is not None and out.exists():
        raise UsageError(f"{out} exists: remove it, or name another file")
    from pydantic import ValidationError

    with connect(url, token_file) as client:
        try:
            created = client.create_token(role, client_id=client_name, label=label)
        except ValidationError as error:
            first = error.errors()[0]
            raise UsageError(f"--{'client' if 'client_id' in first['loc'] else 'label'}: {first['msg']}") from None
    if out is not None:
        from fedssl.local.server import write_private

        out.parent.mkdir(parents=True, exist_ok=True)
        write_private(out, created.secret + "\n")
        note(f"the secret is in {out}")
    if output is Format.JSON:
        hidden = {"secret"} if out is not None else set()
        show_json(created.model_dump(mode="json", exclude=hidden))
    elif out is None:
        typer.echo(created.secret)


@app.command("ls")
def list_tokens(url: UrlOption = None, token_file: TokenFileOption = None, output: FormatOption = Format.TABLE) -> None:
    """List tokens, without their secrets."""
    with connect(url, token_file) as client:
        found = list(client.tokens())
    if output is Format.JSON:
        show_json(found)
        return
    rows = [(str(view.id), view.role, view.client_id, view.label, view.created_at, view.revoked_at) for view in found]
    show_table(["token", "role", "client", "label", "created", "revoked"], rows)


@app.command()
def revoke(
    token: Annotated[UUID, typer.Argument(metavar="TOKEN", help="A token's id from `fedssl token ls`.")],
    url: UrlOption = None,
    token_file: TokenFileOption = None,
) -> None:
    """Make a token worthless from now on."""
    with connect(url, token_file) as client:
        client.revoke_token(token)
    note(f"token {token} is revoked")
