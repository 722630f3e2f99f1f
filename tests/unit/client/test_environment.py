"""`Client.from_env`: the coordinator and the token are taken from the environment."""

import json
from pathlib import Path

import pytest

from fedssl.client import Client, ClientError
from fedssl.client.environment import target_of

URL = "https://fedssl.example.org"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder of a local federation, with its port and its operator's token."""
    root = tmp_path / ".fedssl"
    (root / "tokens").mkdir(parents=True)
    (root / "federation.json").write_text(json.dumps({"port": 8123}))
    (root / "tokens" / "operator").write_text("local\n")
    return root


def test_variables_name_the_coordinator_and_the_token(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("from a file\n")

    assert target_of({"FEDSSL_URL": URL, "FEDSSL_TOKEN": "t"}, tmp_path).token == "t"
    found = target_of({"FEDSSL_URL": URL, "FEDSSL_TOKEN_FILE": str(tmp_path / "token")}, tmp_path)
    assert (found.url, found.token) == (URL, "from a file")
    assert "from a file" not in repr(found)


def test_without_variables_the_folders_federation_is_used(folder: Path) -> None:
    found = target_of({}, folder)

    assert (found.url, found.token) == ("http://127.0.0.1:8123", "local")


def test_the_local_token_is_never_sent_to_another_coordinator(folder: Path) -> None:
    with pytest.raises(ClientError, match=r"no token for https://fedssl.example.org: set FEDSSL_TOKEN_FILE"):
        target_of({"FEDSSL_URL": URL}, folder)


def test_missing_settings_are_named(tmp_path: Path) -> None:
    with pytest.raises(ClientError, match="no coordinator: set FEDSSL_URL"):
        target_of({}, tmp_path)
    with pytest.raises(ClientError, match=r"cannot read the token in /nowhere: No such file"):
        target_of({"FEDSSL_URL": URL, "FEDSSL_TOKEN_FILE": "/nowhere"}, tmp_path)
    (tmp_path / "empty").touch()
    with pytest.raises(ClientError, match="empty is empty"):
        target_of({"FEDSSL_URL": URL, "FEDSSL_TOKEN_FILE": str(tmp_path / "empty")}, tmp_path)


def test_from_env_uses_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSSL_URL", URL)
    monkeypatch.setenv("FEDSSL_TOKEN", "secret")

    with Client.from_env() as client:
        assert client.url == URL
        assert "secret" not in repr(client)
