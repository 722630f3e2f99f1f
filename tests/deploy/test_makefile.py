"""What the Makefile calls, with a program in Python's place that repeats its arguments."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("patience", "timeout"), [("1", "300"), ("3", "900"), ("1.5", "450")])
def test_patience_need_not_be_whole(tmp_path: Path, patience: str, timeout: str) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$@"\n')
    python.chmod(0o755)
    command = ["make", "fault", f"PATIENCE={patience}", f"BIN={tmp_path}", "--old-file=.venv/.installed-dev"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert f"--timeout {timeout} " in done.stdout
