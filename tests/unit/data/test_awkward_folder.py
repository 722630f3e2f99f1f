"""A folder as found in archives: rotated photographs, damaged, missing and unreadable files, and strange names."""

import logging
import os
import resource
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image

from fedssl.data import load_conformed
from fedssl.data.datasets import list_files
from fedssl.data.image_cache import load_cached
from fedssl.data.partitioning import partition_cached, partition_dataset
from fedssl.errors import DataError
from fedssl.protocol.data import DataConfig, PartitionConfig, WindowConfig

_NOBODY = 65534
_PIXELS = np.random.default_rng(0).integers(0, 256, (16, 16, 3), np.uint8)
_DATA = DataConfig(channels=3, image_size=16, cache_size=16, max_unreadable=0.5)
_IN_MEMORY = _DATA.model_copy(update={"cache_size": None})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder in Hugging Face's layout: `train` and `test`, with class folders and a table."""
    folder = tmp_path / "images"
    photograph = Image.fromarray(_PIXELS)
    for split in ("train", "test"):
        (folder / split / "a").mkdir(parents=True)
        (folder / split / "metadata.csv").write_text("file_name,text\na/1.png,one")
        photograph.save(folder / split / "a" / "1.png")
    train = folder / "train"
    photograph.save(train / "a" / "2.webp", lossless=True)
    turned = Image.Exif()
    turned[0x0112] = 6  # to be rotated by a quarter turn, clockwise
    photograph.rotate(90).save(train / "a" / "3.png", exif=turned)
    photograph.save(train / "a" / "4.jpg", "PNG")  # a wrong suffix
    photograph.convert("RGBA").save(train / "a" / "5.png")
    strange = os.fsdecode(os.fsencode(train) + b"/\xff")
    Path(strange).mkdir()
    Image.new("L", (30, 20), 9).save(Path(strange, os.fsdecode(b"\xe4.bmp")))
    photograph.resize((40, 20)).save(Path(strange, "wide.png"))
    (train / "a" / "loop").symlink_to(train)
    (train / "a" / "zero.png").write_bytes(b"")
    (train / "a" / "cut.png").write_bytes((train / "a" / "1.png").read_bytes()[:-100])
    return folder


def test_the_folder_is_read_alike_into_memory_and_into_a_cache(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "fedssl.data"):
        found = load_conformed(str(folder), "train", _IN_MEMORY, leave_out=True)
    assert found.class_names == ("a", "\ufffd")
    assert (len(found), found.unreadable) == (7, (5, 6))
    for image in found.images[:5]:
        assert np.array_equal(image.transpose(1, 2, 0), _PIXELS)
    assert "zero.png: its content is not an image (it is empty" in caplog.text
    assert "1 .csv (not images)" in caplog.text
    cached = [load_cached(str(folder), _DATA, processes=processes) for processes in (1, 2)]
    for each in cached:
        assert each.unreadable == found.unreadable
        assert each.labels is not None
        assert found.labels is not None
        assert each.labels.tolist() == found.labels.tolist() == [0] * 5 + [1] * 2
        assert np.array_equal(each.squares(np.arange(6)).images, found.images[:6])
    assert len(load_conformed(str(folder), "test", _IN_MEMORY)) == 1
    config = PartitionConfig(dataset=str(folder), num_clients=2, scheme="iid")
    sizes = {name: len(part) for name, part in partition_dataset(config, _IN_MEMORY).by_client.items()}
    assert {name: len(part) for name, part in partition_cached(config, _DATA).items()} == sizes
    assert sum(sizes.values()) == 7


def test_a_large_tiled_tiff_is_read_in_full(tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 4096, (1500, 1100)).astype(np.uint16)
    values[:700, :500] = 77
    for name, options in (("1", {}), ("2", {"tile": (256, 256), "compression": "zlib", "bigtiff": True})):
        tifffile.imwrite(tmp_path / f"{name}.tif", values, **options)
    data = DataConfig(channels=1, image_size=32, window=WindowConfig(values=(0, 4095)))
    plain, tiled = load_conformed(str(tmp_path), "train", data).images
    assert np.array_equal(plain, tiled)
    assert plain[0, 3, 3] == round(77 / 4095 * 32_767)


@pytest.mark.parametrize("cached", [False, True])
def test_files_that_disappear_after_listing_are_counted_as_unreadable(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    cached: bool,  # noqa: FBT001
    caplog: pytest.LogCaptureFixture,
) -> None:
    files = list_files(str(folder), "train")
    assert files is not None
    (folder / "train" / "a" / "2.webp").unlink()
    name = "fedssl.data.datasets.list_folder" if cached else "fedssl.data.folders.list_folder"
    monkeypatch.setattr(name, lambda *_: files)  # as listed before
    with caplog.at_level(logging.WARNING, "fedssl.data"):
        if cached:
            found = load_cached(str(folder), _DATA, processes=1).unreadable
        else:
            found = load_conformed(str(folder), "train", _IN_MEMORY, leave_out=True).unreadable
    assert found == (1, 5, 6)
    assert "a/2.webp: it cannot be read: No such file or directory" in caplog.text


@contextmanager
def _closed_folder() -> Iterator[Path]:
    """Yield a folder of images, as a user other than root, so that permissions apply."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        Image.fromarray(_PIXELS).save(folder / "1.png")
        Image.fromarray(_PIXELS).save(folder / "2.png")
        user = os.geteuid()
        if user == 0:
            for path in (folder, *folder.iterdir()):
                os.chown(path, _NOBODY, _NOBODY)
            os.seteuid(_NOBODY)
        try:
            yield folder
        finally:
            os.seteuid(user)


def test_files_without_permission_are_counted_and_a_closed_folder_is_an_error_with_its_name() -> None:
    with _closed_folder() as folder:
        (folder / "2.png").chmod(0)
        assert load_conformed(str(folder), "train", _IN_MEMORY, leave_out=True).unreadable == (1,)
        with pytest.raises(DataError, match=r"2\.png: it cannot be read: Permission denied; repair"):
            load_conformed(str(folder), "train", _IN_MEMORY)
        (folder / "closed").mkdir(mode=0)
        with pytest.raises(DataError, match=r"cannot list .*closed: Permission denied; give the user of this process"):
            load_conformed(str(folder), "train", _IN_MEMORY)


def test_a_disk_without_space_stops_caching_and_complete_images_are_kept(folder: Path) -> None:
    """The write itself fails, as on a full disk. An image that was written only in part must not be found later."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # an image has 768 bytes
    try:
        with pytest.raises(DataError, match=r"cannot be stored in .* \(File too large\): make room there, or set"):
            load_cached(str(folder), _DATA, processes=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    found = load_cached(str(folder), _DATA, processes=1)
    whole = load_conformed(str(folder), "train", _IN_MEMORY, leave_out=True).images
    assert np.array_equal(found.squares(np.arange(6)).images, whole[:6])
