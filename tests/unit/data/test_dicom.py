"""DICOM: values, windows, inversion, frames and patients, and files that cannot be read or declare wrong sizes."""

import logging
import os
import zlib
from pathlib import Path
from typing import Any

import gdcm
import numpy as np
import pytest
from numpy.typing import NDArray
from pydicom import dcmread
from pydicom.uid import ImplicitVRLittleEndian, RLELossless

from fedssl.classification.labelled import label_images
from fedssl.data import dicom, format_packages, load_conformed, load_dataset
from fedssl.data.contents import read_contents
from fedssl.data.decode_file import examine, thumbnail
from fedssl.data.folders import list_folder
from fedssl.data.formats import read_npz, save_npz
from fedssl.data.image_cache import load_cached
from fedssl.data.label_files import load_site_labels
from fedssl.data.rasters import MAX_BYTES
from fedssl.data.site_labels import own_labels, split_labels
from fedssl.data.windowing import window
from fedssl.embeddings.sources import open_source
from fedssl.errors import DataError
from fedssl.protocol.data import DataConfig, WindowConfig
from support.dicom_files import dataset, item, write_compressed, write_dicom

_TWELVE = np.arange(64, dtype=np.uint16).reshape(8, 8) * 65  # 0..4,095
_HOUNSFIELD = _TWELVE.astype(np.int32) - 1024
_SOFT_TISSUE = {"WindowCenter": 40, "WindowWidth": 400}


def _load(folder: Path, channels: int = 1, **chosen: Any) -> NDArray[np.generic]:
    through = WindowConfig(**chosen) if chosen else None
    return load_conformed(str(folder), "train", DataConfig(channels=channels, image_size=8, window=through)).images


def _of_16_bits(unit: NDArray[np.floating[Any]]) -> NDArray[np.int64]:
    return np.rint(np.clip(unit, 0, 1) * 32_767).astype(np.int64)


def _is(found: NDArray[np.generic], unit: NDArray[np.floating[Any]]) -> bool:
    """Return whether pixels of 16 bits have these values, up to one rounding."""
    return bool(np.abs(found.astype(np.int64) - _of_16_bits(unit)).max() <= 1)


def test_rescaled_values_are_mapped_through_the_windows_of_the_spec(tmp_path: Path) -> None:
    write_dicom(tmp_path / "1.dcm", _TWELVE, bits=12, RescaleSlope=1, RescaleIntercept=-1024)
    signed = (_TWELVE.astype(np.int32) - 2048).astype(np.int16)
    write_dicom(tmp_path / "2.DCM", signed, bits=12, RescaleSlope="1", RescaleIntercept=1024)
    write_dicom(tmp_path / "IM0003", (_TWELVE // 2), bits=12, RescaleSlope=2, RescaleIntercept="-1024.0")
    halves = _HOUNSFIELD // 2 * 2
    for chosen, expected in (
        ({"values": (-1000, 1000)}, lambda x: (x + 1000) / 2000),
        ({"center": 40, "width": 400}, lambda x: window(x, 40, 400)),
        ({"percentiles": (0, 100)}, lambda x: (x - x.min()) / (x.max() - x.min())),
    ):
        found = _load(tmp_path, **chosen)
        assert found.dtype == np.int16
        for image, values in zip(found[:, 0], (_HOUNSFIELD, _HOUNSFIELD, halves), strict=True):
            assert _is(image, expected(values.astype(float))), chosen
    found = _load(tmp_path, stored=True)
    assert _is(found[0, 0], _TWELVE / 4095)
    assert _is(found[1, 0], _TWELVE / 4095)
    assert _is(found[2, 0], (_TWELVE // 2) / 4095)


@pytest.mark.parametrize("function", ["LINEAR_EXACT", "SIGMOID"])
def test_a_window_of_width_zero_is_refused(tmp_path: Path, function: str) -> None:
    write_dicom(tmp_path / "1.dcm", _TWELVE, bits=12, WindowCenter=40, WindowWidth=0, VOILUTFunction=function)
    with pytest.raises(DataError, match="its window has the width 0, which must be above 0"):
        _load(tmp_path, voi=True)


def test_the_windows_of_the_file_itself_are_used(tmp_path: Path) -> None:
    rescaled = {"bits": 12, "RescaleSlope": 1, "RescaleIntercept": -1024}
    write_dicom(tmp_path / "1.dcm", _TWELVE, **rescaled, WindowCenter=[40, 500], WindowWidth=[400, 2000])
    write_dicom(tmp_path / "2.dcm", _TWELVE, **rescaled, **_SOFT_TISSUE, VOILUTFunction="LINEAR_EXACT")
    write_dicom(tmp_path / "3.dcm", _TWELVE, **rescaled, **_SOFT_TISSUE, VOILUTFunction="SIGMOID")
    table = np.linspace(4095, 0, 4096).astype(np.uint16)  # a LUT takes precedence over a window, and may be decreasing
    lut = item(LUTDescriptor=[4096, 0, 12], LUTData=table.tobytes())
    write_dicom(tmp_path / "4.dcm", _TWELVE, bits=12, **_SOFT_TISSUE, VOILUTSequence=lut)
    found = _load(tmp_path, voi=True)[:, 0]
    values = _HOUNSFIELD.astype(float)
    assert _is(found[0], window(values, 40, 400))
    assert _is(found[1], (values - 40) / 400 + 0.5)
    assert _is(found[2], 1 / (1 + np.exp(-4 * (values - 40) / 400)))
    assert _is(found[3], table[_TWELVE] / 4095)
    lut[0].add_new("LUTDescriptor", "SS", [4096, -1024, 12])
    implicit = dataset(_TWELVE, **rescaled, VOILUTSequence=lut)  # without types, the sign of -1,024 is not declared
    implicit.file_meta.TransferSyntaxUID = ImplicitVRLittleEndian
    implicit.save_as(tmp_path / "4.dcm", enforce_file_format=True)
    assert _is(_load(tmp_path, voi=True)[3], table[_TWELVE] / 4095)
    write_dicom(tmp_path / "5.dcm", _TWELVE, bits=12)
    with pytest.raises(DataError, match=r"5\.dcm: it has no VOI LUT or window of its own, which data\.window\.voi"):
        _load(tmp_path, voi=True)
    with pytest.raises(DataError, match=r"choose which values become black and white with \[data\.window\]"):
        _load(tmp_path)
    assert np.asarray(thumbnail(list_folder(tmp_path, "train"), "1.dcm", 8)).max() == 255


def test_monochrome1_is_inverted_after_the_window(tmp_path: Path) -> None:
    inverted = {"bits": 12, "PhotometricInterpretation": "MONOCHROME1", **_SOFT_TISSUE}
    write_dicom(tmp_path / "1.dcm", _TWELVE, **inverted)
    assert _is(_load(tmp_path, values=(0, 4095))[0, 0], 1 - _TWELVE / 4095)
    assert _is(_load(tmp_path, voi=True)[0, 0], 1 - window(_TWELVE, 40, 400))
    pixels = np.arange(64, dtype=np.uint8).reshape(8, 8) * 4
    write_dicom(tmp_path / "1.dcm", pixels, PhotometricInterpretation="MONOCHROME1")
    assert np.array_equal(_load(tmp_path)[0, 0], 255 - pixels)


def test_8_bits_and_colours_need_no_window(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    grey, colours = rng.integers(0, 256, (8, 8), np.uint8), rng.integers(0, 256, (8, 8, 3), np.uint8)
    write_dicom(tmp_path / "1.dcm", grey)
    write_dicom(tmp_path / "2.dcm", colours)
    found = _load(tmp_path, 3)
    assert found.dtype == np.uint8
    assert np.array_equal(found[0], np.stack([grey] * 3))
    assert np.array_equal(found[1], colours.transpose(2, 0, 1))
    write_dicom(tmp_path / "3.dcm", grey >> 4, bits=4)  # relative to 255 they would be almost black
    with pytest.raises(DataError, match=r"3\.dcm: .*\[data\.window\]"):
        _load(tmp_path, 3)
    assert _is(_load(tmp_path, stored=True)[2, 0], (grey >> 4) / 15)


def test_bits_above_the_values_are_ignored_and_values_in_other_bits_are_refused(tmp_path: Path) -> None:
    """Old files have an overlay in the highest four of 16 bits. Other files have their values there."""
    write_dicom(tmp_path / "1.dcm", _TWELVE | np.uint16(0xA000), bits=12)
    assert _is(_load(tmp_path, stored=True)[0, 0], _TWELVE / 4095)
    write_dicom(tmp_path / "1.dcm", _TWELVE << 4, bits=12, HighBit=15)
    with pytest.raises(DataError, match=r"1\.dcm: its values of 12 bits end at bit 15 \(HighBit\) in place of 11"):
        _load(tmp_path, stored=True)


def test_a_palette_is_converted_to_colours(tmp_path: Path) -> None:
    tables = np.random.default_rng(0).integers(0, 256, (3, 256), np.uint8)
    palette = {}
    for colour, table in zip(("Red", "Green", "Blue"), tables, strict=True):
        palette[f"{colour}PaletteColorLookupTableDescriptor"] = [256, 0, 8]
        palette[f"{colour}PaletteColorLookupTableData"] = table.tobytes()
    pixels = np.arange(64, dtype=np.uint8).reshape(8, 8)
    write_dicom(tmp_path / "1.dcm", pixels, PhotometricInterpretation="PALETTE COLOR", **palette)
    assert np.array_equal(_load(tmp_path, 3)[0], tables[:, pixels])
    for colour, table in zip(("Red", "Green", "Blue"), tables, strict=True):
        palette[f"{colour}PaletteColorLookupTableData"] = table.astype(np.uint16).tobytes()  # some devices write it so
    write_dicom(tmp_path / "1.dcm", pixels, PhotometricInterpretation="PALETTE COLOR", **palette)
    assert np.array_equal(_load(tmp_path, 3)[0], tables[:, pixels])


def test_colours_of_12_bits_declare_12_bits(tmp_path: Path) -> None:
    values = np.stack([_TWELVE, _TWELVE[::-1], _TWELVE.T], axis=-1)
    write_dicom(tmp_path / "1.dcm", values, bits=12)
    assert _is(_load(tmp_path, 3, stored=True)[0], values.transpose(2, 0, 1) / 4095)


def test_frames_are_images_with_their_own_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frames = np.stack([_TWELVE, _TWELVE[::-1], _TWELVE.T])
    shared = item(PixelValueTransformationSequence=item(RescaleSlope=2, RescaleIntercept=-100, RescaleType="US"))
    windows = [item(FrameVOILUTSequence=item(WindowCenter=center, WindowWidth=500)) for center in (100, 2000, 5000)]
    each = windows[0]
    each.extend([windows[1][0], windows[2][0]])
    write_dicom(
        tmp_path / "a" / "1.dcm", frames, frames=True, bits=12,
        SharedFunctionalGroupsSequence=shared, PerFrameFunctionalGroupsSequence=each,
    )  # fmt: skip
    write_dicom(tmp_path / "a" / "2.dcm", frames[:1], frames=True, bits=12)
    files = list_folder(tmp_path, "train")
    assert files.names == ("a/1.dcm#1", "a/1.dcm#2", "a/1.dcm#3", "a/2.dcm")
    found = _load(tmp_path, values=(-100, 8090))[:, 0]
    for image, values in zip(found[:3], frames, strict=True):
        assert _is(image, values / 4095)
    (tmp_path / "a" / "2.dcm").unlink()
    for image, values, center in zip(_load(tmp_path, voi=True)[:, 0], frames, (100, 2000, 5000), strict=True):
        assert _is(image, window(2.0 * values - 100, center, 500))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    chosen = WindowConfig(values=(-100, 8090))
    cached = load_cached(str(tmp_path), DataConfig(channels=1, image_size=8, cache_size=8, window=chosen))
    assert np.array_equal(cached.squares(np.arange(3)).images, _load(tmp_path, values=(-100, 8090)))
    assert len(set(cached.digests)) == 3


@pytest.mark.parametrize("kind", ["JPEG", "JPEG2000", "RLE"])
def test_compressed_frames_are_decoded(tmp_path: Path, kind: str) -> None:
    frames = [np.kron(each, np.ones((8, 8), np.uint8)) for each in (np.arange(64).reshape(8, 8) * 4).astype(np.uint8)[
        None
    ].repeat(2, 0) + np.array([[[0]], [[3]]], np.uint8)]  # fmt: skip
    if kind == "RLE":
        found = dataset(np.stack(frames), frames=True)
        found.compress(RLELossless, generate_instance_uid=False)
        found.save_as(tmp_path / "1.dcm", enforce_file_format=True)
    else:
        write_compressed(tmp_path / "1.dcm", frames, kind)
    config = DataConfig(channels=1, image_size=64)
    images = load_conformed(str(tmp_path), "train", config).images
    for image, frame in zip(images[:, 0], frames, strict=True):
        assert np.abs(image.astype(int) - frame).max() <= (3 if kind == "JPEG" else 0)


_WITHOUT_LOSS = ["JPEGLosslessProcess14_1", "JPEGLSLossless", "JPEG2000Lossless", "RLELossless"]


def _compress(path: Path, name: str) -> None:
    reader, change, writer = gdcm.ImageReader(), gdcm.ImageChangeTransferSyntax(), gdcm.ImageWriter()
    reader.SetFileName(str(path))
    assert reader.Read()
    change.SetTransferSyntax(gdcm.TransferSyntax(getattr(gdcm.TransferSyntax, name)))
    change.SetInput(reader.GetImage())
    assert change.Change()
    writer.SetFileName(str(path))
    writer.SetFile(reader.GetFile())
    writer.SetImage(change.GetOutput())
    assert writer.Write()


@pytest.mark.parametrize("name", _WITHOUT_LOSS)
def test_lossless_compression_of_12_bits_keeps_every_value(tmp_path: Path, name: str) -> None:
    """Archives of radiographs store such files. The test compresses them with gdcm."""
    values = np.arange(4096, dtype=np.uint16).reshape(64, 64)
    path = write_dicom(tmp_path / "1.dcm", values, bits=12, RescaleSlope=1, RescaleIntercept=-1024)
    _compress(path, name)
    found = dicom.read_frame(path, None)
    assert np.array_equal(found.values[:, :, 0], values.astype(int) - 1024)
    assert (found.declared, found.bits) == ((-1024, 3071), 12)


@pytest.mark.parametrize("name", _WITHOUT_LOSS)
def test_compressed_values_keep_their_sign_if_the_unused_bits_are_0(tmp_path: Path, name: str) -> None:
    """The values have 12 signed bits in 16, compressed as 16 bits: -1 is 4,095 before its sign is known."""
    values = np.arange(-2048, 2048, dtype=np.int16).reshape(64, 64)
    path = write_dicom(tmp_path / "1.dcm", values.view(np.uint16) & np.uint16(0xFFF))
    _compress(path, name)
    header = dcmread(path)
    header.BitsStored, header.HighBit, header.PixelRepresentation = 12, 11, 1
    header.save_as(path)
    found = dicom.read_frame(path, None)
    assert np.array_equal(found.values[:, :, 0], values)
    assert found.declared == (-2048, 2047)


def test_a_compressed_frame_larger_than_declared_is_not_decoded(tmp_path: Path) -> None:
    frame = np.zeros((64, 64), np.uint8)
    for number, kind in enumerate(("JPEG", "JPEG2000")):
        write_compressed(tmp_path / f"{number}.dcm", [frame, frame], kind, Rows=8, Columns=8)
    found = dataset(np.stack([frame, frame]), frames=True)
    found.compress(RLELossless, generate_instance_uid=False)
    found.Rows = found.Columns = 2
    found.save_as(tmp_path / "2.dcm", enforce_file_format=True)
    files = list_folder(tmp_path, "train")
    for name, why in (
        ("0.dcm#1", "its frame has 64 x 64 pixels of 1 samples, but its header declares 8 x 8 of 1"),
        ("1.dcm#2", "its frame has 64 x 64 pixels of 1 samples, but its header declares 8 x 8 of 1"),
        ("2.dcm#1", "its frame unpacks to more than the 4 bytes that it declares"),
    ):
        with pytest.raises(DataError, match=why):
            examine(files, name)


def test_sizes_are_limited_before_anything_is_decoded(tmp_path: Path) -> None:
    write_dicom(tmp_path / "1.dcm", _TWELVE, Rows=65_535, Columns=65_535)
    with pytest.raises(DataError, match=rf"65535 x 65535 pixels.* at most {MAX_BYTES / 1e9:.1f} GB"):
        examine(list_folder(tmp_path, "train"), "1.dcm")
    write_dicom(tmp_path / "1.dcm", np.zeros((8, 8, 3), np.uint8), Rows=14_000, Columns=14_000)
    with pytest.raises(DataError, match=r"14000 x 14000 pixels, which take 0\.6 GB"):  # with three bytes per pixel
        examine(list_folder(tmp_path, "train"), "1.dcm")
    write_dicom(tmp_path / "1.dcm", _TWELVE, NumberOfFrames=2_000_000_000)
    with pytest.raises(DataError, match=r"cannot decode .*1\.dcm: "):
        _load(tmp_path, stored=True)
    write_dicom(tmp_path / "1.dcm", _TWELVE, NumberOfFrames=1_000_000)
    os.truncate(tmp_path / "1.dcm", 1 << 24)
    assert list_folder(tmp_path, "train").names == ("1.dcm",), "frames above number 999,999 have no names"


def test_files_without_usable_pixels_are_counted_with_their_reasons(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(6):
        write_dicom(tmp_path / f"{number}.dcm", np.random.default_rng(number).integers(0, 256, (8, 8), np.uint8))
    write_dicom(tmp_path / "report.dcm", None)
    write_dicom(tmp_path / "IM1#2", _TWELVE)
    content = dcmread(tmp_path / "0.dcm")
    content.file_meta.TransferSyntaxUID = "1.2.3.4"
    content.save_as(tmp_path / "unknown.dcm", implicit_vr=False, little_endian=True)
    (tmp_path / "cut.dcm").write_bytes((tmp_path / "1.dcm").read_bytes()[:-20])
    (tmp_path / "empty.dcm").write_bytes(b"")
    (tmp_path / "text.dcm").write_text("not an image")
    data = DataConfig(channels=1, image_size=8, max_unreadable=0.5)
    with caplog.at_level(logging.INFO, "fedssl.data"):
        found = load_conformed(str(tmp_path), "train", data, leave_out=True)
    assert len(found) == 6
    text = caplog.text
    assert "left out 4 of 10 images, which cannot be read" in text
    assert "unknown.dcm: its transfer syntax, 1.2.3.4 (unknown), is not decoded here; save it with another one" in text
    assert "empty.dcm: its content is not DICOM" in text
    assert "text.dcm: its content is not DICOM: it lacks the letters DICM after 128 bytes" in text
    assert "cut.dcm: " in text
    left_out = {part.reason: part for part in read_contents(tmp_path).left_out}
    report = left_out["DICOM without pixels, such as a report or an index"]
    assert (report.num, report.may_be_images) == (1, False)
    assert left_out["a name that ends in # and a number means a frame: rename them"].names == ("IM1#2",)


def test_a_deflated_file_is_not_inflated(tmp_path: Path) -> None:
    found = dataset(np.zeros((8, 8), np.uint8))
    found.file_meta.TransferSyntaxUID = "1.2.840.10008.1.2.1.99"
    found.save_as(tmp_path / "1.dcm", enforce_file_format=True)
    content = (tmp_path / "1.dcm").read_bytes()
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    (tmp_path / "1.dcm").write_bytes(content + packer.compress(bytes(1 << 20)) + packer.flush())
    with pytest.raises(DataError, match="it is deflated as a whole, which is not read"):
        _load(tmp_path)


def test_without_the_extra_dicom_is_left_out_and_the_install_command_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_dicom(tmp_path / "1.dcm", _TWELVE)
    write_dicom(tmp_path / "IM1", _TWELVE)
    monkeypatch.setattr(format_packages, "is_installed", lambda package: False)
    with pytest.raises(DataError, match=r"holds no images .*1 \.dcm \(DICOM .* pip install 'fedssl\[dicom\]'"):
        load_dataset(str(tmp_path), "train")
    found = read_contents(tmp_path)
    assert [part.what for part in found.left_out] == [".dcm", "DICOM files without a suffix"]
    assert not found.is_complete


def test_the_images_of_a_patient_stay_in_one_split_and_the_identifier_is_not_stored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rng = np.random.default_rng(0)
    images = tmp_path / "images"
    for number in range(40):
        patient = {} if number % 10 == 9 else {"PatientID": f"Müller-{number % 10}", "PatientName": "Müller"}
        pixels = rng.integers(0, 256, (2, 8, 8), np.uint8)
        write_dicom(images / "ab"[number % 2] / f"{number:02}.dcm", pixels, frames=True, **patient)
    with caplog.at_level(logging.DEBUG):
        files = list_folder(images, "train")
        found = load_conformed(str(images), "train", DataConfig(channels=1, image_size=8))
    assert "ller" not in repr((files, found, read_contents(images))) + caplog.text
    labels = load_site_labels(str(images), "own")
    assert labels.groups is not None
    assert found.groups is not None
    assert np.array_equal(labels.groups, found.groups)
    groups: dict[int, set[int]] = {}
    for name, group in zip(files.names, labels.groups.tolist(), strict=True):
        groups.setdefault(group, set()).add(int(name[2:4]))
    assert sorted(map(sorted, groups.values())) == sorted(
        [[n for n in range(40) if n % 10 == digit] for digit in range(9)] + [[9], [19], [29], [39]]
    )
    split = split_labels(labels, 0.3, seed=0)
    assert not set(labels.groups[split.train]) & set(labels.groups[split.test])
    assert len(split.test)
    save_npz(tmp_path / "copy.npz", found)
    copy = read_npz(tmp_path / "copy.npz", "train")
    assert np.array_equal(split_labels(own_labels(copy, "copy"), 0.3, seed=0).test, split.test)
    csv = tmp_path / "labels.csv"
    csv.write_text("path,label\n" + "".join(f"{name},{name[0]}\n" for name in files.names))
    assert np.array_equal(load_site_labels(str(images), str(csv)).groups, labels.groups)
    csv.write_text(
        "path,label,split\n" + "".join(f"{n},x,{'test' if n[2:4] in '09 19' else 'train'}\n" for n in files.names)
    )
    fixed = load_site_labels(str(images), str(csv))
    assert {files.names[number][2:4] for number in split_labels(fixed, 0.3, seed=0).test} == {"09", "19"}
    source = open_source(str(images), None, None)
    assert np.array_equal(label_images(source, csv).labels.groups, labels.groups)
    csv.write_text(csv.read_text().replace("a/00.dcm#1,x,train", "a/00.dcm#1,x,test"))
    for read in (lambda: load_site_labels(str(images), str(csv)), lambda: label_images(source, csv)):
        with pytest.raises(DataError, match=r"'a/00\.dcm#2' is in train and 'a/00\.dcm#1' in test, but they belong to"):
            read()
