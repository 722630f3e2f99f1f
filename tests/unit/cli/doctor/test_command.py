"""The problems that `fedssl doctor` reports."""

import json
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedssl.cli.main import app
from support.answers import answering

_Usage = namedtuple("_Usage", "total used free")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user without any coordinator."""
    for name in ("FEDSSL_URL", "FEDSSL_TOKEN_FILE", "FEDSSL_CONNECTION", "FEDSSL_DATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("FEDSSL_TOKEN", "secret")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def doctor(*arguments: object, code: int = 1) -> dict[str, Any]:
    """Return the failed checks by name."""
    result = CliRunner().invoke(app, ["doctor", "--format", "json", *map(str, arguments)])
    assert result.exit_code == code, result.output
    checks = json.loads(result.stdout)["checks"]
    assert all(check["todo"] for check in checks if check["found"] == "wrong")
    return {check["name"]: check["what"] for check in checks if check["found"] == "wrong"}


def test_without_a_coordinator_only_the_machine_is_checked() -> None:
    assert doctor(code=0) == {}


def test_a_coordinator_with_a_late_clock_and_missing_servers_is_reported() -> None:
    unavailable = {"status": "unavailable", "checks": {"postgres": "OperationalError"}}
    known = {
        ("GET", "/healthz"): {"status": "ok"},
        ("GET", "/readyz"): unavailable,
        ("GET", "/v1/methods"): {"items": []},
    }
    with answering(known) as server:
        server.date = "Thu, 19 Nov 2020 00:00:00 GMT"
        wrong = doctor("--url", server.url)
    assert wrong.keys() == {"clock", "its servers", "token and methods"}
    assert "ahead of the coordinator's" in wrong["clock"]
    assert "postgres: OperationalError" in wrong["its servers"]
    assert "fedbyol" in wrong["token and methods"]


def test_no_coordinator_at_the_address() -> None:
    with answering({}) as server:
        url = server.url
    assert doctor("--url", url).keys() == {"coordinator"}


def test_missing_data_and_a_full_disk_are_reported(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "empty").mkdir()
    assert "does not exist" in doctor("--data", home / "missing")["data"]
    assert "is empty" in doctor("--data", home / "empty")["data"]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: _Usage(10**12, 10**12, 10**6))
    assert doctor().keys() == {"disk space here", "disk space for data sets"}


def test_connections_that_other_users_can_read_are_reported(home: Path) -> None:
    path = home / "fedssl" / "connections.json"
    path.parent.mkdir()
    path.write_text("{}")
    path.chmod(0o644)
    assert "other users can read" in doctor()["connections"]
