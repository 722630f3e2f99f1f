"""Which data sets are fetched, and what happens when that is impossible."""

from pathlib import Path

import pytest

from fedssl.cli.datasets import data_folder, ensure


def test_they_are_kept_for_all_federations_of_a_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert data_folder() == tmp_path / "fedssl"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert data_folder() == tmp_path / ".cache" / "fedssl"


def test_other_names_are_left_to_whoever_reads_them() -> None:
    assert ensure("digits", pytest.fail)
    assert ensure("/no/such/folder", pytest.fail)


def test_a_folder_that_cannot_be_written_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("fedssl.data.fetch.find_fashion_mnist", lambda root: None)
    said: list[str] = []

    assert not ensure("fashion-mnist", said.append)
    assert "XDG_CACHE_HOME" in said[-1]
