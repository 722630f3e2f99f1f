"""`fedssl method`: the methods that can be trained, as this installation or a coordinator has them."""

import json
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import typer

from fedssl.cli.arguments import TokenFileOption, UrlOption
from fedssl.cli.connection.choice import CONNECTION_HINT
from fedssl.cli.connection.connect import connect
from fedssl.cli.errors import UsageError
from fedssl.cli.output import Format, FormatOption, note, show_json, show_list, show_pairs, show_table
from fedssl.protocol.methods import METHOD_CONFIGS, MethodConfig

app = typer.Typer(
    help="Show the methods that can be trained. Needs no coordinator.",
    epilog=CONNECTION_HINT,
    no_args_is_help=True,
)

RemoteOption = Annotated[bool, typer.Option("--remote", help="Ask the coordinator instead of this installation.")]


def complete_method(incomplete: str) -> list[tuple[str, str]]:
    """Offer the methods of this installation to the shell."""
    return [(name, config.info.title) for name, config in METHOD_CONFIGS.items() if name.startswith(incomplete)]


@app.command("ls")
def list_methods(
    *,
    remote: RemoteOption = False,
    url: UrlOption = None,
    token_file: TokenFileOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """List the methods."""
    if remote:
        _list_remote(url, token_file, output)
        return
    if output is Format.JSON:
        show_json([_document(config) for config in METHOD_CONFIGS.values()])
        return
    rows = [(name, config.info.title, config.info.leaves_the_client) for name, config in METHOD_CONFIGS.items()]
    show_table(["method", "title", "leaves the client"], rows)


@app.command()
def show(
    name: Annotated[
        str, typer.Argument(metavar="METHOD", help="A name from `fedssl method ls`.", autocompletion=complete_method)
    ],
    *,
    everything: Annotated[
        bool,
        typer.Option("--all", help="Show the parameters of every part, not only of the method's default parts."),
    ] = False,
    spec: Annotated[
        bool,
        typer.Option("--spec", help="Show a whole spec with the settings of the paper, as YAML or JSON."),
    ] = False,
    remote: RemoteOption = False,
    url: UrlOption = None,
    token_file: TokenFileOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Show a method: its paper, what leaves the client, and every parameter.

    Example: `fedssl method show fedbyol`. With --remote, the parameters are shown only with `--format json`, as a JSON
    schema.

    `fedssl method show ssd --spec | fedssl simulate -` trains with the settings of the paper: its network, images,
    partition, rounds and evaluation. Comments name the table's cell, and what differs from the paper.
    """
    if spec and (remote or everything):
        raise UsageError("--spec shows a spec of this installation: leave out --remote and --all")
    if remote:
        _show_remote(name, url, token_file, output)
        return
    config = METHOD_CONFIGS.get(name)
    if config is None:
        close = get_close_matches(name, METHOD_CONFIGS, n=1)
        known = f"did you mean {close[0]}?" if close else f"known methods: {', '.join(METHOD_CONFIGS)}"
        raise UsageError(f"there is no method {name!r}; {known}")
    if spec:
        _show_spec(name, output)
        return
    if output is Format.JSON:
        show_json(_document(config))
        return
    info = config.info
    show_pairs(
        {
            "method": name,
            "title": info.title,
            "version": info.version,
            "about": (config.__doc__ or "").strip(),
            "paper": info.paper,
            "equations": info.equations,
            "leaves the client": info.leaves_the_client,
            "stays on the client": info.stays_on_the_client,
            "can be summed": _summed(config),
            "secure aggregation": _secure(config),
        }
    )
    show_table(["parameter", "default", "allowed", "meaning"], _parameters(config, everything=everything))
    if not everything:
        note("--all also shows the parameters of the other parts")


def _list_remote(url: str | None, token_file: Path | None, output: Format) -> None:
    with connect(url, token_file) as client:
        found = list(client.methods())
    rows = [(view.name, view.version, view.title, view.leaves_the_client) for view in found]
    show_list(found, ["method", "#version", "title", "leaves the client"], rows, output)


def _show_remote(name: str, url: str | None, token_file: Path | None, output: Format) -> None:
    with connect(url, token_file) as client:
        view = client.method(name)
    if output is Format.JSON:
        show_json(view)
    else:
        show_pairs({key.replace("_", " "): value for key, value in view if key != "config_schema"})


def _show_spec(name: str, output: Format) -> None:
    """Show a run of the papers' tables that trains the method. Raises UsageError if there is none."""
    from fedssl.experiments.papers import method_cell
    from fedssl.run_files import spec_as_yaml

    cell = method_cell(name)
    if cell is None:
        raise UsageError(
            f"none of the papers' tables trains {name} by itself, so there are no settings of a paper to show: "
            f"`fedssl method show {name}` shows the defaults, and `fedssl reproduce --list` the rows of the tables"
        )
    if output is Format.JSON:
        show_json(cell.spec)
        return
    notes = list(cell.notes)
    if cell.public_client is not None:
        notes.append(
            f"here the public images are drawn from all training images, not those of {cell.public_client}: "
            f"`fedssl reproduce {cell.name}` takes those"
        )
    typer.echo("\n".join([f"# {cell.name}", *(f"# {note}" for note in notes), spec_as_yaml(cell.spec)]), nl=False)


def _summed(config: type[MethodConfig]) -> str:
    """Describe whether the coordinator needs only sums over the clients, with the method's default parts."""
    usual = config.model_validate({})
    if usual.why_not_summed is not None:
        return f"no: {usual.why_not_summed}"
    return "yes" + (f", except {', '.join(usual.sent_apart)}" if usual.sent_apart else "")


def _secure(config: type[MethodConfig]) -> str:
    """Describe whether masks can hide all that a client sends, with the method's default parts."""
    usual = config.model_validate({})
    if usual.why_not_secure is not None:
        return f"no: {usual.why_not_secure}"
    apart = " and ".join(usual.sent_apart)
    return f"yes, except {apart}: they leave without masks, if the data owner's policy permits it" if apart else "yes"


def _document(config: type[MethodConfig]) -> dict[str, Any]:
    usual = config.model_validate({})
    return {
        "name": config.model_fields["name"].default,
        **config.info.model_dump(),
        "description": (config.__doc__ or "").strip(),
        "why_not_summed": usual.why_not_summed,
        "why_not_secure": usual.why_not_secure,
        "sent_apart": list(usual.sent_apart),
        "config_schema": config.model_json_schema(),
    }


def _parameters(config: type[MethodConfig], *, everything: bool) -> list[tuple[object, ...]]:
    """Return a row per parameter: its name in a spec, default, allowed values, and meaning with the part it is for."""
    schema = config.model_json_schema()
    listing = _Listing(schema.get("$defs", {}), everything=everything)
    listing.add(schema["properties"], config.model_validate({}).model_dump(mode="json"), "method.", "")
    return listing.rows


class _Listing:
    """Walks through a config's JSON schema. The method's own parameters come first, then those of its parts."""

    def __init__(self, shared: dict[str, Any], *, everything: bool) -> None:
        self.rows: list[tuple[object, ...]] = []
        self._shared = shared
        self._everything = everything

    def add(self, properties: dict[str, Any], defaults: dict[str, Any], prefix: str, part: str) -> None:
        tables = {key: _parts(_item(entry), self._shared) for key, entry in properties.items()}
        for key in sorted(properties, key=lambda key: bool(tables[key])):
            entry, place = properties[key], f"{prefix}{key}"
            default = defaults.get(key, entry.get("default"))
            about = entry.get("description", "")
            meaning = f"with {part}: {about}" if part and about else f"with {part}" if part else about
            allowed = " | ".join(filter(None, tables[key])) or ("table" if tables[key] else _allowed(entry))
            self.rows.append((place, _short_default(default), allowed, meaning))
            inside = f"{place}[]." if _item(entry) is not entry else f"{place}."
            chosen = {_name(part): part for part in (default if isinstance(default, list) else [default])}
            used = {"": default} if "" in tables[key] else chosen
            for name, table in tables[key].items():
                if self._everything or used.get(name) is not None:
                    own = {field: value for field, value in table["properties"].items() if not name or field != "name"}
                    self.add(own, used.get(name) or {}, inside, name or part)


def _item(entry: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a list's items, or the schema itself if it is not a list's."""
    items: dict[str, Any] = entry.get("items", entry) if entry.get("type") == "array" else entry
    return items


def _name(table: object) -> str:
    return str(table.get("name", "")) if isinstance(table, dict) else ""


def _parts(entry: dict[str, Any], shared: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the tables that a parameter can be, by the name that selects one, or by "" if there is only one.

    A parameter that is a plain value has none.
    """
    references = [part["$ref"] for part in (entry, *entry.get("oneOf", ()), *entry.get("anyOf", ())) if "$ref" in part]
    found = {}
    for reference in references:
        table = shared[reference.rpartition("/")[2]]
        if "properties" in table:
            found[str(table["properties"].get("name", {}).get("const", ""))] = table
    return found


def _short_default(value: object) -> str:
    """Format a default; a part is shown by its name."""
    if isinstance(value, list) and all(isinstance(item, dict) for item in value):
        return ", ".join(map(_name, value)) or "[]"
    if isinstance(value, dict):
        return _name(value) or "table"
    return json.dumps(value) if value is None or isinstance(value, bool | list) else str(value)


def _allowed(entry: dict[str, Any]) -> str:
    if "anyOf" in entry:
        return " | ".join(_allowed(choice) for choice in entry["anyOf"])
    if "const" in entry:
        return str(entry["const"])
    if "enum" in entry:
        return " | ".join(map(str, entry["enum"]))
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {entry[key]}" for key, sign in signs.items() if key in entry]
    return ", ".join([str(entry.get("type", "")), *bounds]).strip(", ")
