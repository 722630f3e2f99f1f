"""Each test sees only the data that it creates, and has its own cache of decoded images."""

from pathlib import Path

import pytest

from fedssl.data import DATA_VARIABLE


@pytest.fixture(autouse=True)
def no_data_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(DATA_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("fedssl.data.datasets._SYSTEM_FOLDER", tmp_path / "system")
