"""The images of a folder are decoded once, to the same bits, even with interruptions."""

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from pydicom.pixels.decoders import JPEG2000LosslessDecoder

from fedssl.data import decode_file, rasters
from fedssl.data.image_cache import CachedData, build, entries, load_cached, records
from fedssl.errors import DataError
from fedssl.protocol.data import DataConfig
from support.dicom_files import write_compressed, write_dicom

_DATA = DataConfig(channels=3, image_size=16, cache_size=20)
_NUM = 40


def _write(path: Path, seed: int, height: int = 25, width: int = 35) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)).save(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder of two classes, whose images have several shapes."""
    for number in range(_NUM):
        _write(tmp_path / "images" / "ab"[number % 2] / f"{number:02}.png", number, 20 + number, 50 - number // 2)
    return tmp_path / "images"


@pytest.fixture
def decoded_names(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that receives the name of each file that this process decodes."""
    names: list[str] = []
    original = entries.decode_whole

    def counted(files, name, channels, size):  # type: ignore[no-untyped-def]
        names.append(name)
        return original(files, name, channels, size)

    monkeypatch.setattr(entries, "decode_whole", counted)
    return names


def _pixels(data: CachedData) -> list[torch.Tensor]:
    return [data.images.batch(torch.tensor([number])).pixels for number in range(len(data))]


def test_images_decoded_by_an_earlier_version_are_decoded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The earlier version decoded JPEG files that ended in zeros, with a grey part, and cached them."""
    path = tmp_path / "images" / "0.jpg"
    _write(path, 0, 64, 64)
    _write(path.with_name("1.jpg"), 1)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2].ljust(len(whole), b"\0"))
    data = _DATA.model_copy(update={"max_unreadable": 0.5})
    with monkeypatch.context() as earlier:
        earlier.setattr(build, "_VERSION", 3)
        earlier.setattr(rasters, "_require_end", lambda file: None)
        assert len(load_cached(str(path.parent), data, processes=1)) == 2
    assert len(load_cached(str(path.parent), data, processes=1)) == 1


def _same(first: CachedData, second: CachedData) -> bool:
    pairs = zip(_pixels(first), _pixels(second), strict=True)
    return first.digests == second.digests and all(torch.equal(*pair) for pair in pairs)


def test_the_shorter_side_is_scaled_and_the_aspect_kept(folder: Path) -> None:
    found = load_cached(str(folder), _DATA, processes=1)
    names = sorted(path.relative_to(folder) for path in folder.glob("*/*.png"))
    assert found.labels is not None
    assert (len(found), found.labels.tolist(), found.class_names) == (_NUM, [0] * 20 + [1] * 20, ("a", "b"))
    for pixels, name in zip(_pixels(found), names, strict=True):
        with Image.open(folder / name) as image:
            width, height = image.size
            shorter = min(width, height)
            expected = min(20 * width / shorter, 40), min(20 * height / shorter, 40)
            shown = pixels[0].permute(1, 2, 0).numpy()
            assert shown.shape[:2] == (round(expected[1]), round(expected[0]))
            if max(width, height) <= 2 * shorter:
                resized = image.resize((shown.shape[1], shown.shape[0]), Image.Resampling.BILINEAR)
                np.testing.assert_array_equal(shown, np.asarray(resized))


def test_the_ends_of_a_long_image_are_cut_off(tmp_path: Path) -> None:
    pixels = np.zeros((20, 100, 3), np.uint8)
    pixels[:, 30:70] = 200
    (tmp_path / "a").mkdir()
    Image.fromarray(pixels).save(tmp_path / "a" / "long.png")
    [found] = _pixels(load_cached(str(tmp_path), _DATA, processes=1))
    assert found.shape == (1, 3, 20, 40)
    assert found.unique().tolist() == [200]


def test_four_processes_write_the_same_bytes_as_one(folder: Path, tmp_path: Path) -> None:
    one = load_cached(str(folder), _DATA, processes=1)
    content = one.images.path.read_bytes(), (one.images.path.parent / records.INDEX).read_bytes()
    shutil.rmtree(tmp_path / "cache")
    four = load_cached(str(folder), _DATA, processes=4)
    assert (four.images.path.read_bytes(), (four.images.path.parent / records.INDEX).read_bytes()) == content


def test_a_second_load_decodes_nothing(folder: Path, decoded_names: list[str]) -> None:
    first = load_cached(str(folder), _DATA, processes=1)
    assert len(decoded_names) == _NUM
    assert _same(first, load_cached(str(folder), _DATA, processes=1))
    assert len(decoded_names) == _NUM


def test_only_changed_and_new_files_are_decoded_again(folder: Path, decoded_names: list[str]) -> None:
    load_cached(str(folder), _DATA, processes=1)
    decoded_names.clear()
    _write(folder / "a" / "00.png", 1000)
    _write(folder / "b" / "99.png", 1001)
    (folder / "b" / "01.png").unlink()
    again = load_cached(str(folder), _DATA, processes=1)
    assert decoded_names == ["a/00.png", "b/99.png"]
    kept = again.images.path.stat().st_size
    shutil.rmtree(again.images.path.parent)
    fresh = load_cached(str(folder), _DATA, processes=1)
    assert _same(again, fresh)
    assert kept > fresh.images.path.stat().st_size


def test_a_new_version_of_a_package_decodes_again_only_the_files_that_it_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, decoded_names: list[str]
) -> None:
    images = tmp_path / "images"
    _write(images / "0.png", 0)
    _write(images / "1.tif", 1)
    load_cached(str(images), _DATA, processes=1)
    decoded_names.clear()
    monkeypatch.setattr(decode_file, "_with_versions", lambda *packages: f" {packages[0]} 9999")
    load_cached(str(images), _DATA, processes=1)
    assert decoded_names == ["1.tif"]
    assert [decode_file.decoder_of(name) for name in ("a.nii.gz#2", "a.dcm", "1.2.840#3", "a.npz#1")] == [
        " nibabel 9999",
        " pydicom 9999",
        " pydicom 9999",
        "",
    ]


def test_a_file_with_the_same_content_under_another_name_takes_no_space(folder: Path) -> None:
    size = load_cached(str(folder), _DATA, processes=1).images.path.stat().st_size
    shutil.copy(folder / "a" / "00.png", folder / "a" / "copy.png")
    found = load_cached(str(folder), _DATA, processes=1)
    assert found.images.path.stat().st_size == size
    pixels = _pixels(found)
    assert torch.equal(pixels[0], pixels[20])


def test_changed_files_do_not_fill_the_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "_MOST_UNUSED_BYTES", 0)
    size = load_cached(str(folder), _DATA, processes=1).images.path.stat().st_size
    for round_number in range(4):
        for number, path in enumerate(sorted(folder.glob("*/*.png"))):
            _write(path, 100 * round_number + number + 1000)
        assert load_cached(str(folder), _DATA, processes=1).images.path.stat().st_size <= 2 * size


def test_a_truncated_cache_is_completed(folder: Path) -> None:
    whole = load_cached(str(folder), _DATA, processes=1)
    pixels, path = _pixels(whole), whole.images.path
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(DataError, match="are damaged: remove this folder and start again"):
        whole.images.batch(torch.tensor([_NUM - 1]))
    assert all(map(torch.equal, pixels, _pixels(load_cached(str(folder), _DATA, processes=1))))


def test_a_damaged_index_line_is_decoded_again(folder: Path, decoded_names: list[str]) -> None:
    whole = load_cached(str(folder), _DATA, processes=1)
    index = whole.images.path.parent / records.INDEX
    lines = index.read_bytes().splitlines(keepends=True)
    index.write_bytes(b"".join(lines[:30]) + lines[30][:40])
    decoded_names.clear()
    assert _same(whole, load_cached(str(folder), _DATA, processes=1))
    assert len(decoded_names) == 10


@pytest.mark.parametrize("damage", ["line", "missing", "cut"])
def test_images_in_use_do_not_change_if_the_index_is_damaged(
    folder: Path, decoded_names: list[str], damage: str
) -> None:
    whole = load_cached(str(folder), _DATA, processes=1)
    before, index = _pixels(whole), whole.images.path.parent / records.INDEX
    lines = index.read_bytes().splitlines(keepends=True)
    lines[5] = lines[5].replace(b"{", b"[", 1)
    index.write_bytes(lines[0][:20] if damage == "cut" else b"".join(lines))
    if damage == "missing":
        index.unlink()
    _write(folder / "a" / sorted(os.listdir(folder / "a"))[0], 99)  # the first file now has other pixels
    decoded_names.clear()
    load_cached(str(folder), _DATA, processes=1)
    assert len(decoded_names) == _NUM
    assert all(map(torch.equal, before, _pixels(whole)))


_KILLED = """
import sys
from fedssl.data.image_cache import entries, load_cached, records
from fedssl.protocol.data import DataConfig
records._FLUSH_BYTES = 1
load_cached(sys.argv[1], DataConfig(channels=3, image_size=16, cache_size=20), processes=2)
"""


@pytest.mark.full
def test_a_kill_during_decoding_changes_no_bit(folder: Path, tmp_path: Path, decoded_names: list[str]) -> None:
    whole = load_cached(str(folder), _DATA, processes=1)
    path, content = whole.images.path, whole.images.path.read_bytes()
    shutil.rmtree(tmp_path / "cache")
    decoded_names.clear()
    for number in range(_NUM, 400):  # enough images that it is killed before it ends
        _write(folder / "c" / f"{number}.png", number)
    process = subprocess.Popen([sys.executable, "-c", _KILLED, str(folder)], env=os.environ)
    index, deadline = path.parent / records.INDEX, time.monotonic() + 300
    while not (index.exists() and index.read_bytes().count(b"\n") >= 5) and time.monotonic() < deadline:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = index.read_bytes().count(b"\n")
    assert 5 <= kept < 400
    shutil.rmtree(folder / "c")
    again = load_cached(str(folder), _DATA, processes=1)
    assert _same(whole_of(again, content), again)
    assert len(decoded_names) == max(0, _NUM - kept)


def whole_of(found: CachedData, content: bytes) -> CachedData:
    """Return the same data, but read from the same positions of `content`, which was written without interruption."""
    path = found.images.path.with_name("whole.bin")
    path.write_bytes(content)
    own = found.images
    images = type(own)(path, own.offsets, own.sizes, own.digests, channels=3, image_size=16, dtype=np.dtype(np.uint8))
    return CachedData(images, found.digests, found.settings, found.labels, found.class_names)


def _children() -> set[int]:
    """Return the processes that this thread has started."""
    return set(map(int, Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()))


@pytest.mark.full
def test_a_killed_decoder_is_an_error_and_finished_images_are_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add, killed, others = records.Records.add, [], _children()  # `others` may be servers of other tests

    def add_and_kill(self, entry, pixels):  # type: ignore[no-untyped-def]
        if not killed:
            killed.extend(_children() - others)
            for child in killed:
                os.kill(child, signal.SIGKILL)
        return add(self, entry, pixels)

    monkeypatch.setattr(records.Records, "add", add_and_kill)
    for number in range(_NUM, 200):
        _write(folder / "c" / f"{number}.png", number)
    with pytest.raises(DataError, match="a process that decodes images has ended early"):
        load_cached(str(folder), _DATA, processes=2)
    assert len(killed) == 2
    [index] = Path(os.environ["XDG_CACHE_HOME"]).rglob(records.INDEX)
    assert index.read_bytes().count(b"\n") > 0


def test_two_threads_share_one_cache(folder: Path, decoded_names: list[str]) -> None:
    found: list[CachedData] = []
    threads = [
        threading.Thread(target=lambda: found.append(load_cached(str(folder), _DATA, processes=1))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert _same(*found)
    assert len(decoded_names) == _NUM


def test_caches_of_other_settings_are_deleted_except_the_last_one(folder: Path) -> None:
    places = []
    for size in (20, 21, 22):
        found = load_cached(str(folder), _DATA.model_copy(update={"cache_size": size}), processes=1)
        places.append(found.images.path.parent)
        (places[0].parent / ".DS_Store").touch()  # written by a file manager
    assert [place.exists() for place in places] == [False, True, True]


def test_the_cache_is_private(folder: Path) -> None:
    path = load_cached(str(folder), _DATA, processes=1).images.path
    assert [each.stat().st_mode & 0o77 for each in (path.parent.parent, path, path.parent / records.INDEX)] == [0] * 3


def test_a_disk_with_too_little_space_is_refused_before_decoding(
    folder: Path, monkeypatch: pytest.MonkeyPatch, decoded_names: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build.shutil, "disk_usage", lambda path: SimpleNamespace(free=records.RESERVE_BYTES + 100))
    with (
        caplog.at_level(logging.INFO, "fedssl.data"),
        pytest.raises(DataError, match=r"take about .* GB, and .* has .* GB left: make room there"),
    ):
        load_cached(str(folder), _DATA, processes=1)
    assert decoded_names == []
    assert "caching 40 images" in caplog.text


def test_a_disk_that_fills_up_is_an_error_and_finished_images_are_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "_FLUSH_BYTES", 1)
    free = iter([1 << 40] * 10 + [1000])
    monkeypatch.setattr(build.shutil, "disk_usage", lambda path: SimpleNamespace(free=next(free)))
    with pytest.raises(DataError, match=r"caching images stops at 268: make room"):
        load_cached(str(folder), _DATA, processes=1)
    [index] = Path(os.environ["XDG_CACHE_HOME"]).rglob(records.INDEX)
    assert index.read_bytes().count(b"\n") == 10


def test_the_estimated_size_is_close_to_that_of_the_cache(folder: Path) -> None:
    files = build.list_files(str(folder), "train")
    assert files is not None
    expected = build.expected_bytes(files, files.names, _DATA)
    size = load_cached(str(folder), _DATA, processes=1).images.path.stat().st_size
    assert expected == pytest.approx(size, rel=0.05)


def test_unreadable_files_are_left_out_up_to_the_permitted_share(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "a" / "00.png").write_bytes(b"")
    (folder / "b" / "01.png").write_bytes((folder / "b" / "01.png").read_bytes()[:60])
    with pytest.raises(DataError, match=r"cannot decode 2 of 40 .*a/00\.png: .*b/01\.png"):
        load_cached(str(folder), _DATA, processes=1)
    with caplog.at_level(logging.WARNING, "fedssl.data"):
        found = load_cached(str(folder), _DATA, max_unreadable=0.05, processes=2)
    assert (len(found), found.unreadable) == (38, (0, 20))
    assert found.labels is not None
    assert found.labels.tolist() == [0] * 19 + [1] * 19
    assert "left out 2 of 40 images" in caplog.text


def test_decoding_is_retried_for_a_file_that_could_not_be_decoded(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (20, 20), np.uint8)
    write_compressed(tmp_path / "images" / "1.dcm", [pixels], "JPEG 2000")
    write_dicom(tmp_path / "images" / "2.dcm", pixels)
    data = DataConfig(channels=1, image_size=16, cache_size=20, max_unreadable=0.5)
    plugins = JPEG2000LosslessDecoder._available.copy()
    JPEG2000LosslessDecoder._available.clear()  # as if the package that decodes these files were not installed
    try:
        assert load_cached(str(tmp_path / "images"), data, processes=1).unreadable == (0,)
    finally:
        JPEG2000LosslessDecoder._available.update(plugins)
    found = load_cached(str(tmp_path / "images"), data, processes=1)
    assert (len(found), found.unreadable) == (2, ())


def test_a_file_that_changes_while_it_is_read_is_not_cached(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = entries.decode_whole

    def changing(files, name, channels, size):  # type: ignore[no-untyped-def]
        found = original(files, name, channels, size)
        if name == "a/02.png":
            _write(folder / name, 1234)
        return found

    monkeypatch.setattr(entries, "decode_whole", changing)
    with pytest.raises(DataError, match=r"a/02\.png: it changed while it was read; try again"):
        load_cached(str(folder), _DATA, processes=1)
    monkeypatch.undo()


def test_equal_and_constant_images_are_named(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.copy(folder / "a" / "00.png", folder / "a" / "copy.png")
    Image.new("RGB", (30, 30), (7, 7, 7)).save(folder / "b" / "flat.png")
    with caplog.at_level(logging.WARNING, "fedssl.data"):
        load_cached(str(folder), _DATA, processes=1)
    assert "images of only one value: 1 (b/flat.png)" in caplog.text
    assert "images that equal an earlier one: 1 (a/copy.png = a/00.png)" in caplog.text


def test_file_names_that_are_not_utf_8_are_read(folder: Path) -> None:
    shutil.copy(folder / "a" / "00.png", os.fsencode(folder / "a") + b"/\xff.png")
    found = load_cached(str(folder), _DATA, processes=2)
    assert len(found) == _NUM + 1
    assert found.digests[0] in found.digests[1:]


def test_arrays_and_missing_folders_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "images.npz", images=np.zeros((2, 16, 16, 3), np.uint8))
    with pytest.raises(DataError, match=r"data\.cache_size is for folders of image files"):
        load_cached(str(tmp_path / "images.npz"), _DATA)
    with pytest.raises(DataError):
        load_cached(str(tmp_path / "nothing"), _DATA)


def test_index_lines_are_json_with_the_digest(folder: Path) -> None:
    found = load_cached(str(folder), _DATA, processes=1)
    lines = (found.images.path.parent / records.INDEX).read_text().splitlines()
    assert [json.loads(line)["digest"] for line in lines] == list(found.digests)


@pytest.mark.parametrize("size", [15, 33])
def test_a_cache_size_that_does_not_fit_the_crops_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=r"data.cache_size must be from 16 to 32, one to two times data.image_size"):
        DataConfig(image_size=16, cache_size=size)


def test_a_spec_without_a_cache_has_no_cache_size_key() -> None:
    assert "cache_size" not in DataConfig().model_dump()
    assert _DATA.model_dump()["cache_size"] == 20
