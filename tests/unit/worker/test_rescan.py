"""With `--rescan`, a worker reads its images again before a round if their files have changed."""

import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedssl.errors import DataError
from fedssl.protocol.data import DataConfig
from fedssl_worker import data
from fedssl_worker.data import OwnImages
from fedssl_worker.labels import load_own_labels
from fedssl_worker.rescan import Rescan
from fedssl_worker.settings import Settings

_CPU = torch.device("cpu")
_NOBODY = 65534


def _write(folder: Path, *numbers: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number in numbers:
        pixels = np.random.default_rng(number).integers(0, 256, (16, 16), np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:03}.png")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    _write(tmp_path / "images" / "a", 0, 1)
    _write(tmp_path / "images" / "b", 2, 3)
    return tmp_path / "images"


def _rescan(images: OwnImages, folder: Path, labels: str | None = "own") -> tuple[Rescan, list[int]]:
    settings = Settings(coordinator="https://x", data=str(folder), state=folder.parent / "state", labels=labels)
    registered: list[int] = []
    own = load_own_labels(settings.data, labels, None, images.num_listed)
    return Rescan(settings, images, own, lambda: registered.append(len(images))), registered


def test_new_changed_and_removed_files_are_used_in_the_next_round(folder: Path) -> None:
    images = OwnImages(str(folder), _CPU)
    labels = load_own_labels(str(folder), "own", None, images.num_listed)
    registered: list[int] = []
    settings = Settings(coordinator="https://x", data=str(folder), state=folder.parent / "state", labels="own")
    rescan = Rescan(settings, images, labels, lambda: registered.append(len(images)))
    before = images.fingerprint
    rescan()
    assert not registered
    assert images.fingerprint == before
    _write(folder / "b", 4)
    rescan()
    assert (len(images), registered) == (5, [5])
    assert labels is not None
    assert labels.labels.labels.tolist() == [0, 0, 1, 1, 1]
    added = images.fingerprint
    assert added != before
    assert images.prepared(DataConfig(channels=1, image_size=8)).num_listed == 5
    _write(folder / "b", 5)
    (folder / "b" / "005.png").replace(folder / "b" / "004.png")  # another image under the same name
    rescan()
    assert (len(images), registered) == (5, [5, 5])
    assert images.fingerprint not in (before, added)
    (folder / "b" / "004.png").unlink()
    rescan()
    assert (len(images), registered) == (4, [5, 5, 4])
    assert images.fingerprint == before, "the images of the beginning"
    os.symlink(folder, folder / "b" / "loop")
    rescan()
    assert len(images) == 4


def test_unusable_files_stop_the_round_and_the_earlier_images_and_labels_are_kept(folder: Path) -> None:
    images = OwnImages(str(folder), _CPU)
    file = folder.parent / "labels.csv"
    lines = [f"{name},x" for name in ("a/000.png", "a/001.png", "b/002.png", "b/003.png")]
    file.write_text("\n".join(["path,label", *lines]))
    rescan, registered = _rescan(images, folder, str(file))
    _write(folder / "b", 4)  # it has no label
    for _ in range(2):
        with pytest.raises(DataError, match="see its worker's log") as error:
            rescan()
        assert str(folder) not in str(error.value)
    assert (len(images), registered) == (4, [])
    file.write_text("\n".join(["path,label", *lines, "b/004.png,x"]))
    rescan()
    assert (len(images), registered) == (5, [5])
    (folder / "a" / "000.png").write_bytes(b"")
    with pytest.raises(DataError, match="see its worker's log"):
        rescan()
    assert len(images) == 5


def test_images_of_a_large_folder_are_counted_but_not_kept_in_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = OwnImages(str(folder), _CPU)
    monkeypatch.setattr(data, "_KEPT_BYTES", 1000)
    (folder / "a" / "broken.png").write_bytes(b"")
    images = OwnImages(str(folder), _CPU, max_unreadable=0.2)
    assert (len(images), images.num_listed, images.num_unreadable) == (4, 5, 1)
    assert (images.channels, images.image_size, images.has_labels) == (1, 16, True)
    shape = DataConfig(channels=1, image_size=16, max_unreadable=0.2)
    assert torch.equal(torch.as_tensor(images.prepared(shape).data.images[:]), torch.as_tensor(kept.data.images[:]))
    with pytest.raises(DataError, match="cannot decode"):
        OwnImages(str(folder), _CPU)


def test_an_unreadable_hidden_folder_is_ignored() -> None:
    """Disks have `.Trash-0` and similar folders. They are not searched for images, so `fedssl doctor` reports no
    problem."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write(folder, 0, 1)
        (folder / ".Trash-0").mkdir(mode=0)
        user = os.geteuid()
        if user == 0:
            folder.chmod(0o755)
            os.seteuid(_NOBODY)
        try:
            images = OwnImages(name, _CPU)
            assert (len(images), images.read_if_changed()) == (2, None)
        finally:
            os.seteuid(user)
