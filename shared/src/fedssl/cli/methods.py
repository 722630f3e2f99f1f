"""`fedssl method`: what can be trained, read from this installation, or from a coordinator where that is asked for."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedssl.cli.connection.completion import complete_method
from fedssl.cli.connection.target import CONNECTION_HELP, TokenFileOption, UrlOption, connect
from fedssl.cli.errors import UsageError
from fedssl.cli.output import Format, FormatOption, note, show_json, show_pairs, show_table

if TYPE_CHECKING:
    from fedssl.protocol.methods import MethodConfig

app = typer.Typer(
    help="Look at the methods that can be trained (no coordinator needed).",
    epilog=f"With --remote: {CONNECTION_HELP}",
    no_args_is_help=True,
)

RemoteOption = Annotated[bool, typer.Option("--remote", help="As the coordinator has it, not this installation.")]


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
    from fedssl.protocol.methods import METHOD_CONFIGS

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
        typer.Option("--all", help="The parameters of all parts, not only of those that the method has by default."),
    ] = False,
    remote: RemoteOption = False,
    url: UrlOption = None,
    token_file: TokenFileOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Show a method: its paper, what leaves the client, and every parameter.

    With --remote the coordinator's answer, whose parameters are shown as JSON schema with `--format json`.
    """
    if remote:
        _show_remote(name, url, token_file, output)
        return
    from difflib import get_close_matches

    from fedssl.protocol.methods import METHOD_CONFIGS

    config = METHOD_CONFIGS.get(name)
    if config is None:
        close = get_close_matches(name, METHOD_CONFIGS, n=1)
        known = f"did you mean {close[0]}?" if close else f"there are {', '.join(METHOD_CONFIGS)}"
        raise UsageError(f"there is no method {name!r}; {known}")
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
        }
    )
    show_table(["parameter", "default", "allowed", "meaning"], _parameters(config, everything=everything))
    if not everything:
        note("--all shows the parameters of the other parts too")


def _list_remote(url: str | None, token_file: Path | None, output: Format) -> None:
    with connect(url, token_file) as client:
        found = list(client.methods())
    if output is Format.JSON:
        show_json(found)
    else:
        rows = [(view.name, view.version, view.title, view.leaves_the_client) for view in found]
        show_table(["method", "#version", "title", "leaves the client"], rows)


def _show_remote(name: str, url: str | None, token_file: Path | None, output: Format) -> None:
    with connect(url, token_file) as client:
        view = client.method(name)
    if output is Format.JSON:
        show_json(view)
    else:
        show_pairs({key.replace("_", " "): value for key, value in view if key != "config_schema"})


def _document(config: "type[MethodConfig]") -> dict[str, Any]:
    return {
        "name": config.model_fields["name"].default,
        **config.info.model_dump(),
        "description": (config.__doc__ or "").strip(),
        "config_schema": config.model_json_schema(),
    }


def _parameters(config: "type[MethodConfig]", *, everything: bool) -> list[tuple[object, ...]]:
    """Every parameter under the name that it has in a spec; those of a part say which part they go with."""
    schema = config.model_json_schema()
    listing = _Listing(schema.get("$defs", {}), everything=everything)
    listing.add(schema["properties"], config.model_validate({}).model_dump(mode="json"), "method.", "")
    return listing.rows


class _Listing:
    """Walks through a config's JSON schema; what a method can be made of comes after its own parameters."""

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
            self.rows.append((place, _shown(default), allowed, meaning))
            inside = f"{place}[]." if _item(entry) is not entry else f"{place}."
            chosen = {_name(part): part for part in (default if isinstance(default, list) else [default])}
            used = {"": default} if "" in tables[key] else chosen
            for name, table in tables[key].items():
                if self._everything or used.get(name) is not None:
                    own = {field: value for field, value in table["properties"].items() if not name or field != "name"}
                    self.add(own, used.get(name) or {}, inside, name or part)


def _item(entry: dict[str, Any]) -> dict[str, Any]:
    """A list's items, anything else itself."""
    items: dict[str, Any] = entry.get("items", entry) if entry.get("type") == "array" else entry
    return items


def _name(table: object) -> str:
    return str(table.get("name", "")) if isinstance(table, dict) else ""


def _parts(entry: dict[str, Any], shared: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The tables that a parameter can be, by the name that chooses one ("": there is only this); none for a value."""
    references = [part["$ref"] for part in (entry, *entry.get("oneOf", ()), *entry.get("anyOf", ())) if "$ref" in part]
    found = {}
    for reference in references:
        table = shared[reference.rpartition("/")[2]]
        if "properties" in table:
            found[str(table["properties"].get("name", {}).get("const", ""))] = table
    return found


def _shown(value: object) -> str:
    """A default, short: of a part its name."""
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
