"""The contents of a folder: images at any depth, in a fixed order. Everything else is counted with a reason."""

import logging
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedssl.data import load_dataset, load_labels
from fedssl.data.contents import read_contents
from fedssl.data.folders import list_folder
from fedssl.errors import DataError


def _write(path: Path, value: int = 100) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", (8, 8), value).save(path)
    return path


def _left_out(folder: Path) -> dict[str, int]:
    return {part.what: part.num for part in read_contents(folder).left_out}


def test_images_at_any_depth_are_read_and_the_first_level_is_the_class(tmp_path: Path) -> None:
    for number, name in enumerate(
        ("a/1.png", "a/study-1/2.png", "a/study-1/series/3.png", "a/study-2/1.png", "b/x/y/z/1.png")
    ):
        _write(tmp_path / name, number)
    data = load_dataset(str(tmp_path), "train")
    assert data.images[:, 0, 0, 0].tolist() == [0, 1, 2, 3, 4]
    assert data.labels is not None
    assert data.labels.tolist() == [0, 0, 0, 0, 1]
    assert data.class_names == ("a", "b")
    labels, names = load_labels(str(tmp_path), "train")
    assert labels is not None
    assert labels.tolist() == [0, 0, 0, 0, 1]
    assert names == ("a", "b")


def test_one_level_of_class_folders_keeps_its_order_and_class_numbers(tmp_path: Path) -> None:
    """The order determines the bits of a run: names and classes are sorted by code points. Empty classes count."""
    names = [f"{folder}/{name}" for folder in ("B", "a", "b 2", "ä") for name in ("10.png", "2.PNG", "Z.jpg", "a.png")]
    for name in reversed(names):
        _write(tmp_path / name)
    (tmp_path / "0 empty").mkdir()
    files = list_folder(tmp_path, "train")
    assert files.names == tuple(names)
    assert files.class_names == ("0 empty", "B", "a", "b 2", "ä")
    assert files.labels is not None
    assert files.labels.tolist() == [number for number in (1, 2, 3, 4) for _ in range(4)]


def test_unused_files_are_counted_with_their_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _write(tmp_path / "a" / "1.png")
    for number in range(5):
        (tmp_path / "a" / f"{number}.MHA").write_bytes(b"\0")
    (tmp_path / "a" / "scan.tar.gz").write_bytes(b"\0")
    (tmp_path / "a" / "notes.txt").write_text("text")
    (tmp_path / "a" / "LICENSE").write_text("text")
    (tmp_path / "a" / "._1.png").write_bytes(b"\0")
    (tmp_path / ".cache").mkdir()
    (tmp_path / "b" / "empty").mkdir(parents=True)
    assert _left_out(tmp_path) == {
        ".mha": 5, ".tar.gz": 1, ".txt": 1, "files without a suffix": 1,
        "hidden files or folders": 2, "empty folders": 1,
    }  # fmt: skip
    assert not read_contents(tmp_path).is_complete
    with caplog.at_level(logging.INFO, "fedssl.data"):
        assert len(load_dataset(str(tmp_path), "train")) == 1
    record = next(record for record in caplog.records if "left out" in record.message)
    assert record.levelno == logging.WARNING
    assert "found 1 image; left out: 5 .mha (this format is not read: convert them to PNG of 8 bits" in record.message
    assert "; a/0.MHA, a/1.MHA, a/2.MHA, ...)" in record.message
    assert "1 .txt (not images)" in record.message


def test_a_folder_whose_images_are_all_used_is_complete(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a").mkdir()
    Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8)).save(tmp_path / "a" / "1.png")
    with caplog.at_level(logging.INFO, "fedssl.data"):
        load_dataset(str(tmp_path), "train")
    assert not caplog.records
    (tmp_path / "labels.csv").write_text("")
    assert read_contents(tmp_path).is_complete


def test_loops_of_links_end_and_links_are_counted(tmp_path: Path) -> None:
    inside, outside = tmp_path / "data", tmp_path / "elsewhere"
    _write(inside / "a" / "1.png")
    _write(outside / "2.png")
    (inside / "a" / "up").symlink_to(inside)
    (inside / "a" / "self").symlink_to(inside / "a")
    (inside / "b").symlink_to(outside)
    (outside / "back").symlink_to(inside / "a")
    (inside / "c").mkdir()
    (inside / "c" / "gone.png").symlink_to(tmp_path / "nothing")
    (inside / "c" / "round.png").symlink_to(inside / "c" / "round.png")
    os.mkfifo(inside / "c" / "pipe.png")
    found = read_contents(inside)
    assert found.by_class == {"a": ("a/1.png",), "b": ("b/2.png",), "c": ()}
    assert _left_out(inside) == {"links": 3, "broken links or special files": 3}
    assert found.links_out == ("b",)
    assert "1 link that leads out of the folder, followed" in found.describe()


def test_a_link_to_a_folder_that_is_already_read_gives_no_second_class(tmp_path: Path) -> None:
    for name in ("2023/1.png", "2024/1.png", ".kept/1.png"):
        _write(tmp_path / name)
    for name, target in (("1-before", "2024"), ("later", "2024"), ("hidden", ".kept")):
        (tmp_path / name).symlink_to(target)
    assert list(read_contents(tmp_path).by_class) == ["2023", "2024", "hidden"]
    assert _left_out(tmp_path)["links"] == 2


def test_a_folder_without_readable_images_names_its_contents(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"{number}.nrrd").write_bytes(b"")
    with pytest.raises(DataError, match=r"holds no images that can be read; left out: 20 \.nrrd \(this format"):
        load_dataset(str(tmp_path), "train")


def test_damaged_images_are_named_in_the_error(tmp_path: Path) -> None:
    for number in range(30):
        _write(tmp_path / f"{number:02}.png")
    for number in (3, 7):
        (tmp_path / f"{number:02}.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"cannot decode 2 of 30 images in .*: 03\.png: .*; 07\.png: .*; repair these"):
        load_dataset(str(tmp_path), "train")
    for number in range(30):
        (tmp_path / f"{number:02}.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    with pytest.raises(DataError):
        load_dataset(str(tmp_path), "train")


def test_a_tiff_of_8_bits_is_read(tmp_path: Path) -> None:
    pixels = np.arange(64, dtype=np.uint8).reshape(8, 8)
    for name, options in (
        ("1.tif", {}),
        ("2.TIFF", {"compression": "tiff_lzw"}),
        ("3.tiff", {"compression": "tiff_deflate"}),
    ):
        Image.fromarray(pixels).save(tmp_path / name, **options)
    data = load_dataset(str(tmp_path), "train")
    assert data.images.shape == (3, 1, 8, 8)
    assert (data.images == pixels).all()


def test_a_tiff_is_rotated_once(tmp_path: Path) -> None:
    pixels = np.arange(64, dtype=np.uint8).reshape(8, 8)
    Image.fromarray(pixels).save(tmp_path / "1.tif", tiffinfo={274: 3})
    assert (load_dataset(str(tmp_path), "train").images[0, 0] == pixels[::-1, ::-1]).all()


def test_a_tiff_that_would_be_read_wrongly_is_refused(tmp_path: Path) -> None:
    pages = [Image.new("L", (8, 8), 10 * number) for number in range(3)]
    pages[0].save(tmp_path / "1.tif", save_all=True, append_images=pages[1:])
    with pytest.raises(DataError, match=r"1\.tif: it has 3 pages; save each page as a file"):
        load_dataset(str(tmp_path), "train")
    deep = Image.fromarray(np.full((8, 8), 60_000, np.uint16))
    deep.save(tmp_path / "1.tif", tiffinfo={262: 0})
    with pytest.raises(DataError, match=r"1\.tif: it stores inverted values \(WhiteIsZero\) with 16 bits"):
        load_dataset(str(tmp_path), "train")
    Image.new("F", (8, 8), 0.5).save(tmp_path / "1.tif")
    with pytest.raises(DataError, match=r"1\.tif: the range of its values is unknown: choose which values"):
        load_dataset(str(tmp_path), "train")


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_values_of_12_bits_stored_in_16_are_refused(tmp_path: Path, suffix: str) -> None:
    for number in range(3):
        pixels = np.linspace(0, 4095 - number, 64).astype(np.uint16).reshape(8, 8)
        Image.fromarray(pixels).save(tmp_path / f"{number}.{suffix}")
    with pytest.raises(
        DataError, match=r"3 images are stored with 16 bits .* no value is above 4,095, so the values have 12"
    ):
        load_dataset(str(tmp_path), "train")


def test_values_of_16_bits_are_accepted_if_any_image_of_the_set_uses_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number, highest in enumerate((900, 65_535)):
        pixels = np.linspace(0, highest, 64).astype(np.uint16).reshape(8, 8)
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
    with caplog.at_level(logging.INFO, "fedssl.data"):
        assert load_dataset(str(tmp_path), "train").images[1].max() == 255
    assert "2 images have 16 bits per value. The upper 8 are used" in caplog.text


def test_colours_of_16_bits_with_a_low_range_are_refused(tmp_path: Path) -> None:
    """PIL silently reads such files as 8 bits, so only the decoder knows that they had 16."""
    _write_rgb16(tmp_path / "1.png", 3000)
    with pytest.raises(DataError, match=r"1 image is stored with 16 bits .* so the values have 12 bits"):
        load_dataset(str(tmp_path), "train")
    _write_rgb16(tmp_path / "2.png", 65_535)
    assert load_dataset(str(tmp_path), "train").images.max() == 255


def _write_rgb16(path: Path, highest: int) -> None:
    """Write a PNG file with three channels of 16 bits. PIL cannot write such files."""
    import struct
    import zlib

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    rows = b"".join(b"\0" + np.full((8, 3), highest, ">u2").tobytes() for _ in range(8))
    header = struct.pack(">IIBBBBB", 8, 8, 16, 2, 0, 0, 0)
    content = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + content)
