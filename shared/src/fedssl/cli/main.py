"""`fedssl`: the command tree."""

from typing import Annotated

import typer

from fedssl.cli.command_group import CommandGroup
from fedssl.cli.connection.choice import CONNECTION_HELP, chosen_connection
from fedssl.cli.connection.completion import complete_connection
from fedssl.cli.exit_codes import EXIT_CODES
from fedssl.cli.lazy_group import LazyCommand

COMMANDS = {
    "demo": LazyCommand("fedssl.cli.demo:demo", "Train a federation on this machine and show what it learnt."),
    "up": LazyCommand("fedssl.cli.up:up", "Run a federation on this machine until Ctrl-C."),
    "doctor": LazyCommand(
        "fedssl.cli.doctor.command:doctor", "Check this machine and the connection to the coordinator."
    ),
    "partition": LazyCommand(
        "fedssl.cli.datasets.partition:partition", "Show which client would get which images, as a table or picture."
    ),
    "simulate": LazyCommand("fedssl.cli.simulate:simulate", "Train a spec on this machine, without servers."),
    "compare": LazyCommand("fedssl.cli.compare.command:compare", "Compare methods on the same clients and budget."),
    "reproduce": LazyCommand(
        "fedssl.cli.reproduce.command:reproduce", "Rerun the papers' tables, in full or scaled down."
    ),
    "evaluate": LazyCommand(
        "fedssl.cli.evaluate.command:evaluate", "Evaluate an encoder by linear probe, kNN and more."
    ),
    "export": LazyCommand("fedssl.cli.export:export", "Convert a pulled encoder to ONNX, torchvision or timm."),
    "embed": LazyCommand(
        "fedssl.cli.embeddings.embed:embed", "Write the representations of a folder's images into one file."
    ),
    "search": LazyCommand("fedssl.cli.embeddings.search:search", "Find the images that are most like a given one."),
    "duplicates": LazyCommand(
        "fedssl.cli.embeddings.duplicates:duplicates", "Find near-duplicates among embedded images."
    ),
    "outliers": LazyCommand("fedssl.cli.embeddings.outliers:outliers", "Find embedded images that are like no other."),
    "classify": LazyCommand(
        "fedssl.cli.embeddings.classify:classify",
        "Predict the class of every image by a linear classifier on top of an encoder.",
    ),
    "run": LazyCommand("fedssl.cli.run.commands:app", "Submit runs, follow them and fetch their results."),
    "method": LazyCommand("fedssl.cli.methods:app", "Show the methods that can be trained."),
    "client": LazyCommand("fedssl.cli.clients:app", "Show and name data owners, and revoke their access."),
    "project": LazyCommand("fedssl.cli.projects:app", "Separate groups of people, data owners and runs."),
    "token": LazyCommand("fedssl.cli.tokens:app", "Create and revoke access tokens."),
    "notify": LazyCommand("fedssl.cli.notifications:app", "Notify people and programs by e-mail and webhooks."),
    "artifact": LazyCommand("fedssl.cli.artifacts:app", "Fetch a file of a run by its digest."),
    "connection": LazyCommand("fedssl.cli.connections:app", "Name the coordinators that you work with."),
    "public-dataset": LazyCommand("fedssl.cli.datasets.public:app", "Register public images that workers may fetch."),
    "evaluation-dataset": LazyCommand(
        "fedssl.cli.datasets.evaluation:app", "Register labelled images to evaluate encoders on."
    ),
    "weights": LazyCommand("fedssl.cli.weights:app", "Register weights that runs may start from."),
    "data": LazyCommand("fedssl.cli.datasets.commands:app", "List the data sets on this machine, and download more."),
}

_EPILOG = "\n\n".join(
    [
        CONNECTION_HELP,
        "Results go to standard output, everything else to standard error. --format json writes one JSON document.",
        # \b keeps the line breaks
        "\b\nExit codes:\n" + "\n".join(f"{code:>4}  {meaning}" for code, meaning in EXIT_CODES.items()),
    ]
)


class Fedssl(CommandGroup):
    """The group of all commands."""

    table = COMMANDS


app = typer.Typer(
    name="fedssl",
    cls=Fedssl,
    help="Train one image encoder across data owners who cannot share images or labels.\n\n"
    "`fedssl demo` shows it all on this machine in about four minutes.",
    epilog=_EPILOG,
    no_args_is_help=True,
    rich_markup_mode=None,  # plain text: rich would read `[partition]` as markup, and takes 0.1 s to import
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
            help="Use the coordinator with this name, given by `fedssl connection add`. Accepted anywhere on the "
            "command line.  [env var: FEDSSL_CONNECTION]",
            autocompletion=complete_connection,
        ),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Apply the options that all commands share. The help text of the root is the app's."""
    chosen_connection.set(connection)


if __name__ == "__main__":
    app()
