"""A worker crops from its own cache of decoded images if a run asks for it."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedssl.data import ImageData, save_npz
from fedssl.data.image_cache import CachedImages
from fedssl.errors import DataError
from fedssl.protocol.data import DataConfig
from fedssl_worker.data import OwnImages

from .conftest import WorkerHarness, make_spec

_CPU = torch.device("cpu")
_RUN = DataConfig(channels=3, image_size=16, cache_size=24)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for number in range(20):
        path = tmp_path / "images" / "a" / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.random.default_rng(number).integers(0, 256, (30, 40, 3), np.uint8)).save(path)
    return tmp_path / "images"


def test_a_worker_prepares_the_cache_of_a_run_and_keeps_it_loaded(folder: Path) -> None:
    images = OwnImages(str(folder), _CPU, image_size=16, max_unreadable=0.1)
    found = images.prepared(_RUN)
    assert isinstance(found.data.images, CachedImages)
    assert (len(found.data), found.channels, found.image_size) == (20, 3, 16)
    assert images.prepared(_RUN) is found
    plain = images.prepared(_RUN.model_copy(update={"cache_size": None}))
    assert isinstance(plain.data.images, torch.Tensor)
    assert plain.fingerprint != found.fingerprint


def test_the_fingerprint_depends_only_on_the_files_and_the_settings(folder: Path, tmp_path: Path) -> None:
    found = OwnImages(str(folder), _CPU, image_size=16).prepared(_RUN).fingerprint
    shutil.rmtree(tmp_path / "cache")
    assert OwnImages(str(folder), _CPU, image_size=16).prepared(_RUN).fingerprint == found
    other = _RUN.model_copy(update={"cache_size": 20})
    assert OwnImages(str(folder), _CPU, image_size=16).prepared(other).fingerprint != found
    Image.new("RGB", (30, 30), (1, 2, 3)).save(folder / "a" / "00.png")
    assert OwnImages(str(folder), _CPU, image_size=16).prepared(_RUN).fingerprint != found


def test_the_stricter_limit_on_unreadable_files_applies(folder: Path) -> None:
    (folder / "a" / "03.png").write_bytes(b"")
    images = OwnImages(str(folder), _CPU, image_size=16, max_unreadable=0.1)
    with pytest.raises(DataError, match="this client's images cannot be prepared"):
        images.prepared(_RUN)  # the run's limit is 1 %
    assert images.prepared(_RUN.model_copy(update={"max_unreadable": 0.5})).unreadable == (3,)


def test_an_owner_can_forbid_the_cache(folder: Path, tmp_path: Path) -> None:
    images = OwnImages(str(folder), _CPU, image_size=16, allows_cache=False)
    with pytest.raises(DataError, match=r"owner does not allow a cache of its images, which data\.cache_size needs"):
        images.prepared(_RUN)
    assert not (tmp_path / "cache").exists()
    assert len(images.prepared(_RUN.model_copy(update={"cache_size": None})).data) == 20


def test_a_cache_needs_files_in_a_folder(folder: Path, tmp_path: Path) -> None:
    save_npz(tmp_path / "images.npz", ImageData(np.zeros((4, 3, 16, 16), np.uint8)))
    images = OwnImages(str(tmp_path / "images.npz"), _CPU)
    with pytest.raises(DataError, match=r"not files in a folder, which data\.cache_size needs") as error:
        images.prepared(_RUN)
    assert str(tmp_path) not in str(error.value)


def test_the_reason_for_a_cache_that_cannot_be_written_has_no_paths(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    images = OwnImages(str(folder), _CPU, image_size=16)
    with pytest.raises(DataError, match="this client's images cannot be prepared with") as error:
        images.prepared(_RUN)
    assert str(tmp_path) not in str(error.value)


def test_the_reason_for_a_damaged_cache_has_no_paths(
    folder: Path, harness: WorkerHarness, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = make_spec(data={"channels": 3, "image_size": 16, "cache_size": 24})
    pixels = OwnImages(str(folder), _CPU, image_size=16).prepared(spec.data).data.images.path
    pixels.write_bytes(bytes(pixels.stat().st_size))
    harness.images = OwnImages(str(folder), _CPU, image_size=16)
    harness.offer(spec, 1)
    harness.restart().step()
    (declined,) = harness.coordinator.declined
    assert "see its log" in declined.reason
    assert str(folder.parent) not in declined.reason
    assert f"the cached images in {pixels.parent} are damaged: remove this folder" in capsys.readouterr().out
