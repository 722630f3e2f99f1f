"""`fedssl token`: the secrets by which people and workers are known."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal
from uuid import UUID

import typer

from fedssl.cli.connection.completion import complete_client
from fedssl.cli.connection.target import CONNECTION_HELP, TokenFileOption, UrlOption, connect
from fedssl.cli.errors import UsageError, seconds_of
from fedssl.cli.output import Format, FormatOption, note, show_json, show_table

if TYPE_CHECKING:
    from pydantic import ValidationError

    from fedssl.protocol.views import TokenCreated

app = typer.Typer(help="Make and revoke access tokens.", epilog=CONNECTION_HELP, no_args_is_help=True)

LabelOption = Annotated[str, typer.Option(help="A note for people.")]
OutOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write the secret to a new file that only you can read.")
]


@app.command()
def create(
    role: Annotated[
        Literal["admin", "operator", "viewer", "worker"], typer.Option(help="What the token's owner may do.")
    ],
    client_name: Annotated[
        str | None,
        typer.Option("--client", help="The data owner's name, for a worker's token.", autocompletion=complete_client),
    ] = None,
    label: LabelOption = "",
    expires: Annotated[
        str | None, typer.Option(metavar="TIME", help="For how long it is valid: 30d, 12h.  [default: until revoked]")
    ] = None,
    out: OutOption = None,
    url: UrlOption = None,
    token_file: TokenFileOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Make a token. Its secret is shown this once, alone on standard output, or goes to the file in --out.

    \b
    admin     everything: also makes and revokes tokens, and shuts data owners out
    operator  runs, data sets, evaluations, and enrolling data owners
    viewer    looks at all of that, and changes nothing
    worker    trains for one data owner; `fedssl token enrol` is safer to hand out
    """
    if (role == "worker") != (client_name is not None):
        raise UsageError("a worker's token needs --client NAME; every other has none")
    _require_new(out)
    seconds = None if expires is None else seconds_of("--expires", expires)
    from pydantic import ValidationError

    with connect(url, token_file) as client:
        try:
            created = client.create_token(role, client_id=client_name, label=label, lifetime_seconds=seconds)
        except ValidationError as error:
            raise _wrong(error, "--client") from None
    _show_secret(created, out, output)


@app.command()
def enrol(
    client_name: Annotated[str, typer.Argument(metavar="CLIENT", help="The data owner's name.")],
    label: LabelOption = "",
    expires: Annotated[str, typer.Option(metavar="TIME", help="Until when it must be used: 7d, 24h.")] = "24h",
    out: OutOption = None,
    url: UrlOption = None,
    token_file: TokenFileOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Make a token that makes somebody a data owner's worker, once; an unused one of before opens nothing any more.

    The secret is for the worker's first start: `fedssl-worker run --enrolment-token-file FILE`. The worker then makes a
    token of its own, which nobody else ever sees. Who comes second with the same secret is refused, which shows
    that it went astray.

    For a data owner who has had a worker this needs an admin's token.
    """
    _require_new(out)
    seconds = seconds_of("--expires", expires)
    from pydantic import ValidationError

    with connect(url, token_file) as client:
        try:
            created = client.create_enrolment_token(client_name, label=label, lifetime_seconds=seconds)
        except ValidationError as error:
            raise _wrong(error, "CLIENT") from None
    _show_secret(created, out, output)


@app.command("ls")
def list_tokens(url: UrlOption = None, token_file: TokenFileOption = None, output: FormatOption = Format.TABLE) -> None:
    """List tokens, without their secrets."""
    with connect(url, token_file) as client:
        found = list(client.tokens())
    if output is Format.JSON:
        show_json(found)
        return
    rows = [
        (
            str(view.id),
            view.role.value,
            view.client_id,
            view.label,
            view.created_at,
            view.expires_at,
            view.used_at,
            view.revoked_at,
        )
        for view in found
    ]
    show_table(["token", "role", "client", "label", "created", "expires", "used", "revoked"], rows)


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


def _require_new(out: Path | None) -> None:
    if out is not None and out.exists():
        raise UsageError(f"{out} exists: remove it, or name another file")


def _wrong(error: "ValidationError", client: str) -> UsageError:
    first = error.errors()[0]
    return UsageError(f"{client if 'client_id' in first['loc'] else '--label'}: {first['msg']}")


def _show_secret(created: "TokenCreated", out: Path | None, output: Format) -> None:
    if out is not None:
        from fedssl.local.server import write_private

        out.parent.mkdir(parents=True, exist_ok=True)
        write_private(out, created.secret + "\n")
        note(f"the secret is in {out}")
    if output is Format.JSON:
        show_json(created.model_dump(mode="json", exclude={"secret"} if out is not None else set()))
    elif out is None:
        typer.echo(created.secret)
