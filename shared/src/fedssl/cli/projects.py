"""`fedssl project`: what separates groups of people at one coordinator."""

from typing import Annotated

import typer

from fedssl.cli.arguments import TokenFileOption, UrlOption
from fedssl.cli.connection.choice import CONNECTION_HINT
from fedssl.cli.connection.connect import connect
from fedssl.cli.errors import UsageError
from fedssl.cli.output import Format, FormatOption, show_list, show_result

app = typer.Typer(
    help="Separate groups of people: runs, data owners and data sets belong to one project, and tokens may be "
    "restricted to one.",
    epilog=CONNECTION_HINT,
    no_args_is_help=True,
)


@app.command()
def create(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Lower-case letters, digits and single hyphens.")],
    url: UrlOption = None,
    token_file: TokenFileOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Create a project. Needs an admin's token for every project.

    \b
    Examples:
      fedssl project create cardiology
      fedssl token create --role admin --project cardiology --out admin.token
    """
    from fedssl.client import InvalidRequest

    with connect(url, token_file) as client:
        try:
            view = client.create_project(name)
        except InvalidRequest:
            raise UsageError(
                f"NAME: {name!r} is not a project's name: use up to 63 lower-case letters and digits, with single "
                "hyphens between, such as cardiology"
            ) from None
    command = f"fedssl token create --role admin --project {view.name}"
    show_result(view, f"the project {view.name} exists; `{command}` lets people in", output)


@app.command("ls")
def list_projects(
    url: UrlOption = None, token_file: TokenFileOption = None, output: FormatOption = Format.TABLE
) -> None:
    """List the projects that your token may see."""
    with connect(url, token_file) as client:
        found = list(client.projects())
    show_list(found, ["project", "created"], [(view.name, view.created_at) for view in found], output)
