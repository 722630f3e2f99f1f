"""Tables for people, and documents for programs."""

import io
import json
import math
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedssl.cli.main import app
from fedssl.cli.output import cell, duration, show_json, show_json_line, show_pairs, show_table
from fedssl.protocol.states import RunState
from fedssl.protocol.views import RunEdit
from support.federation import tiny_spec


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "-"),
        ("", "-"),
        (12000, "12,000"),
        (True, "yes"),
        (0.1 + 0.2, "0.3"),
        (RunState.RUNNING, "running"),
        (datetime(2026, 1, 2, 3, 4, 5, 678, tzinfo=UTC), "2026-01-02 03:04:05Z"),
        (datetime(2026, 1, 2, 3, tzinfo=timezone(timedelta(hours=2))), "2026-01-02 01:00:00Z"),
        ("a\x1b[2Jb\tc", "a?[2Jb?c"),
    ],
)
def test_a_cell_is_formatted_for_people(value: object, shown: str) -> None:
    assert cell(value) == shown


@pytest.mark.parametrize(("seconds", "shown"), [(0, "0:00"), (59.6, "1:00"), (65, "1:05"), (3725, "1:02:05")])
def test_a_duration_is_formatted_for_people(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


def test_text_from_a_coordinator_is_not_markup(capsys: pytest.CaptureFixture[str]) -> None:
    show_table(["name", "#n"], [("[bold]x[/bold] :smile:", 1)])
    show_pairs({"name": "[red]y"})

    printed = capsys.readouterr().out
    assert "[bold]x[/bold] :smile:" in printed
    assert "[red]y" in printed


def test_a_pipe_gets_wider_tables_than_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    show_table(["a", "b"], [("x" * 70, "y" * 70)])

    assert f"{'x' * 70}   {'y' * 70}" in capsys.readouterr().out


def test_json_output_is_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    show_json({"spec": tiny_spec(), "list": [tiny_spec()], "numbers": (math.nan, 1.5)})

    document = json.loads(capsys.readouterr().out)
    assert document["spec"]["num_rounds"] == document["list"][0]["num_rounds"] == 2
    assert document["numbers"] == [None, 1.5]


def test_json_cannot_redraw_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Terminals obey C1 control characters like escape sequences. JSON does not escape them, DEL or bidi marks."""
    reason = "no \x1b[2J \x7f \x9b2J \u202egnp.exe \u2028 ü 日本 \U000e0001"
    show_json({"reason": reason})

    printed = capsys.readouterr().out
    assert all(char.isprintable() or char == "\n" for char in printed)
    assert "ü 日本" in printed
    assert json.loads(printed) == {"reason": reason}


def test_a_table_is_printed_even_if_the_terminals_encoding_lacks_its_characters(tmp_path: Path) -> None:
    spec = tmp_path / "spec.toml"
    spec.write_text('[partition]\ndataset = "digits"\nnum_clients = 2\nscheme = "iid"\n')
    result = CliRunner(charset="latin-1").invoke(app, ["partition", str(spec)])
    assert result.exit_code == 0, result.output
    assert "client-1" in result.stdout


@pytest.mark.parametrize("show", [show_json, show_json_line])
def test_json_has_the_same_content_if_the_terminals_encoding_lacks_characters(
    show: Callable[[RunEdit], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="latin-1", errors="replace")  # as the commands set it
    monkeypatch.setattr(sys, "stdout", stream)
    show(RunEdit(notes="ü 日本"))
    stream.seek(0)
    assert json.load(stream)["notes"] == "ü 日本"


@pytest.mark.parametrize("closed", ["1", "2"])
def test_a_closed_stream_is_not_an_error(closed: str) -> None:
    command = f"'{sys.executable}' -m fedssl.cli.main method ls {closed}>&-"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
