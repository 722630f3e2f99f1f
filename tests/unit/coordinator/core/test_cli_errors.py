"""Failed starts of `fedssl-coordinator` print one line with advice, and neither a traceback nor a password."""

from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from fedssl_coordinator.main import app
from support.coordinator import clear_caches

NOBODY = "postgresql://user:hidden@127.0.0.1:1/nothing"


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run the test without the settings of the database, Redis and the store."""
    for name in ("DATABASE_URL", "REDIS_URL", "STORE_PATH"):
        monkeypatch.delenv(f"FEDSSL_{name}", raising=False)
    # Configuring logging would affect the whole process: loggers keep the configuration of their first use.
    monkeypatch.setattr("fedssl_coordinator.core.logs.configure_logging", lambda: None)
    clear_caches()
    yield
    clear_caches()


@pytest.mark.parametrize("command", ["migrate", "api", "token create --role admin"])
def test_missing_settings_are_named(command: str) -> None:
    ended = CliRunner().invoke(app, command.split())
    assert ended.exit_code == 2
    assert ended.stderr.startswith("error: FEDSSL_DATABASE_URL must be set; ")
    assert len(ended.stderr.splitlines()) == 1


def test_an_unreachable_database_is_reported_without_its_password(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    for name, value in (("DATABASE_URL", NOBODY), ("REDIS_URL", "redis://127.0.0.1:1"), ("STORE_PATH", str(tmp_path))):
        monkeypatch.setenv(f"FEDSSL_{name}", value)
    ended = CliRunner().invoke(app, ["token", "create", "--role", "admin"])
    assert ended.exit_code == 2
    assert "the database does not answer at the address in FEDSSL_DATABASE_URL" in ended.stderr
    assert "hidden" not in ended.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [("token create --role king", "role: Input should be"), ("api --port 99999", "--port"), ("serve", "serve")],
)
def test_wrong_arguments_are_named(arguments: str, said: str) -> None:
    ended = CliRunner().invoke(app, arguments.split())
    assert ended.exit_code == 2
    assert said in ended.stderr
    assert "Traceback" not in ended.output
    assert "pydantic" not in ended.output
