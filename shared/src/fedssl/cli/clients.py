"""`fedssl client`: the data owners that a coordinator knows."""

from collections.abc import Sequence
from typing import Annotated

import typer

from fedssl.cli.arguments import ClientArgument, TokenFileOption, UrlOption
from fedssl.cli.connection.choice import CONNECTION_HINT
from fedssl.cli.connection.connect import connect
from fedssl.cli.errors import UsageError
from fedssl.cli.output import Format, FormatOption, note, show_json, show_list, show_pairs, show_result, show_table
from fedssl.protocol.data import channels_in_words
from fedssl.wording import plural

app = typer.Typer(
    help="Show and name data owners, and revoke their access.", epilog=CONNECTION_HINT, no_args_is_help=True
)


@app.command("ls")
def list_clients(
    url: UrlOption = None, token_file: TokenFileOption = None, output: FormatOption = Format.TABLE
) -> None:
    """List the data owners."""
    with connect(url, token_file) as client:
        found = list(client.clients())
    rows = [
        (
            view.id,
            view.display_name or None,
            "revoked" if view.revoked_at else "registered" if view.registered_at else "invited",
            view.num_images,
            view.device,
            view.encoder,
            view.last_seen_at,
        )
        for view in found
    ]
    columns = ["client", "display name", "state", "#images", "device", "encoder", "last seen"]
    show_list(found, columns, rows, output, projects=[view.project for view in found])


@app.command()
def show(
    name: ClientArgument, url: UrlOption = None, token_file: TokenFileOption = None, output: FormatOption = Format.TABLE
) -> None:
    """Show one data owner."""
    with connect(url, token_file) as client:
        view = client.client(name)
    if output is Format.JSON:
        show_json(view)
    else:
        show_pairs({key.replace("_", " ").replace(" at", ""): value for key, value in view})


@app.command("card")
def show_card(
    project: Annotated[
        str | None, typer.Option(help="The project of the clients. Default: your own, or else the default one.")
    ] = None,
    url: UrlOption = None,
    token_file: TokenFileOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Show what data owners disclose about their images: the federated data card.

    Numbers of few images or patients are suppressed ("-"). A drift of 0.2 or more is an alarm: the distance of a site's
    intensity histogram to the mean of all sites. If at least two sites allow their sums, `mean` and `std` for a spec's
    `[data]` are below the table.
    """
    with connect(url, token_file) as client:
        found = client.data_card(project)
    if output is Format.JSON:
        show_json(found)
        return
    rows = [
        (
            site.client_id,
            None if site.card is None else site.card.num_images,
            None if site.card is None else site.card.num_groups,
            site.num_unreadable,
            None if site.card is None else _bins(site.card.channels).rstrip(" 0"),
            None if site.card is None else _bins(site.card.sizes),
            None if site.card is None else _bins(site.card.histogram),
            None if site.drift is None else f"{site.drift:.2f}{' ALARM' if site.is_drifting else ''}",
        )
        for site in found.sites
    ]
    columns = ["client", "#images", "#groups", "#unreadable", "channels", "sizes", "histogram", "drift"]
    show_table(columns, rows)
    for each in found.moments:
        note(f"{channels_in_words(each.channels)}, {each.num_images:,} images of {plural(each.num_clients, 'client')}:")
        note(f"mean = {[round(value, 4) for value in each.mean]}")
        note(f"std = {[round(value, 4) for value in each.std]}")


def _bins(values: Sequence[float | None]) -> str:
    return " ".join(
        "-" if value is None else f"{value:.2g}" if isinstance(value, float) else str(value) for value in values
    )


@app.command()
def rename(
    name: ClientArgument,
    display_name: Annotated[
        str, typer.Argument(metavar="DISPLAY_NAME", help="What people see next to the name. Empty: nothing.")
    ],
    url: UrlOption = None,
    token_file: TokenFileOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Change a data owner's display name. The name stays, because random seeds derive from it.

    Example: `fedssl client rename hospital-a "St. Mary's, radiology"`
    """
    from fedssl.client import InvalidRequest

    with connect(url, token_file) as client:
        try:
            view = client.rename_client(name, display_name)
        except InvalidRequest as error:
            raise UsageError(f"DISPLAY_NAME: {error.problems[0].message}") from None
    shown = f"is shown as {view.display_name}" if view.display_name else "has no display name"
    show_result(view, f"{view.id} {shown}", output)


@app.command("confirm-identity")
def confirm_identity(
    name: ClientArgument,
    identity: Annotated[str, typer.Argument(metavar="KEY", help="The new key, as the owner's worker logs it.")],
    url: UrlOption = None,
    token_file: TokenFileOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Confirm a data owner's new identity key, so that its worker takes part in secure rounds again.

    Ask the owner for the key by another channel first: with a key of its own, a coordinator could pose as a client.
    """
    with connect(url, token_file) as client:
        view = client.confirm_identity(name, identity.removeprefix("ed25519:"))
    show_result(view, f"{view.id} has the identity key ed25519:{view.identity}", output)


@app.command()
def revoke(
    name: ClientArgument, url: UrlOption = None, token_file: TokenFileOption = None, output: FormatOption = Format.TABLE
) -> None:
    """Revoke a data owner's access: its tokens and leases end now, and no further round includes it."""
    with connect(url, token_file) as client:
        view = client.revoke_client(name)
    show_result(view, f"{view.id} is revoked", output)


@app.command()
def anchors(
    name: ClientArgument, url: UrlOption = None, token_file: TokenFileOption = None, output: FormatOption = Format.TABLE
) -> None:
    """List the anchors of a data owner's ledger, for `fedssl-worker ledger verify --anchors`.

    An anchor is the number and the hash of the newest entry that the ledger had at that time. An anchor that
    contradicts an earlier one shows that the ledger was truncated, rewritten or restored from a copy.
    """
    with connect(url, token_file) as client:
        found = list(client.ledger_anchors(name))
    rows = [(view.at, view.seq, view.head, view.key[:8], "" if view.is_consistent else "CONTRADICTS") for view in found]
    show_list(found, ["held since", "#entry", "hash", "ledger", "remark"], rows, output)
