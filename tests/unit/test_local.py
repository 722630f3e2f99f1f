"""The folder of `fedssl up`, seen by a client. A client does not need fedssl-local."""

import json
from pathlib import Path

import pytest

from fedssl.errors import LocalError
from fedssl.local import FederationFolder, connect, require_launcher


def test_connect_needs_a_federation_in_the_folder(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="there is no federation in"):
        connect(tmp_path)


def test_connect_uses_the_folders_address_and_operator_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = FederationFolder(tmp_path)
    folder.record_path.write_text(json.dumps({"port": 8123}))
    folder.tokens.mkdir()
    folder.operator_token.write_text("a-token\n")
    monkeypatch.setattr("fedssl.local.Client", lambda url, token: (url, token))

    assert connect(tmp_path) == ("http://127.0.0.1:8123", "a-token")


def test_a_missing_launcher_error_gives_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    require_launcher()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    with pytest.raises(LocalError, match="pip install fedssl-local"):
        require_launcher()
