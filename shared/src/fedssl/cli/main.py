"""`fedssl`: the command tree."""

from typing import Annotated

import typer

from fedssl.cli import artifacts, clients, demo, export, methods, simulate, tokens, up
from fedssl.cli.compare import command as compare
from fedssl.cli.connection import commands as connections
from fedssl.cli.connection.completion import complete_connection
from fedssl.cli.connection.target import CONNECTION_HELP, chosen_connection
from fedssl.cli.datasets import commands as datasets
from fedssl.cli.datasets import evaluation, partition, public
from fedssl.cli.doctor import command as doctor
from fedssl.cli.errors import EXIT_CODES, CommandGroup
from fedssl.cli.evaluate import command as evaluate
from fedssl.cli.reproduce import command as reproduce
from fedssl.cli.run import commands as runs
from fedssl.cli.run import dimensions, distillations, embedding, evaluations, metrics, state

_EPILOG = "\n\n".join(
    [
        CONNECTION_HELP,
        "Results go to standard output, everything else to standard error; --format json writes one JSON document.",
        # \b keeps the lines as they are
        "\b\nExit codes:\n" + "\n".join(f"{code:>4}  {meaning}" for code, meaning in EXIT_CODES.items()),
    ]
)

app = typer.Typer(
    name="fedssl",
    cls=CommandGroup,
    help="Train one image encoder with data owners who can share neither images nor labels.",
    epilog=_EPILOG,
    no_args_is_help=True,
    rich_markup_mode=None,  # plain text: rich would take `[partition]` for markup, and costs a tenth of a second
    pretty_exceptions_show_locals=False,
)


def _show_version(wanted: bool) -> None:  # noqa: FBT001 - typer's signature
    if wanted:
        from importlib.metadata import version

        typer.echo(f"fedssl {version('fedssl')}")
        raise typer.Exit


@app.callback()
def _root(
    *,
    connection: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="A coordinator by the name that `fedssl connection add` gave it; may stand anywhere in a command.  "
            "[env: FEDSSL_CONNECTION]",
            autocompletion=complete_connection,
        ),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Holds what all commands have in common; its help is the app's."""
    chosen_connection.set(connection)


app.command("demo", short_help="Train a federation on this machine and show what it learnt.")(demo.demo)
app.command("up", short_help="Run a federation on this machine until Ctrl-C.")(up.up)
app.command("doctor", short_help="Check this machine, and the way to the coordinator.")(doctor.doctor)
runs.app.command("rounds")(metrics.list_rounds)
runs.app.command("metrics")(metrics.list_metrics)
runs.app.command("export-metrics")(metrics.export_metrics)
runs.app.command("state")(state.show_state)
runs.app.command("dimensions")(dimensions.show_dimensions)
runs.app.command("distillations")(distillations.list_distillations)
runs.app.command("cancel-distillation")(distillations.cancel_distillation)
runs.app.command("evaluate")(evaluations.request_evaluation)
runs.app.command("evaluations")(evaluations.list_evaluations)
runs.app.command("embedding")(embedding.draw_embedding)
runs.app.command("cancel-evaluation")(evaluations.cancel_evaluation)
app.add_typer(runs.app, name="run")
app.add_typer(methods.app, name="method")
app.add_typer(clients.app, name="client")
app.add_typer(tokens.app, name="token")
app.add_typer(artifacts.app, name="artifact")
app.add_typer(connections.app, name="connection")
app.add_typer(public.app, name="public-dataset")
app.add_typer(evaluation.app, name="evaluation-dataset")
app.add_typer(datasets.app, name="data")
app.command("partition", short_help="Show who would hold which images, as a table and a picture.")(partition.partition)
app.command("simulate", short_help="Train a spec in this process, without servers.")(simulate.simulate)
app.command("compare", short_help="Compare methods on the same clients and budgets.")(compare.compare)
app.command("reproduce", short_help="Run the papers' tables again, in full or scaled down.")(reproduce.reproduce)
app.command("evaluate", short_help="Judge an encoder by a linear probe and kNN.")(evaluate.evaluate)
app.command("export", short_help="Write a pulled encoder as ONNX, or for torchvision and timm.")(export.export)

if __name__ == "__main__":
    app()
