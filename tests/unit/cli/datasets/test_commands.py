"""Which data sets are available, which are downloaded, and what happens if that is impossible."""

import json
import logging
from pathlib import Path

import pytest
import scipy.io
from typer.testing import CliRunner

from fedssl.cli.datasets.fetching import data_folder, ensure
from fedssl.cli.datasets.registration import check_channels
from fedssl.cli.errors import UsageError
from fedssl.cli.main import app
from fedssl.data import DATASETS


def test_downloads_are_shared_by_all_federations_of_a_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert data_folder() == tmp_path / "fedssl"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert data_folder() == tmp_path / ".cache" / "fedssl"


def test_unknown_names_are_left_to_the_reader() -> None:
    assert ensure("digits", pytest.fail)
    assert ensure("/no/such/folder", pytest.fail)


def test_a_folder_that_cannot_be_written_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("fedssl.data.fetch.find_fashion_mnist", lambda root: None)
    said: list[str] = []

    assert not ensure("fashion-mnist", said.append)
    assert "XDG_CACHE_HOME" in said[-1]


@pytest.fixture
def empty_working_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("FEDSSL_DATA", raising=False)
    monkeypatch.setattr("fedssl.data.datasets._SYSTEM_FOLDER", tmp_path / "system")
    return tmp_path


def _listed() -> dict[str, dict[str, object]]:
    result = CliRunner().invoke(app, ["data", "ls", "--format", "json"])
    assert result.exit_code == 0, result.output
    return {entry["name"]: entry for entry in json.loads(result.stdout)}


def test_the_list_shows_available_data_sets_and_how_to_get_the_others(
    empty_working_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tuple(_listed()) == DATASETS
    assert [name for name, entry in _listed().items() if entry["here"]] == ["digits"]
    folder = empty_working_folder / "mine"
    folder.mkdir()
    scipy.io.savemat(folder / "train_32x32.mat", {"X": 1})
    monkeypatch.setenv("FEDSSL_DATA", str(folder))
    assert not _listed()["svhn"]["here"], "the test images are missing"
    scipy.io.savemat(folder / "test_32x32.mat", {"X": 1})
    assert _listed()["svhn"]["places"] == [str(folder / f"{split}_32x32.mat") for split in ("train", "test")]
    result = CliRunner().invoke(app, ["data", "ls"])
    assert "fedssl data fetch cifar10" in result.stdout
    assert "imagenet100.txt" in result.stderr


def test_fetching_an_available_data_set_does_nothing(
    empty_working_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("urllib.request.urlopen", lambda *_, **__: pytest.fail("downloaded"))
    (empty_working_folder / "fedssl" / "svhn").mkdir(parents=True)
    for split in ("train", "test"):
        (empty_working_folder / "fedssl" / "svhn" / f"{split}_32x32.mat").touch()
    for name in ("svhn", "digits"):
        result = CliRunner().invoke(app, ["data", "fetch", name])
        assert result.exit_code == 0, result.output
        assert "is here" in result.stdout


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("cifar11", "known: fashion-mnist, cifar10"),
        ("imagenet-100", "cannot be downloaded by this command: get imagenet-100/"),
        ("svhn", "To get it by hand: "),
    ],
)
def test_a_data_set_that_cannot_be_downloaded_is_reported_with_how_to_get_it(
    empty_working_folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, words: str
) -> None:
    def nobody_answers(*_: object, **__: object) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr("urllib.request.urlopen", nobody_answers)
    result = CliRunner().invoke(app, ["data", "fetch", name])
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.split())


def test_progress_of_reading_images_is_forwarded() -> None:
    first: list[str] = []
    second: list[str] = []
    log = logging.getLogger("fedssl.data")
    ensure("digits", first.append)
    log.info("decoding %s: %s of %s images", "Tiny-ImageNet", "5,000", "100,000")
    ensure("digits", second.append)
    log.warning("odd")
    assert first == ["decoding Tiny-ImageNet: 5,000 of 100,000 images"]
    assert second == ["odd"]


def test_images_are_grey_or_rgb() -> None:
    assert [check_channels(given) for given in (None, 1, 3)] == [None, 1, 3]
    with pytest.raises(UsageError, match="--channels must be 1 or 3"):
        check_channels(2)
