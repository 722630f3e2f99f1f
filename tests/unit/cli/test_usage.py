"""Wrong usage of `fedssl`, `fedssl-worker` and `fedssl-coordinator` prints one line in the style of other errors."""

import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from fedssl.cli.main import app as fedssl
from fedssl_coordinator.main import app as coordinator
from fedssl_worker.main import app as worker

APPS = {"fedssl": fedssl, "fedssl-worker": worker, "fedssl-coordinator": coordinator}

MISTAKES = {
    "fedssl run sumbit": "error: no such command 'sumbit'. Did you mean 'submit'? See `fedssl run --help`",
    "fedssl run submit": "error: missing argument 'SPEC'. See `fedssl run submit --help`",
    "fedssl --nope": "error: no such option: --nope. See `fedssl --help`",
    "fedssl run watch a b": "error: got unexpected extra argument(s) (b). See `fedssl run watch --help`",
    "fedssl up --clients few": (
        "error: invalid value for '--clients': should be a valid integer, not 'few'. See `fedssl up --help`"
    ),
    "fedssl run ls --format xml": (
        "error: invalid value for '--format': 'xml' is not one of 'table', 'json'. See `fedssl run ls --help`"
    ),
    "fedssl token create": (
        "error: missing option '--role'. Choose from: admin, operator, viewer, worker. See `fedssl token create --help`"
    ),
    "fedssl-worker rnu": "fedssl-worker: no such command 'rnu'. Did you mean 'run'? See `fedssl-worker --help`",
    "fedssl-worker policy check": ("fedssl-worker: missing argument 'POLICY'. See `fedssl-worker policy check --help`"),
    "fedssl-coordinator api --port 70000": (
        "error: invalid value for '--port': should be less than or equal to 65535, not '70000'. "
        "See `fedssl-coordinator api --help`"
    ),
}


def outcome(line: str) -> tuple[int, str, str]:
    name, *arguments = line.split()
    result = CliRunner().invoke(APPS[name], arguments, prog_name=name)
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize("line", MISTAKES)
def test_wrong_usage_prints_one_line_that_names_the_help(line: str) -> None:
    assert outcome(line) == (2, "", f"{MISTAKES[line]}\n")


@pytest.mark.parametrize("line", ["fedssl", "fedssl run", "fedssl-worker", "fedssl-coordinator token"])
def test_a_group_without_a_command_shows_its_help(line: str) -> None:
    code, stdout, stderr = outcome(line)

    assert code == 2
    assert (stdout + stderr).startswith(f"Usage: {line} ")
    assert "error" not in (stdout + stderr)[:6]


def test_an_error_of_typer_without_a_command_is_printed_as_one_line() -> None:
    app = typer.Typer(cls=type(typer.main.get_command(fedssl)), rich_markup_mode=None)

    @app.callback()
    def root() -> None: ...

    @app.command()
    def fail() -> None:
        raise typer.TyperException("The file\x1b[2J is gone")

    result = CliRunner().invoke(app, ["fail"])
    assert (result.exit_code, result.stderr) == (1, "error: the file?[2J is gone\n")


@pytest.mark.parametrize("line", ["fedssl doctor", "fedssl up --data digits"])
def test_a_current_directory_that_was_removed_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, line: str
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()

    code, stdout, stderr = outcome(line)

    assert (code, stdout) == (2, "")
    assert stderr == "error: the current directory no longer exists: change to another one\n"


@pytest.mark.parametrize(
    "line",
    [
        "fedssl data check ~nobody-here/images",
        "fedssl embed digits --model ~nobody-here/model --out x.npz",
        "fedssl-worker identity --state ~nobody-here/state",
        "fedssl-worker embed --data digits --model ~nobody-here/model --out x.npz",
    ],
)
def test_a_path_below_an_unknown_home_folder_is_reported(line: str) -> None:
    code, stdout, stderr = outcome(line)

    assert (code, stdout) == (2, "")
    assert stderr.endswith(
        ": a path begins with the home folder of a user without one: set HOME, or write the path without ~\n"
    )


def run(line: str, redirection: str) -> subprocess.CompletedProcess[str]:
    """Run a command of `fedssl` in a shell, with its standard output redirected."""
    command = f"exec {sys.executable} -m fedssl.cli.main {line} {redirection}"
    return subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)


@pytest.mark.full(but=1)
@pytest.mark.parametrize("line", ["method show ssd --format json", "data ls"])
def test_a_full_disk_below_standard_output_is_reported_once(line: str) -> None:
    result = run(line, "> /dev/full")

    assert result.stderr.endswith("error: standard output, or a file, cannot be written: No space left on device\n"), (
        result.stderr
    )
    assert result.returncode == 1


@pytest.mark.full(but=1)
@pytest.mark.parametrize("line", ["token create --role viewer", "token enrol site", "notify add https://a.example"])
def test_no_secret_is_created_if_standard_output_is_closed(line: str) -> None:
    result = run(f"{line} --url http://127.0.0.1:1", ">&-")

    assert "standard output is closed, and the secret is shown only once: give --out FILE" in result.stderr
    assert result.returncode == 2
