"""`fedssl token`: the secrets that authenticate people and workers."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from uuid import UUID

import typer

from fedssl.cli.arguments import TokenFileOption, UrlOption, seconds_of
from fedssl.cli.connection.choice import CONNECTION_HINT
from fedssl.cli.connection.completion import complete_client
from fedssl.cli.connection.connect import connect
from fedssl.cli.errors import UsageError
from fedssl.cli.output import Format, FormatOption, note, show_json, show_table
from fedssl.protocol.tokens import LastingRole
from fedssl.protocol.views import TokenCreated

if TYPE_CHECKING:
    from fedssl.client import InvalidRequest

app = typer.Typer(help="Create and revoke access tokens.", epilog=CONNECTION_HINT, no_args_is_help=True)

LabelOption = Annotated[str, typer.Option(help="A remark that helps people to recognise the token.")]
OutOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Write the secret to a new file that only you can read, and do not print it."),
]


@app.command()
def create(
    role: Annotated[LastingRole, typer.Option(help="What the owner of the token may do.")],
    client_name: Annotated[
        str | None,
        typer.Option("--client", help="The data owner's name, for a worker's token.", autocompletion=complete_client),
    ] = None,
    label: LabelOption = "",
    expires: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="How long the token is valid: 30d, 12h.  [default: until revoked]"),
    ] = None,
    out: OutOption = None,
    url: UrlOption = None,
    token_file: TokenFileOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Create a token. Its secret is printed only now, or written to the file in --out.

    Example: `fedssl token create --role operator --label alice --out alice.token`

    \b
    admin     may do everything, including to create and revoke tokens and
              revoke data owners
    operator  may manage runs, data sets and evaluations, and enrol data owners
    viewer    may read all of that, and change nothing
    worker    may train for one data owner; `fedssl token enrol` is safer
              to hand out
    """
    if (role == "worker") != (client_name is not None):
        raise UsageError("--role worker needs --client NAME; the other roles do not take --client")
    _require_new(out)
    seconds = None if expires is None else seconds_of("--expires", expires)
    from fedssl.client import InvalidRequest

    with connect(url, token_file) as client:
        try:
            created = client.create_token(role, client_id=client_name, label=label, lifetime_seconds=seconds)
        except InvalidRequest as error:
            raise _usage_error(error, "--client") from None
    _show_secret(created, out, output)


@app.command()
def enrol(
    client_name: Annotated[str, typer.Argument(metavar="CLIENT", help="The data owner's name.")],
    label: LabelOption = "",
    expires: Annotated[str, typer.Option(metavar="TIME", help="How long the token can be used: 7d, 24h.")] = "24h",
    out: OutOption = None,
    url: UrlOption = None,
    token_file: TokenFileOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Create a single-use enrolment token for a data owner's worker. Revokes an earlier unused one.

    The worker needs the secret for its first start: `fedssl-worker run --enrolment-token-file FILE`. It then creates a
    token of its own, which no one else ever sees. A second worker with the same secret is refused, which shows that
    someone else has used it.

    If the data owner already had a worker, this needs an admin's token.
    """
    _require_new(out)
    seconds = seconds_of("--expires", expires)
    from fedssl.client import InvalidRequest

    with connect(url, token_file) as client:
        try:
            created = client.create_enrolment_token(client_name, label=label, lifetime_seconds=seconds)
        except InvalidRequest as error:
            raise _usage_error(error, "CLIENT") from None
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
    """Revoke a token. It is refused from now on."""
    with connect(url, token_file) as client:
        client.revoke_token(token)
    note(f"token {token} is revoked")


def _require_new(out: Path | None) -> None:
    if out is not None and out.exists():
        raise UsageError(f"{out} exists: remove it, or choose another file")


def _usage_error(error: "InvalidRequest", client: str) -> UsageError:
    first = error.problems[0]
    return UsageError(f"{client if 'client_id' in first.location else '--label'}: {first.message}")


def _show_secret(created: TokenCreated, out: Path | None, output: Format) -> None:
    if out is not None:
        from fedssl.files import write_private

        out.parent.mkdir(parents=True, exist_ok=True)
        write_private(out, created.secret + "\n")
        note(f"the secret is written to {out}")
    if output is Format.JSON:
        show_json(created.model_dump(mode="json", exclude={"secret"} if out is not None else set()))
    elif out is None:
        typer.echo(created.secret)
