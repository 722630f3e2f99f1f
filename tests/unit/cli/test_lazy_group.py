"""The table of commands: help and completion work without importing the commands, and every entry exists."""

import subprocess
import sys

import pytest
import typer
from typer.core import TyperGroup
from typer.testing import CliRunner

from fedssl.cli.main import COMMANDS, app

NOT_FOR_HELP = ("torch", "numpy", "httpx", "rich", "yaml", "safetensors", "matplotlib", "sklearn")


def modules_after(source: str) -> set[str]:
    """Return the modules that a fresh process has imported after running `source`."""
    lines = f"import sys\n{source}\nprint('IMPORTED', *sys.modules)"
    done = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, check=True)
    return set(done.stdout.rpartition("IMPORTED")[2].split())


def modules_of_commands() -> set[str]:
    return {command.target.partition(":")[0] for command in COMMANDS.values()}


def test_help_imports_no_command() -> None:
    help_ = "from fedssl.cli.main import app\ntry:\n    app(['--help'])\nexcept SystemExit:\n    pass"

    assert modules_after(help_).isdisjoint(modules_of_commands())


def test_no_command_module_imports_packages_that_only_running_it_needs() -> None:
    imported = modules_after("\n".join(f"import {name}" for name in modules_of_commands()))

    assert modules_of_commands() <= imported
    assert {name.partition(".")[0] for name in imported}.isdisjoint(NOT_FOR_HELP)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_entry_of_the_table_is_a_command(name: str) -> None:
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)

    assert list(group.commands) == list(COMMANDS)
    assert len(group.commands) == len(COMMANDS)
    assert group.commands[name].name == name
    assert f"fedssl {name}" in CliRunner().invoke(app, [name, "--help"], prog_name="fedssl").stdout


def test_help_lists_the_whole_first_sentence_of_each_command() -> None:
    printed = CliRunner().invoke(app, ["run", "--help"]).stdout

    assert "..." not in printed.partition("Commands:")[2]
    assert "Cancel a queued or running evaluation." in printed
    root = " ".join(CliRunner().invoke(app, ["--help"]).stdout.partition("Commands:")[2].split())
    for name, command in COMMANDS.items():
        assert f"{name} {command.short_help}" in root


def test_the_shell_completes_commands() -> None:
    for line, offered in (("fedssl pub", "public-dataset"), ("fedssl run cancel-e", "cancel-evaluation")):
        shell = {"_FEDSSL_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1)}
        assert CliRunner().invoke(app, [], prog_name="fedssl", env=shell).stdout.split() == [offered]
