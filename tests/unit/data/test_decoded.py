"""The cache of decoded images: fast on the second load, never stale or incomplete, and only for public data sets."""

import json
import logging
import multiprocessing
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from fedssl.cache import cache_folder
from fedssl.data import decode_file, load_dataset
from fedssl.data import decoded as module
from fedssl.data.decoded import decoded
from fedssl.data.decoding import decode_chunks, decode_to_memory
from fedssl.data.image_files import ImageFiles
from fedssl.data.trees import FolderTree
from fedssl.errors import DataError

RNG = np.random.default_rng(0)


def _files(folder: Path, num: int = 7, size: int = 12) -> ImageFiles:
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(num):
        Image.fromarray(RNG.integers(0, 256, (size, size, 3)).astype(np.uint8)).save(folder / f"{i}.png")
    return ImageFiles("a set", FolderTree(folder), tuple(f"{i}.png" for i in range(num)))


def _kept() -> list[str]:
    folder = cache_folder() / "decoded"
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".lock") if folder.exists() else []


def test_cached_images_are_memory_mapped_and_equal_those_decoded_in_memory(tmp_path: Path) -> None:
    files = _files(tmp_path / "set")
    images = decoded(files, 3, 8)
    assert isinstance(images, np.memmap)
    assert not images.flags.writeable
    assert np.array_equal(images, decode_to_memory(files, 3, 8)[0])
    about = json.loads((cache_folder() / "decoded" / _kept()[0] / "about.json").read_text())
    assert about["shape"] == [7, 3, 8, 8]


def test_nothing_is_decoded_on_the_second_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = _files(tmp_path / "set")
    first = decoded(files, 3, 8)
    monkeypatch.setattr(module, "decode_chunks", lambda *_: pytest.fail("decoded again"))
    assert np.array_equal(decoded(files, 3, 8), first)


def test_a_replaced_file_of_the_same_size_and_modification_time_is_decoded_again(tmp_path: Path) -> None:
    path = tmp_path / "1.bmp"
    files = ImageFiles("a set", FolderTree(tmp_path), (path.name,))
    for value in (5, 9):
        Image.new("L", (8, 8), value).save(path)
        os.utime(path, (0, 0))
        assert (decoded(files, 1, 8) == value).all()
        time.sleep(0.02)  # several ticks of the clock of the file system


def test_everything_that_changes_the_pixels_changes_the_key(tmp_path: Path) -> None:
    files = _files(tmp_path / "set")
    first = decoded(files, 3, 8)
    assert decoded(files, 1, 8).shape == (7, 1, 8, 8)
    assert decoded(files, 3, 9).shape == (7, 3, 9, 9)
    assert decoded(ImageFiles("a set", files.tree, files.names[::-1]), 3, 8)[0].tolist() == first[6].tolist()
    Image.new("RGB", (12, 12), (1, 2, 3)).save(tmp_path / "set" / "0.png")
    assert decoded(files, 3, 8)[0, :, 0, 0].tolist() == [1, 2, 3]
    assert len(_kept()) == 5


def test_another_version_of_a_package_changes_the_key_of_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _files(tmp_path / "set")
    Image.new("RGB", (12, 12), (1, 2, 3)).save(tmp_path / "set" / "7.tif")
    tree = FolderTree(tmp_path / "set")
    for name, num in (("0.png", 1), ("7.tif", 3)):
        files = ImageFiles("a set", tree, (name,))
        decoded(files, 3, 8)
        with monkeypatch.context() as later:
            later.setattr(decode_file, "_with_versions", lambda *packages: " tifffile 9999")
            decoded(files, 3, 8)
        assert len(_kept()) == num


@pytest.mark.parametrize("damage", ["short", "garbage", "shape", "dtype", "gone"])
def test_damaged_files_are_replaced(tmp_path: Path, damage: str) -> None:
    files = _files(tmp_path / "set")
    first = np.array(decoded(files, 3, 8))
    path = cache_folder() / "decoded" / _kept()[0] / "images.npy"
    if damage == "short":
        path.write_bytes(path.read_bytes()[:-1])
    elif damage == "garbage":
        path.write_bytes(b"garbage")
    elif damage == "gone":
        path.unlink()
    else:
        np.save(path, np.zeros((7, 3, 8, 9 if damage == "shape" else 8), np.int8 if damage == "dtype" else np.uint8))
    assert np.array_equal(decoded(files, 3, 8), first)
    assert len(_kept()) == 1


def test_an_image_that_cannot_be_decoded_leaves_nothing(tmp_path: Path) -> None:
    files = _files(tmp_path / "set")
    (tmp_path / "set" / "5.png").write_bytes(b"damaged")
    with pytest.raises(DataError, match=r"5\.png"):
        decoded(files, 3, 8)
    assert _kept() == []


def _die_half_way(files: ImageFiles) -> None:
    def chunks(*_: object) -> Iterator[np.ndarray]:
        yield np.zeros((3, 3, 8, 8), np.uint8)
        os.kill(os.getpid(), 9)

    module.decode_chunks = chunks  # type: ignore[assignment]
    decoded(files, 3, 8)


def test_a_killed_process_leaves_no_usable_entry(tmp_path: Path) -> None:
    files = _files(tmp_path / "set")
    process = multiprocessing.get_context("fork").Process(target=_die_half_way, args=(files,))
    process.start()
    process.join()
    assert process.exitcode == -9
    assert _kept()[0].endswith(".partial")
    assert np.array_equal(decoded(files, 3, 8), decode_to_memory(files, 3, 8)[0])
    assert not _kept()[0].endswith(".partial")


def _count_decodings(files: ImageFiles, log: Path) -> None:
    def chunks(*arguments: object) -> Iterator[np.ndarray]:
        with log.open("a") as file:
            file.write("decoding\n")
        time.sleep(0.3)
        yield from decode_chunks(*arguments)  # type: ignore[arg-type]

    module.decode_chunks = chunks
    decoded(files, 3, 8)


def test_processes_that_need_the_same_images_decode_them_once(tmp_path: Path) -> None:
    files, log = _files(tmp_path / "set"), tmp_path / "log"
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_count_decodings, args=(files, log)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert log.read_text().splitlines() == ["decoding"]


def test_a_cache_folder_without_space_or_permission_is_reported_with_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = _files(tmp_path / "set")
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: SimpleNamespace(free=10))
    with pytest.raises(DataError, match=r"take 0\.0 GB .* XDG_CACHE_HOME"):
        decoded(files, 3, 8)
    monkeypatch.undo()
    (tmp_path / "a-file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a-file"))
    with pytest.raises(DataError, match="XDG_CACHE_HOME"):
        decoded(files, 3, 8)


def test_private_images_are_not_copied_into_the_cache(tmp_path: Path) -> None:
    _files(tmp_path / "own" / "class")
    load_dataset(str(tmp_path / "own"), "train")
    assert not cache_folder().exists()


@pytest.mark.parametrize("size", [16, 160])
def test_chunks_keep_the_order_of_the_files_with_several_threads(
    tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("fedssl.data.decoding._CHUNK_IMAGES", 3)
    monkeypatch.setattr("fedssl.data.decoding.num_usable_cores", lambda: 4)
    files = _files(tmp_path / "set", num=23, size=size)
    with caplog.at_level(logging.INFO, logger="fedssl.data"):
        chunks = list(decode_chunks(files, 3, size))
    assert [len(chunk) for chunk in chunks] == [3] * 7 + [2]
    for name, image in zip(files.names, np.concatenate(chunks), strict=True):
        with Image.open(tmp_path / "set" / name) as expected:
            assert np.array_equal(image, np.asarray(expected).transpose(2, 0, 1))
    assert "decoding a set: 12 of 23 images" in caplog.text
