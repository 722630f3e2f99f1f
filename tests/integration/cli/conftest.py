"""The command, against a coordinator per module that is emptied for each test."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedssl.cli.main import app
from support.commands import Fedssl
from support.coordinator import Coordinator
from support.servers import Servers
from support.tables import Tables


@pytest.fixture(scope="module")
def standing(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    """Yield the module's coordinator."""
    store = tmp_path_factory.mktemp("standing") / "store"
    with servers.database() as url, Coordinator(url, servers.redis_url, store) as running:
        yield running


@pytest.fixture(scope="module")
def tables(standing: Coordinator) -> Iterator[Tables]:
    """Yield access to the tables of the module's coordinator."""
    with Tables(standing.database_url) as looking:
        yield looking


@pytest.fixture
def coordinator(standing: Coordinator, tables: Tables) -> Coordinator:
    """Return the module's coordinator, which holds only the tokens that it began with."""
    standing.empty(tables)
    return standing


@pytest.fixture
def fedssl(coordinator: Coordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fedssl:
    """Return a function that runs a command as an operator of the coordinator, in an empty folder."""
    token = tmp_path / "token"
    token.write_text(coordinator.operator_token)
    token.chmod(0o600)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDSSL_URL", coordinator.url)
    monkeypatch.setenv("FEDSSL_TOKEN_FILE", str(token))
    return lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments])
