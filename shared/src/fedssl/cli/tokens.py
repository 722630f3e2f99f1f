"""`fedssl token`: the secrets that authenticate people and workers."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from uuid import UUID

import typer

from fedssl.cli.arguments import ProjectOption, TokenFileOption, UrlOption, seconds_of
from fedssl.cli.connection.choice import CONNECTION_HINT
from fedssl.cli.connection.completion import complete_client
from fedssl.cli.connection.connect import connect
from fedssl.cli.errors import UsageError
from fedssl.cli.kit import kit_for, write_kit
from fedssl.cli.new_file import require_new_file
from fedssl.cli.output import Format, FormatOption, note, show_json, show_list
from fedssl.protocol.tokens import LastingRole
from fedssl.protocol.views import TokenCreated
from fedssl.wording import printable

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
    project: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Restrict the token to a project; for a worker, the project of a new data owner.  [default: that of "
            "your token, or every project]",
            show_default=False,
        ),
    ] = None,
    out: OutOption = None,
    url: UrlOption = None,
    token_file: TokenFileOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Create a token. Its secret is printed only now, or written to the file in --out.

    Example: `fedssl token create --role operator --label alice --out alice.token`

    \b
    admin     may do everything, including creating and revoking tokens and
              revoking data owners
    operator  may manage runs, data sets and evaluations, and enrol data owners
    viewer    may read all of that, and change nothing
    worker    may train for one data owner; `fedssl token enrol` is safer
              to hand out
    """
    if (role == "worker") != (client_name is not None):
        raise UsageError("--role worker needs --client NAME; the other roles do not take --client")
    require_new_file(out)
    seconds = None if expires is None else seconds_of("--expires", expires)
    from fedssl.client import InvalidRequest

    with connect(url, token_file) as client:
        try:
            created = client.create_token(
                role, client_id=client_name, label=label, lifetime_seconds=seconds, project=project
            )
        except InvalidRequest as error:
            raise _usage_error(error, "--client") from None
    _show_secret(created, out, output)


@app.command()
def enrol(
    client_name: Annotated[str, typer.Argument(metavar="CLIENT", help="The data owner's name.")],
    label: LabelOption = "",
    expires: Annotated[str, typer.Option(metavar="TIME", help="How long the token can be used: 7d, 24h.")] = "24h",
    project: ProjectOption = None,
    out: OutOption = None,
    kit: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write a zip file with all that the data owner's site needs: compose file, settings with the secret, "
            "template of a policy, README. Only you can read it. - is standard output.",
        ),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            envvar="FEDSSL_KIT_ADDRESS",
            metavar="URL",
            help="With --kit: the coordinator's address for the site, https://...  [default: the one that this command "
            "uses]",
            show_default=False,
        ),
    ] = None,
    ca: Annotated[
        Path | None,
        typer.Option(
            "--ca",
            envvar="FEDSSL_CA_FILE",
            metavar="FILE",
            help="With --kit: certificate (PEM) of the private authority of the coordinator's certificate; - reads "
            "standard input.",
        ),
    ] = None,
    image: Annotated[
        str | None,
        typer.Option(
            envvar="FEDSSL_KIT_IMAGE",
            metavar="IMAGE",
            help="With --kit: the worker's image.  [default: fedssl-worker:VERSION]",
        ),
    ] = None,
    url: UrlOption = None,
    token_file: TokenFileOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Create a single-use enrolment token for a data owner's worker. Revokes an earlier unused one.

    Example: `fedssl token enrol hospital-a --kit hospital-a.zip`

    The worker needs the secret for its first start: `fedssl-worker run --enrolment-token-file FILE`. It then creates a
    token of its own, which no one else ever sees. A second worker with the same secret is refused, which shows that
    someone else has used it.

    If the data owner already had a worker, this needs an admin's token.
    """
    if kit is not None and out is not None:
        raise UsageError("--kit contains the secret: leave out --out")
    to_stdout = str(kit) == "-"
    if to_stdout and (output is Format.JSON or sys.stdout is None or sys.stdout.isatty()):
        raise UsageError("--kit - writes a zip file to standard output: redirect it, and leave out --format")
    require_new_file(out if kit is None or to_stdout else kit)
    seconds = seconds_of("--expires", expires)
    from fedssl.client import InvalidRequest

    with connect(url, token_file) as client:
        try:
            site = None if kit is None else kit_for(client_name, (address or client.url).rstrip("/"), image, ca)
            created = client.create_enrolment_token(client_name, label=label, lifetime_seconds=seconds, project=project)
        except InvalidRequest as error:
            raise _usage_error(error, "CLIENT") from None
    if kit is None or site is None:
        _show_secret(created, out, output)
        return
    write_kit(kit, site.zipped(created.secret, created.expires_at))
    if not to_stdout:
        note(f"the kit is written to {kit}: send it to {client_name} by a channel that you trust")
    if output is Format.JSON:
        show_json(created.model_dump(mode="json", exclude={"secret"}))


@app.command("ls")
def list_tokens(url: UrlOption = None, token_file: TokenFileOption = None, output: FormatOption = Format.TABLE) -> None:
    """List tokens, without their secrets."""
    with connect(url, token_file) as client:
        found = list(client.tokens())
    rows = [
        (
            str(view.id),
            view.role.value,
            view.project,
            view.client_id,
            view.label,
            view.created_at,
            view.expires_at,
            view.used_at,
            view.revoked_at,
        )
        for view in found
    ]
    columns = ["token", "role", "project", "client", "label", "created", "expires", "used", "revoked"]
    show_list(found, columns, rows, output)


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


def _usage_error(error: "InvalidRequest", client: str) -> UsageError:
    first = error.problems[0]
    name = {"client_id": client, "project": "--project"}.get(str(first.location[-1]), "--label")
    return UsageError(f"{name}: {first.message}")


def _show_secret(created: TokenCreated, out: Path | None, output: Format) -> None:
    if out is not None:
        from fedssl.files import write_private

        write_private(out, created.secret + "\n")
        note(f"the secret is written to {out}")
    if output is Format.JSON:
        show_json(created.model_dump(mode="json", exclude={"secret"} if out is not None else set()))
    elif out is None:
        typer.echo(printable(created.secret))
