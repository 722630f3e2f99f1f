"""A command group that imports a command only when it is used."""

import functools
import importlib
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, NamedTuple

import typer
from typer.core import TyperGroup

_NO_LIMIT = 1000


class LazyCommand(NamedTuple):
    """Where a command, or a group of commands, is defined (`module:name`), and its help in one line."""

    target: str
    short_help: str


class CommandTable(MutableMapping[str, Any]):
    """Commands by name. Iterating over the names imports nothing; looking up a command imports its module."""

    def __init__(self, table: Mapping[str, LazyCommand], commands: Mapping[str, Any]) -> None:
        self._table = table
        self._loaded = dict(commands)

    def __getitem__(self, name: str) -> Any:
        if name not in self._loaded:
            self._loaded[name] = _load(name, self._table[name])
        return self._loaded[name]

    def __setitem__(self, name: str, command: Any) -> None:
        self._loaded[name] = command

    def __delitem__(self, name: str) -> None:
        del self._loaded[name]

    def __contains__(self, name: object) -> bool:
        return name in self._table or name in self._loaded

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self._table, *self._loaded]))

    def __len__(self) -> int:
        return len(self._table.keys() | self._loaded.keys())


class Group(TyperGroup):
    """A group whose help lists each command with its whole first sentence. Typer would cut it to one line."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, self.commands[name].get_short_help_str(_NO_LIMIT)) for name in self.commands])


class LazyGroup(TyperGroup):
    """A group with the commands of `table`. Its help lists them from the table, without importing them."""

    table: Mapping[str, LazyCommand] = {}

    def __init__(self, **attrs: Any) -> None:
        super().__init__(**attrs)
        self.commands = CommandTable(self.table, self.commands)

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.short_help) for name, command in self.table.items()])


@functools.cache
def _load(name: str, command: LazyCommand) -> Any:
    """Import the function or the Typer app, and return it as a command of Typer's."""
    module, _, attribute = command.target.partition(":")
    found = getattr(importlib.import_module(module), attribute)
    parent = typer.Typer(rich_markup_mode=None, add_completion=False)
    parent.callback()(_ignore)
    if isinstance(found, typer.Typer):
        parent.add_typer(found, name=name, cls=Group)
    else:
        parent.command(name, short_help=command.short_help)(found)
    group = typer.main.get_command(parent)
    assert isinstance(group, TyperGroup), "an app with a callback becomes a group"
    return group.commands[name]


def _ignore() -> None:
    """Do nothing. A parent with a callback becomes a group even if it has only one command."""
