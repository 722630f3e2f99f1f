"""`fedssl notify`: the destinations of notifications, by e-mail or webhook."""

import time
from pathlib import Path
from typing import Annotated
from uuid import UUID

import typer

from fedssl.cli.arguments import TokenFileOption, UrlOption, seconds_of
from fedssl.cli.connection.choice import CONNECTION_HINT
from fedssl.cli.connection.connect import connect
from fedssl.cli.errors import UsageError
from fedssl.cli.new_file import require_new_file
from fedssl.cli.output import Format, FormatOption, note, show_json, show_list, show_pairs
from fedssl.protocol.notifications import DeliveryState, DestinationKind, Topic
from fedssl.protocol.views import DeliveryView
from fedssl.wording import printable

app = typer.Typer(
    help="Notify people and programs of events, by e-mail and webhooks. Needs an admin's token.",
    epilog=CONNECTION_HINT,
    no_args_is_help=True,
)

DestinationArgument = Annotated[
    UUID, typer.Argument(metavar="DESTINATION", help="A destination's id from `fedssl notify ls`.")
]
_POLL_SECONDS = 0.5
_SHOWN = 50


@app.command()
def add(
    target: Annotated[str, typer.Argument(metavar="TARGET", help="The URL of a webhook, or an e-mail address.")],
    topics: Annotated[
        list[Topic] | None,
        typer.Option("--on", help="What to notify of; repeat the option for several.  [default: all]"),
    ] = None,
    label: Annotated[str, typer.Option(help="A remark that helps people to recognise the destination.")] = "",
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the secret to a new file that only you can read; do not print it."),
    ] = None,
    project: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The project of whose events it is notified.  [default: that of your token, or every project]",
            show_default=False,
        ),
    ] = None,
    url: UrlOption = None,
    token_file: TokenFileOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Add a destination, and print the secret that signs a webhook. The secret is printed only now.

    \b
    failed    a run, a distillation or an evaluation has failed
    stalled   a run makes no progress, and needs attention
    declined  a client has declined work (once per round)
    alarm     a collapse alert, an unusual update, a damaged file, or a
              client's ledger that contradicts itself
    finished  a run is completed, or was stopped

    \b
    Examples:
      fedssl notify add https://hooks.example.org/fedssl --out hook.secret
      fedssl notify add alice@example.org --on failed --on stalled
    """
    kind = DestinationKind.EMAIL if "@" in target and "://" not in target else DestinationKind.WEBHOOK
    if out is not None and kind is DestinationKind.EMAIL:
        raise UsageError("--out is for the secret of a webhook: e-mail has none")
    if kind is DestinationKind.WEBHOOK:
        require_new_file(out)
    from fedssl.client import InvalidRequest

    with connect(url, token_file) as client:
        try:
            created = client.create_notification_destination(kind, target, topics or list(Topic), label, project)
        except InvalidRequest as error:
            first = error.problems[0]
            name = {"label": "--label", "project": "--project"}.get(first.place, "TARGET")
            raise UsageError(f"{name}: {first.message}") from None
    if out is not None and created.secret is not None:
        from fedssl.files import write_private

        write_private(out, created.secret + "\n")
        note(f"the secret is written to {out}")
    if output is Format.JSON:
        show_json(created.model_dump(mode="json", exclude={"secret"} if out is not None else set()))
        return
    note(f"destination {created.id} is added; `fedssl notify test {created.id}` sends a test")
    if created.secret is not None and out is None:
        typer.echo(printable(created.secret))


@app.command("ls")
def list_destinations(
    url: UrlOption = None, token_file: TokenFileOption = None, output: FormatOption = Format.TABLE
) -> None:
    """List the destinations, with their last deliveries. Only the host of a webhook's URL is shown."""
    with connect(url, token_file) as client:
        found = list(client.notification_destinations())
    rows = [
        (
            str(view.id),
            view.target,
            ", ".join(view.topics),
            view.label,
            view.num_pending,
            None if view.last_delivery is None else outcome(view.last_delivery),
        )
        for view in found
    ]
    columns = ["destination", "target", "topics", "label", "#pending", "last delivery"]
    show_list(found, columns, rows, output, projects=[view.project or "all" for view in found])


@app.command("test")
def send_test(
    destination: DestinationArgument,
    wait: Annotated[str, typer.Option(metavar="TIME", help="How long to wait for the delivery: 30s, 2m.")] = "30s",
    url: UrlOption = None,
    token_file: TokenFileOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Send a test notification, and wait for the result. Exits with 1 if the first attempt fails."""
    seconds = seconds_of("--wait", wait)
    with connect(url, token_file) as client:
        sent = client.test_notification_destination(destination)
        end = time.monotonic() + seconds
        while sent.state is DeliveryState.PENDING and sent.error is None and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)
            newest = client.notification_deliveries(destination)
            sent = next((found for found in newest if found.id == sent.id), sent)
    if output is Format.JSON:
        show_json(sent)
    elif sent.state is DeliveryState.PENDING and sent.error is None:
        note(f"not delivered within {wait}: does a process of the coordinator serve the queue notify?")
    else:
        show_pairs({"delivery": str(sent.id), "outcome": outcome(sent)})
    if sent.state is not DeliveryState.DELIVERED:
        raise typer.Exit(1)


@app.command("log")
def list_deliveries(
    destination: DestinationArgument,
    num_shown: Annotated[int, typer.Option("--last", min=1, help="How many to show.")] = _SHOWN,
    url: UrlOption = None,
    token_file: TokenFileOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """List the newest deliveries to a destination. Those that have ended are kept for 30 days."""
    with connect(url, token_file) as client:
        found = [view for view, _ in zip(client.notification_deliveries(destination), range(num_shown), strict=False)]
    rows = [(str(view.id), view.topic, view.message, view.created_at, view.num_tries, outcome(view)) for view in found]
    show_list(found, ["delivery", "topic", "message", "created", "#tries", "outcome"], rows, output)


@app.command("rm")
def remove(destination: DestinationArgument, url: UrlOption = None, token_file: TokenFileOption = None) -> None:
    """Remove a destination. Notifications that wait for it are not delivered."""
    with connect(url, token_file) as client:
        client.remove_notification_destination(destination)
    note(f"destination {destination} is removed")


def outcome(delivery: DeliveryView) -> str:
    """Return the result of a delivery, in words."""
    if delivery.state is DeliveryState.DELIVERED:
        return f"delivered at {delivery.ended_at:%Y-%m-%d %H:%M:%SZ}"
    if delivery.state is DeliveryState.FAILED:
        return f"given up after {delivery.num_tries} tries: {delivery.error}"
    return f"try {delivery.num_tries} failed: {delivery.error}" if delivery.error else "waiting"
