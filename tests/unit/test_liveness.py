"""The liveness check of processes that do not listen on a port."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedssl import liveness
from fedssl.liveness import Health

pytestmark = pytest.mark.full


def _ask(path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {liveness.VARIABLE: str(path)}
    command = [sys.executable, "-m", "fedssl.liveness", *options]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_a_recently_touched_file_means_the_process_is_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "alive"
    monkeypatch.setenv(liveness.VARIABLE, str(path))
    monkeypatch.setattr(liveness, "TOUCH_SECONDS", 0.01)
    liveness.keep_touching()
    os.utime(path, (1, 1))
    while path.stat().st_mtime == 1:
        time.sleep(0.01)
    assert _ask(path).returncode == 0


def test_an_old_or_missing_file_means_the_process_is_dead(tmp_path: Path) -> None:
    path = tmp_path / "alive"
    assert "No such file" in _ask(path).stderr
    path.touch()
    os.utime(path, (time.time() - 100, time.time() - 100))
    answer = _ask(path)
    assert (answer.returncode, "was last touched 100 s ago" in answer.stderr) == (1, True)


def test_without_the_environment_variable_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(liveness.VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    liveness.keep_touching()
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_is_not_ready_is_alive_and_reports_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "alive"
    monkeypatch.setenv(liveness.VARIABLE, str(path))
    path.touch()
    assert _ask(path, "--ready").returncode == 0  # a process that has not reported anything
    liveness.report(Health.UNREADY, "the folder /data has no images")
    assert _ask(path).returncode == 0
    answer = _ask(path, "--ready")
    assert (answer.returncode, answer.stderr) == (1, "the folder /data has no images\n")
    liveness.report(Health.READY)
    assert _ask(path, "--ready").returncode == 0


def test_the_check_waits_for_a_starting_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "alive"
    monkeypatch.setenv(liveness.VARIABLE, str(path))
    liveness.report(Health.STARTING, "it reads its images")
    assert liveness.why_not_ready(path, patience_seconds=0.6) == "it reads its images"
    environment = os.environ | {liveness.VARIABLE: str(path)}
    command = [sys.executable, "-m", "fedssl.liveness", "--ready"]
    with subprocess.Popen(command, env=environment) as check:
        time.sleep(1)
        assert check.poll() is None
        liveness.report(Health.READY)
        assert check.wait(10) == 0


def test_a_report_that_cannot_be_written_is_logged_and_not_fatal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(liveness.VARIABLE, str(tmp_path / "missing" / "alive"))
    liveness.report(Health.READY)
    assert "No such file" in capsys.readouterr().err
