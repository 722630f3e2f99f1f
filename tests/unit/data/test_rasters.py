"""Files of more than 8 bits and of any number of channels, read through a window: TIFF, PNG and arrays."""

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from numpy.typing import NDArray
from PIL import Image

from fedssl.data import ImageData, load_conformed, load_dataset, save_npz
from fedssl.data.datasets import count_images, file_shape, load_labels
from fedssl.data.decode_file import decode_file, examine, thumbnail
from fedssl.data.folders import list_folder
from fedssl.data.rasters import MAX_BYTES, read_raster
from fedssl.errors import DataError
from fedssl.protocol.data import DataConfig, WindowConfig

_RAMP = np.arange(64, dtype=np.uint16).reshape(8, 8) * 65  # 0..4,095: 12 bits in 16
_TWELVE = WindowConfig(values=(0, 4095))


def _load(folder: Path, channels: int = 1, window: WindowConfig | None = _TWELVE, size: int = 8) -> NDArray[np.generic]:
    return load_conformed(str(folder), "train", DataConfig(channels=channels, image_size=size, window=window)).images


def _expected(values: NDArray[np.generic], low: float = 0, high: float = 4095) -> NDArray[np.int16]:
    return np.rint(np.clip((values.astype(float) - low) / (high - low), 0, 1) * 32_767).astype(np.int16)


@pytest.mark.parametrize("name", ["1.png", "1.tif", "1.npy", "deflate.tif", "tiled.tif", "big.tif", "lzw.tif"])
def test_values_of_12_bits_in_16_are_preserved_through_a_window(tmp_path: Path, name: str) -> None:
    path, values = tmp_path / name, np.kron(_RAMP, np.ones((4, 4), np.uint16))
    if name == "1.npy":
        np.save(path, values)
    elif name == "1.png":
        Image.fromarray(values).save(path)
    elif name == "lzw.tif":
        Image.fromarray(values).save(path, compression="tiff_lzw")
    else:
        options = {
            "deflate.tif": {"compression": "zlib"},
            "tiled.tif": {"tile": (16, 16)},
            "big.tif": {"bigtiff": True},
        }
        tifffile.imwrite(path, values, **options.get(name, {}))  # type: ignore[arg-type]
    found = _load(tmp_path, size=32)
    assert found.dtype == np.int16
    assert np.abs(found[0, 0].astype(int) - _expected(values)).max() <= 1


def test_images_of_8_bits_are_unchanged_by_a_window_of_their_whole_range(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "1.png")
    found = _load(tmp_path, 3, WindowConfig(stored=True, bits=8))
    assert found.dtype == np.uint8
    assert np.array_equal(found, _load(tmp_path, 3, None))


def test_floating_point_and_signed_tiffs_are_read(tmp_path: Path) -> None:
    values = np.linspace(-1000, 1000, 64).reshape(8, 8)
    for number, dtype in enumerate((np.float32, np.float64, np.int16, np.int32)):
        tifffile.imwrite(tmp_path / f"{number}.tif", values.astype(dtype))
    found = _load(tmp_path, window=WindowConfig(values=(-1000, 1000)))
    assert np.abs(found[:2, 0].astype(int) - _expected(values, -1000, 1000)).max() <= 1
    assert np.abs(found[2:, 0].astype(int) - _expected(values.astype(np.int16), -1000, 1000)).max() <= 1


@pytest.mark.parametrize("compression", [None, "zlib"])
def test_signed_bytes_of_a_tiff_keep_their_sign(tmp_path: Path, compression: str | None) -> None:
    values = np.arange(-128, 128, dtype=np.int8).reshape(16, 16)
    tifffile.imwrite(tmp_path / "1.tif", values, compression=compression)
    for window in (WindowConfig(stored=True), WindowConfig(values=(-128, 127))):
        assert np.abs(_load(tmp_path, 1, window, 16)[0, 0].astype(int) - _expected(values, -128, 127)).max() <= 1
    with pytest.raises(DataError, match=r"its values are signed: choose .* \[data.window\]"):
        _load(tmp_path, 1, None, 16)
    assert examine(list_folder(tmp_path, "train"), "1.tif").needs_window
    assert (
        np.diff(np.asarray(thumbnail(list_folder(tmp_path, "train"), "1.tif", 16))[:, :, 0].ravel().astype(int)).min()
        >= 0
    )


@pytest.mark.parametrize("num", [2, 5, 16])
def test_channels_of_tiff_pages_and_arrays_keep_their_order(tmp_path: Path, num: int) -> None:
    values = np.random.default_rng(0).integers(0, 4096, (num, 8, 8)).astype(np.uint16)
    tifffile.imwrite(tmp_path / "0.tif", values, photometric="minisblack")
    tifffile.imwrite(tmp_path / "1.tif", values, photometric="minisblack", metadata={"axes": "CYX"})
    tifffile.imwrite(tmp_path / "2.tif", np.moveaxis(values, 0, -1), photometric="minisblack", planarconfig="contig")
    np.save(tmp_path / "3.npy", values)
    np.save(tmp_path / "4.npy", np.moveaxis(values, 0, -1))
    found = _load(tmp_path, num)
    assert found.shape == (5, num, 8, 8)
    assert np.abs(found.astype(int) - _expected(values)).max() <= 1
    with pytest.raises(DataError, match=r"cannot decode .*5 of 5 images"):
        _load(tmp_path, 7)


def test_three_grey_pages_are_not_taken_for_rgb(tmp_path: Path) -> None:
    pages = np.random.default_rng(0).integers(0, 4096, (3, 8, 8)).astype(np.uint16)
    tifffile.imwrite(tmp_path / "1.tif", pages, photometric="minisblack")
    with pytest.raises(DataError, match=r"1\.tif: it has 3 grey pages, which are not taken for .* RGB; save it as RGB"):
        _load(tmp_path, 3)
    with pytest.raises(DataError, match=r"1\.tif: it has 3 pages, and the run needs 1 channel \(data\.channels\)"):
        _load(tmp_path, 1)
    with pytest.raises(DataError, match=r"1\.tif: it has 3 pages, and only the first would be read"):
        _load(tmp_path, 3, None)
    with pytest.raises(DataError, match=r"1\.tif: it has 3 pages; save each page as a file"):
        file_shape(str(tmp_path), "train")
    tifffile.imwrite(tmp_path / "1.tif", pages, photometric="minisblack", metadata={"axes": "CYX"})
    assert np.abs(_load(tmp_path, 3)[0].astype(int) - _expected(pages)).max() <= 1  # the file declares them as channels


@pytest.mark.parametrize("window", [None, WindowConfig(stored=True, bits=8)])
@pytest.mark.parametrize("name", ["1.png", "1.webp"])
def test_an_animation_is_refused_because_only_its_first_frame_would_be_read(
    tmp_path: Path, name: str, window: WindowConfig | None
) -> None:
    frames = [Image.new("RGB", (8, 8), (10 * number, 0, 0)) for number in range(3)]
    frames[0].save(tmp_path / name, save_all=True, append_images=frames[1:])
    with pytest.raises(DataError, match=rf"{name}: it has 3 frames, and only the first would be read"):
        _load(tmp_path, 3, window)


def test_images_of_8_bits_are_refused_if_the_window_has_other_values(tmp_path: Path) -> None:
    Image.new("L", (8, 8), 200).save(tmp_path / "1.png")
    with pytest.raises(DataError, match=r"1\.png: the window of the spec is from 0 to 4,095, but values of 8 bits are"):
        _load(tmp_path)
    with pytest.raises(DataError, match=r"1\.png: the window of the spec is from -160 to 239, but"):
        _load(tmp_path, window=WindowConfig(center=40, width=400))
    for window in (WindowConfig(values=(0, 200)), WindowConfig(center=128, width=256), WindowConfig(stored=True)):
        assert _load(tmp_path, window=window).max() > 25_000


def test_a_dark_bitmap_with_16_bits_for_three_colours_has_8_bits_per_value(tmp_path: Path) -> None:
    levels = np.arange(64, dtype=np.uint16) % 4  # of 32
    header = struct.pack("<IiiHHIIiiII3I", 40, 8, 8, 1, 16, 3, 128, 0, 0, 0, 0, 0xF800, 0x07E0, 0x001F)
    content = header + (levels << 11 | levels << 6 | levels).astype("<u2").tobytes()
    (tmp_path / "1.bmp").write_bytes(struct.pack("<2sIHHI", b"BM", 14 + len(content), 0, 0, 14 + len(header)) + content)
    found = _load(tmp_path, 3, None)
    assert 20 < found.max() < 30
    assert np.array_equal(found, _load(tmp_path, 3, WindowConfig(values=(0, 255), bits=8)))


def test_a_colour_png_of_16_bits_is_refused_with_the_formats_that_keep_its_values(tmp_path: Path) -> None:
    (tmp_path / "1.png").write_bytes(_rgb_png_of_16_bits())
    with pytest.raises(DataError, match=r"1\.png: its colours have 16 bits, and only 8 would be read; save it as TIFF"):
        _load(tmp_path, 3)
    assert _load(tmp_path, 3, None).max() == 0xAB  # without a window the upper 8 bits are read


def _rgb_png_of_16_bits() -> bytes:
    """Return a PNG file of 2 x 2 pixels. PIL cannot write such files."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    header = (2).to_bytes(4, "big") * 2 + bytes([16, 2, 0, 0, 0])
    rows = (b"\0" + b"\xab\xcd" * 6) * 2
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def test_an_inverted_tiff_is_inverted_back(tmp_path: Path) -> None:
    tifffile.imwrite(tmp_path / "1.tif", 65_535 - _RAMP, photometric="miniswhite")
    Image.fromarray(65_535 - _RAMP).save(tmp_path / "2.tif", tiffinfo={262: 0})
    found = _load(tmp_path)
    assert np.abs(found[:, 0].astype(int) - _expected(_RAMP)).max() <= 1


@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_orientation_is_applied_as_by_pil(tmp_path: Path, orientation: int) -> None:
    values = _RAMP.copy()
    Image.fromarray(values).save(tmp_path / "pil.tif", tiffinfo={274: orientation})
    tifffile.imwrite(
        tmp_path / "two.tif", np.stack([values, values]), photometric="minisblack",
        extratags=[(274, "H", 1, orientation, True)],
    )  # fmt: skip
    by_pil = read_raster(tmp_path / "pil.tif", "pil.tif", 1).values[:, :, 0]
    by_tifffile = read_raster(tmp_path / "two.tif", "two.tif", 2).values[:, :, 0]
    assert np.array_equal(by_pil, by_tifffile)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_images_that_are_not_square_are_rotated(tmp_path: Path, orientation: int, dtype: type) -> None:
    """PIL scrambles images that it maps into memory and rotates by a right angle."""
    values = np.arange(96, dtype=dtype).reshape(8, 12)
    Image.fromarray(values).save(tmp_path / "1.tif", tiffinfo={274: orientation})
    Image.fromarray(values).save(tmp_path / "2.tif", tiffinfo={274: orientation}, compression="tiff_lzw")
    files = list_folder(tmp_path, "train")
    uncompressed, compressed = (read_raster(tmp_path / name, name, 1).values for name in files.names)
    assert compressed.shape == ((12, 8, 1) if orientation > 4 else (8, 12, 1))
    assert np.array_equal(uncompressed, compressed)
    if dtype is np.uint8:
        one, two = (decode_file(files, name, 1, 8)[0] for name in files.names)
        assert np.array_equal(one, two)


def test_colours_of_16_bits_in_planes_equal_those_in_pixels(tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 65_536, (8, 8, 3), np.uint16)
    tifffile.imwrite(tmp_path / "1.tif", values, photometric="rgb")
    tifffile.imwrite(tmp_path / "2.tif", np.moveaxis(values, -1, 0), photometric="rgb", planarconfig="separate")
    found = _load(tmp_path, 3, WindowConfig(stored=True))
    assert np.abs(found[0].astype(int) - np.rint(np.moveaxis(values, -1, 0) / 65_535 * 32_767)).max() <= 1
    assert np.array_equal(found[0], found[1])
    files = list_folder(tmp_path, "train")
    assert examine(files, "2.tif").needs_window
    assert thumbnail(files, "2.tif", 8).size == (8, 8)
    with pytest.raises(
        DataError, match=r"2\.tif: its colours of 16 bits are stored one after the other: .*data\.window"
    ):
        _load(tmp_path, 3, None)


@pytest.mark.parametrize("window", [None, _TWELVE])
def test_a_stack_whose_further_pages_are_not_listed_is_refused(tmp_path: Path, window: WindowConfig | None) -> None:
    values = np.stack([_RAMP, _RAMP.T])
    tifffile.imwrite(tmp_path / "1.tif", values, imagej=True, truncate=True)  # ImageJ writes files of more than 4 GB so
    assert Image.open(tmp_path / "1.tif").n_frames == 1
    with pytest.raises(DataError, match=r"1\.tif: it has 2 (pages|channels)"):
        _load(tmp_path, 1, window)
    assert np.abs(_load(tmp_path, 2)[0].astype(int) - _expected(values)).max() <= 1


def test_one_of_several_files_of_an_image_is_refused(tmp_path: Path) -> None:
    """tifffile would return the whole image for each of its files."""
    files = "".join(
        f'<TiffData FirstC="{part}" IFD="0"><UUID FileName="{part}.tif">urn:uuid:{part}</UUID></TiffData>'
        for part in range(2)
    )
    for part in range(2):
        about = (
            f'<OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06" UUID="urn:uuid:{part}">'
            '<Image ID="Image:0"><Pixels ID="Pixels:0" DimensionOrder="XYCZT" Type="float" SizeX="8" SizeY="8" '
            f'SizeC="2" SizeZ="1" SizeT="1"><Channel ID="C:0"/><Channel ID="C:1"/>{files}</Pixels></Image></OME>'
        )
        options: Any = {"description": about, "metadata": None, "photometric": "minisblack"}
        tifffile.imwrite(tmp_path / f"{part}.tif", _RAMP.astype(np.float32) + part, **options)
    with pytest.raises(DataError, match=r"0\.tif: it is one of several files that hold one image .*1\.tif: it is one"):
        _load(tmp_path, 2)
    (tmp_path / "1.tif").unlink()
    with pytest.raises(DataError, match=r"0\.tif: it is one of several files that hold one image"):
        _load(tmp_path, 2)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_all_channels_of_compressed_planes_are_read(tmp_path: Path, dtype: type) -> None:
    """PIL reads only the first channel, as a grey image."""
    values = np.random.default_rng(0).integers(0, 256, (5, 8, 8)).astype(dtype)
    options: Any = {"photometric": "minisblack", "planarconfig": "separate", "compression": "zlib"}
    tifffile.imwrite(tmp_path / "1.tif", values, **options)
    window = WindowConfig(values=(0, 255))
    assert file_shape(str(tmp_path), "train") == (5, 8)
    assert np.array_equal(_load(tmp_path, 5, window)[0], np.rint(values / 255 * 32_767))
    assert examine(list_folder(tmp_path, "train"), "1.tif").mode == f"{np.dtype(dtype)} with 5 channels"
    for chosen, reason in ((window, "the run needs 1"), (None, "only the first would be read: ask for 5 channels")):
        with pytest.raises(DataError, match=rf"1\.tif: it has 5 channels, and {reason}"):
            _load(tmp_path, 1, chosen)


@pytest.mark.parametrize("kind", ["bmp", "npy", "tif"])
def test_decompression_bombs_are_refused_before_they_are_decoded(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    side = 32_000
    if kind == "npy":
        header = io.BytesIO()
        np.lib.format.write_array_header_1_0(header, {"descr": "<u2", "fortran_order": False, "shape": (side, side)})
        with (tmp_path / "1.npy").open("wb") as file:
            file.write(header.getvalue())
            file.truncate(len(header.getvalue()) + 2 * side * side)  # sparse
    elif kind == "tif":
        tifffile.imwrite(tmp_path / "1.tif", shape=(6, side, 8000), dtype="uint16", photometric="minisblack")
        monkeypatch.setattr(tifffile.TiffPageSeries, "asarray", lambda *_, **__: pytest.fail("decoded"))
    else:
        Image.new("L", (16, 16)).save(tmp_path / "1.bmp")
        content = bytearray((tmp_path / "1.bmp").read_bytes())
        content[18:26] = np.array([13_300, 13_400], "<u4").tobytes()
        (tmp_path / "1.bmp").write_bytes(content)
        monkeypatch.setattr("fedssl.data.rasters.MAX_BYTES", 1 << 20)
    assert MAX_BYTES == 1 << 29
    with pytest.raises(DataError, match=r"GB; at most|it has more than 178,956,970 pixels"):
        _load(tmp_path, 6 if kind == "tif" else 1)


@pytest.mark.parametrize(
    ("content", "name"), [(b"", "1.npy"), (b"\x93NUMPY", "1.npy"), (b"II*\0", "1.tif"), (b"", "1.tif"), (b"x", "1.png")]
)
def test_damaged_files_are_named(tmp_path: Path, content: bytes, name: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=rf"cannot decode .*{name}"):
        _load(tmp_path)


def test_objects_in_arrays_are_never_unpickled(tmp_path: Path) -> None:
    np.save(tmp_path / "1.npy", np.array([{"a": 1}], object), allow_pickle=True)
    with pytest.raises(DataError, match=r"cannot decode .*1\.npy"):
        _load(tmp_path)


def test_deep_images_without_a_window_name_the_setting(tmp_path: Path) -> None:
    np.save(tmp_path / "1.npy", _RAMP)
    with pytest.raises(DataError, match=r"uint16: choose which values become black and white with \[data\.window\]"):
        load_dataset(str(tmp_path), "train")


def test_thumbnails_need_no_window(tmp_path: Path) -> None:
    tifffile.imwrite(tmp_path / "1.tif", _RAMP.astype(np.float32))
    files = list_folder(tmp_path, "train")
    assert np.asarray(thumbnail(files, "1.tif", 8)).max() == 255
    found = examine(files, "1.tif")
    assert (found.size, found.mode, found.num_bits, found.highest) == ((8, 8), "float32 with 1 channel", 32, 4095)


def test_arrays_of_16_bits_are_windowed_only_once(tmp_path: Path) -> None:
    np.savez(tmp_path / "raw.npz", images=_RAMP[np.newaxis])
    found = _load(tmp_path / "raw.npz")
    assert np.array_equal(found[0, 0], _expected(_RAMP))
    assert found.dtype == np.int16
    save_npz(tmp_path / "prepared.npz", ImageData(found), window=_TWELVE)  # type: ignore[arg-type]
    assert np.array_equal(_load(tmp_path / "prepared.npz"), found)
    with pytest.raises(DataError, match=r"prepared with data\.window = .*4095.*, but the run's is not set"):
        _load(tmp_path / "prepared.npz", window=None)
    with pytest.raises(DataError, match="saved with the window"):
        save_npz(tmp_path / "none.npz", ImageData(found))  # type: ignore[arg-type]


def test_a_decompression_bomb_in_a_strip_is_refused_before_it_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The strip unpacks to more than its image. tifffile would unpack all of it, and discard the rest."""
    strips = np.random.default_rng(0).normal(size=(2, 64, 64)).astype(np.float32)
    tifffile.imwrite(tmp_path / "1.tif", strips, photometric="minisblack", compression="zlib")
    monkeypatch.setattr("fedssl.data.rasters.MAX_BYTES", 1 << 18)
    assert len(_load(tmp_path, 2)) == 1  # each strip may unpack to more than the limit, and does not
    with tifffile.TiffFile(tmp_path / "1.tif") as file:
        [offset, *_], [count, *_] = file.pages.first.dataoffsets, file.pages.first.databytecounts
        tag = file.pages.first.tags[279].valueoffset
    bomb = zlib.compress(bytes(1 << 20), 9)
    content = bytearray((tmp_path / "1.tif").read_bytes())
    assert len(bomb) < count
    content[tag : tag + 4] = len(bomb).to_bytes(4, "little")
    content[offset : offset + len(bomb)] = bomb
    (tmp_path / "1.tif").write_bytes(content)
    with pytest.raises(DataError, match=r"1\.tif: a strip or tile unpacks to more than the whole image"):
        _load(tmp_path, 2)


@pytest.mark.parametrize("share", [0.3, 0.6, 0.98])
@pytest.mark.parametrize("options", [{}, {"rowsperstrip": 4}, {"tile": (16, 16)}, {"compression": "zlib"}])
def test_a_truncated_tiff_is_an_error(tmp_path: Path, options: dict[str, Any], share: float) -> None:
    values = np.random.default_rng(0).normal(size=(32, 32)).astype(np.float32)
    tifffile.imwrite(tmp_path / "1.tif", values, **options)
    content = (tmp_path / "1.tif").read_bytes()
    (tmp_path / "1.tif").write_bytes(content[: int(len(content) * share)])
    with pytest.raises(DataError, match=r"cannot decode .*1\.tif"):
        _load(tmp_path)


def test_compression_that_needs_another_package_is_named(tmp_path: Path) -> None:
    Image.fromarray(np.zeros((8, 8), np.float32)).save(tmp_path / "1.tif", compression="tiff_lzw")
    with pytest.raises(DataError, match=r"1\.tif: its values are compressed by LZW, .* save it uncompressed"):
        _load(tmp_path)


def test_the_content_takes_precedence_over_a_wrong_suffix(tmp_path: Path) -> None:
    Image.fromarray(_RAMP).save(tmp_path / "a.png")
    (tmp_path / "a.png").rename(tmp_path / "a.tif")
    tifffile.imwrite(tmp_path / "b.tif", _RAMP)
    (tmp_path / "b.tif").rename(tmp_path / "b.jpg")
    found = _load(tmp_path)
    assert np.array_equal(found[0], found[1])
    (tmp_path / "a.tif").rename(tmp_path / "c.npy")
    with pytest.raises(DataError, match=r"c\.npy: its content is not an array of NumPy"):
        _load(tmp_path)


@pytest.mark.parametrize("window", [None, WindowConfig(stored=True)])
def test_files_with_a_different_number_of_channels_are_named(tmp_path: Path, window: WindowConfig | None) -> None:
    np.save(tmp_path / "1.npy", np.zeros((8, 8, 4), np.uint8))
    np.save(tmp_path / "2.npy", np.zeros((8, 8, 2), np.uint8))
    with pytest.raises(DataError, match=r"2\.npy: it has 2 channels, and the run needs 4 \(data\.channels\)"):
        _load(tmp_path, 4, window)


def test_the_labels_and_the_number_of_deep_arrays_are_read_without_a_window(tmp_path: Path) -> None:
    path = tmp_path / "deep.npz"
    np.savez(path, images=np.zeros((3, 8, 8), np.float32), labels=np.arange(3))
    assert load_labels(str(path), "train")[0] is not None
    assert count_images(str(path), "train") == 3


def test_the_samples_of_a_page_are_channels_even_if_not_declared_as_such(tmp_path: Path) -> None:
    tifffile.imwrite(tmp_path / "1.tif", np.zeros((8, 9, 5), np.uint8), photometric="minisblack", planarconfig="contig")
    assert file_shape(str(tmp_path), "train") == (5, 8)
    assert load_dataset(str(tmp_path), "train").images.shape == (1, 5, 8, 8)
    assert examine(list_folder(tmp_path, "train"), "1.tif").mode == "uint8 with 5 channels"
