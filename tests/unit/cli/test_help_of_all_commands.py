"""The help of `fedssl`, `fedssl-worker` and `fedssl-coordinator` has one style, and nothing is cut off or too wide."""

from collections.abc import Iterator

import pytest
import typer
from typer.core import TyperGroup
from typer.testing import CliRunner

from fedssl.cli.main import app as fedssl
from fedssl_coordinator.main import app as coordinator
from fedssl_worker.main import app as worker

APPS = {"fedssl": fedssl, "fedssl-worker": worker, "fedssl-coordinator": coordinator}
WIDTHS = (80, 100, 120)
WIDE = 400


def paths_of(command: object, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    yield path
    if isinstance(command, TyperGroup):
        for name in command.commands:
            yield from paths_of(command.commands[name], (*path, name))


PATHS = [path for name, app in APPS.items() for path in paths_of(typer.main.get_command(app), (name,))]


def help_of(path: tuple[str, ...], width: int) -> list[str]:
    name, *rest = path
    result = CliRunner().invoke(
        APPS[name], [*rest, "--help"], prog_name=name, terminal_width=width, max_content_width=width
    )
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


def words_of(lines: list[str]) -> str:
    """Return the text without spaces, because line breaks and hyphenation depend on the width."""
    return "".join("".join(lines).split())


def test_all_commands_are_found() -> None:
    assert {("fedssl", "run", "submit"), ("fedssl-worker", "ledger", "show"), ("fedssl-coordinator", "api")} <= {*PATHS}


@pytest.mark.parametrize("path", PATHS, ids=" ".join)
def test_help_has_one_style_and_nothing_is_cut_off(path: tuple[str, ...]) -> None:
    whole = sorted(words_of(help_of(path, WIDE)))
    for width in WIDTHS:
        lines = help_of(path, width)
        text = "\n".join(lines)

        assert lines[0].startswith(f"Usage: {' '.join(path)} ")
        assert not [line for line in lines if len(line) > width]
        assert not {"…", "╭", "│", "─"} & set(text)
        assert sorted(words_of(lines)) == whole, "words are missing at this width"
        assert not [line for line in lines if line.rstrip().endswith("...") and not line.startswith("Usage: ")]
        assert "  --help  " in text
        assert "[env: " not in text, "write [env var: NAME], as typer does"


@pytest.mark.parametrize("path", PATHS, ids=" ".join)
def test_every_command_has_a_description(path: tuple[str, ...]) -> None:
    description = help_of(path, 80)[2]

    assert description.startswith("  ")
    assert description.strip()[0].isupper()
