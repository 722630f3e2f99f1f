"""Fixture for the `fedssl` command with a coordinator for each module."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedssl.cli.main import app
from support.commands import Fedssl
from support.coordinator import Coordinator


@pytest.fixture
def fedssl(coordinator: Coordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fedssl:
    """Return a function that runs a command as an operator of the coordinator in an empty folder."""
    token = tmp_path / "token"
    token.write_text(coordinator.operator_token)
    token.chmod(0o600)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDSSL_URL", coordinator.url)
    monkeypatch.setenv("FEDSSL_TOKEN_FILE", str(token))
    return lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments])
