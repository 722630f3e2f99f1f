"""Exit codes, and errors printed as one line without a traceback."""

import pytest
import torch
import typer
from typer.testing import CliRunner

from fedssl.cli import errors
from fedssl.cli.command_group import CommandGroup
from fedssl.cli.error_codes import CODES, exit_code
from fedssl.cli.exit_codes import EXIT_CODES, USAGE
from fedssl.client import NotFound, Unreachable
from fedssl.errors import DataError, FedSSLError, SpecError
from fedssl.protocol.errors import Problem
from fedssl_local import FolderInUseError, LocalError, MissingServerError


def command(error: BaseException) -> typer.Typer:
    app = typer.Typer(cls=CommandGroup, rich_markup_mode=None)

    @app.callback()
    def root() -> None: ...

    @app.command()
    def fail() -> None:
        raise error

    return app


def problem(detail: str) -> NotFound:
    return NotFound(Problem(type="urn:fedssl:problem:not-found", title="Not found", status=404, detail=detail))


@pytest.mark.parametrize("kind", CODES)
def test_every_exit_code_belongs_to_an_error_class(kind: type) -> None:
    assert issubclass(kind, FedSSLError)


@pytest.mark.parametrize("kind", [kind for kind in vars(errors).values() if isinstance(kind, type)])
def test_every_error_of_the_command_line_has_a_code(kind: type) -> None:
    assert kind in CODES or kind is FedSSLError


def test_every_code_is_documented() -> None:
    assert set(CODES.values()) <= set(EXIT_CODES)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SpecError("x"), 2),
        (DataError("x"), 2),
        (errors.UsageError("x"), 2),
        (errors.NoToken("x"), 4),
        (Unreachable("x"), 3),
        (problem("no run"), 5),
        (errors.NoSuchRun("x"), 5),
        (errors.RunNotCompleted("x"), 1),
        (MissingServerError("wheel", "not installed"), 1),
        (LocalError("x"), 1),
        (FedSSLError("x"), 1),
    ],
)
def test_an_error_is_printed_as_one_line_with_its_exit_code(error: FedSSLError, code: int) -> None:
    result = CliRunner().invoke(command(error), ["fail"])

    assert (result.exit_code, result.stdout) == (code, "")
    assert result.stderr == f"error: {error}\n"


def test_a_folder_in_use_is_a_conflict(tmp_path: pytest.TempPathFactory) -> None:
    assert exit_code(FolderInUseError(tmp_path, 7)) == 5  # type: ignore[arg-type]


def test_errors_of_the_operating_system_name_the_file() -> None:
    result = CliRunner().invoke(command(PermissionError(13, "Permission denied", "/x/y")), ["fail"])

    assert (result.exit_code, result.stderr) == (1, "error: /x/y: Permission denied\n")


def test_interruption_exits_with_130() -> None:
    assert CliRunner().invoke(command(KeyboardInterrupt()), ["fail"]).exit_code == 130


def test_an_unexpected_error_keeps_its_traceback() -> None:
    result = CliRunner().invoke(command(ZeroDivisionError()), ["fail"])

    assert isinstance(result.exception, ZeroDivisionError)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), RuntimeError("CUDA error: out of memory")]
)
def test_out_of_memory_is_one_line_with_advice(error: Exception) -> None:
    result = CliRunner().invoke(command(error), ["fail"])

    assert (result.exit_code, result.stdout) == (USAGE, "")
    assert result.stderr == "error: out of memory: use fewer or smaller images, a smaller model, or another device\n"


def test_a_coordinators_message_cannot_redraw_the_terminal() -> None:
    result = CliRunner().invoke(command(problem("no\x1b[2J\rrun")), ["fail"])

    assert result.stderr == "error: no?[2J?run\n"


def test_a_missing_package_names_the_extra_to_install() -> None:
    result = CliRunner().invoke(command(ModuleNotFoundError("No module named 'torch'", name="torch")), ["fail"])
    assert (result.exit_code, "pip install 'fedssl[train]'" in result.output) == (USAGE, True)
    with pytest.raises(ModuleNotFoundError):
        CliRunner().invoke(command(ModuleNotFoundError(name="typo")), ["fail"], catch_exceptions=False)
