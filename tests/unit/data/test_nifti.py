"""NIfTI: the slices of a file are images, with their scaling, their order and their limits."""

import functools
import gzip
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
from numpy.typing import NDArray

from fedssl.data import format_packages, load_conformed, load_dataset, nifti
from fedssl.data.contents import read_contents
from fedssl.data.decode_file import examine, size_of
from fedssl.data.folders import list_folder
from fedssl.data.image_cache import load_cached
from fedssl.data.label_files import load_site_labels
from fedssl.errors import DataError
from fedssl.protocol.data import DataConfig, WindowConfig

_VOLUME = np.arange(8 * 8 * 3, dtype=np.int16).reshape(8, 8, 3) * 20


def _write(path: Path, values: NDArray[Any], slope: float | None = None, intercept: float = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.Nifti1Image(values, np.eye(4)).to_filename(path)
    if slope is not None:  # nibabel itself would choose a scaling that leaves the values unchanged
        content = bytearray(path.read_bytes())
        content[112:120] = np.array([slope, intercept], np.float32).tobytes()
        path.write_bytes(content)
    return path


def _load(folder: Path, low: float, high: float) -> NDArray[np.generic]:
    window = WindowConfig(values=(low, high))
    return load_conformed(str(folder), "train", DataConfig(channels=1, image_size=8, window=window)).images[:, 0]


def _expected(values: NDArray[Any], low: float, high: float) -> NDArray[np.int64]:
    return np.rint(np.clip((values - low) / (high - low), 0, 1) * 32_767).astype(np.int64)


def test_slices_are_images_in_order(tmp_path: Path) -> None:
    _write(tmp_path / "a" / "1.nii", _VOLUME)
    _write(tmp_path / "b" / "2.nii.gz", _VOLUME[:, :, :1])
    _write(tmp_path / "b" / "3.nii.gz", np.stack([_VOLUME, _VOLUME + 1], axis=3))
    files = list_folder(tmp_path, "train")
    series = [f"b/3.nii.gz#{number}" for number in range(1, 7)]
    assert files.names == ("a/1.nii#1", "a/1.nii#2", "a/1.nii#3", "b/2.nii.gz", *series)
    assert size_of(files, "a/1.nii#2") == (8, 8)
    found = _load(tmp_path, 0, 4000).astype(np.int64)
    planes = [_VOLUME[:, :, z] for z in (0, 1, 2, 0)]
    planes += [volume[:, :, z] for volume in (_VOLUME, _VOLUME + 1) for z in range(3)]
    for image, plane in zip(found, planes, strict=True):
        assert np.abs(image - _expected(plane.T, 0, 4000)).max() <= 1
    labels = load_site_labels(str(tmp_path), "own")
    assert labels.groups is not None
    assert labels.groups.tolist() == [0, 0, 0, 1, *[2] * 6]


def test_values_are_scaled_and_bytes_need_no_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path / "scaled" / "1.nii", _VOLUME, slope=0.5, intercept=-1024)
    found = _load(tmp_path / "scaled", -1024, 976).astype(np.int64)
    assert np.abs(found[1] - _expected(_VOLUME[:, :, 1].T * 0.5 - 1024, -1024, 976)).max() <= 1
    with pytest.raises(DataError, match=r"\[data\.window\]"):
        load_dataset(str(tmp_path / "scaled"), "train")
    grey = np.random.default_rng(0).integers(0, 256, (8, 8, 2), np.uint8)
    _write(tmp_path / "bytes" / "1.nii.gz", grey)
    plain = load_dataset(str(tmp_path / "bytes"), "train").images
    assert np.array_equal(plain[:, 0], grey.transpose(2, 1, 0))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cached = load_cached(str(tmp_path / "bytes"), DataConfig(channels=1, image_size=8, cache_size=8))
    assert np.array_equal(cached.squares(np.arange(2)).images, plain)


def test_files_that_cannot_be_read_are_reported_with_their_reasons(tmp_path: Path) -> None:
    content = _write(tmp_path / "right.nii", _VOLUME).read_bytes()
    bomb = bytearray(content[:352])
    bomb[40:50] = np.array([3, 30_000, 30_000, 30_000, 1], np.int16).tobytes()
    (tmp_path / "bomb.nii.gz").write_bytes(gzip.compress(bytes(bomb) + bytes(1 << 16)))
    bomb[40:50] = np.array([4, 1, 1, 2_000, 1_000], np.int16).tobytes()  # so many names would fill the memory
    (tmp_path / "many.nii").write_bytes(bytes(bomb))
    (tmp_path / "cut.nii").write_bytes(content[:-40])
    (tmp_path / "cut.nii.gz").write_bytes(gzip.compress(content)[:-40])
    (tmp_path / "empty.nii").write_bytes(b"")
    (tmp_path / "text.nii").write_text("not an image" * 100)
    _write(tmp_path / "complex.nii", _VOLUME.astype(np.complex64))
    files = list_folder(tmp_path, "train")
    assert {"bomb.nii.gz", "many.nii"} < set(files.names), "not a name per slice"
    for name, why in (
        ("bomb.nii.gz", "its values take 54,000.0 GB; at most 1.1 GB are read"),
        ("many.nii", "it has 2,000,000 slices; at most 999,999 are read"),
        ("cut.nii#1", ""),
        ("cut.nii.gz#3", ""),
        ("empty.nii", ""),
        ("text.nii", ""),
        ("complex.nii", "its values are complex64, and only whole and floating-point numbers are read"),
    ):
        with pytest.raises(DataError, match=rf"cannot decode .*{name.split('.')[0]}.*: .*{why}"):
            examine(files, name)
    assert examine(files, "right.nii#2").size == (8, 8)


def test_each_file_is_loaded_once_and_then_freed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that work on two files would load each file again for each slice."""
    monkeypatch.setattr("fedssl.data.decoding.num_usable_cores", lambda: 4)
    monkeypatch.setattr("fedssl.data.decoding._CHUNK_IMAGES", 2)
    large = np.zeros((128, 128, 6), np.uint8)
    for number in range(4):
        _write(tmp_path / f"{number}.nii", large + number)
    image = nifti._image
    loaded: list[str] = []

    def load(path: Path, stamp: str) -> Any:
        loaded.append(path.name)
        return nifti._Volumes(np.asarray(image(path).dataobj), 1, 0)

    monkeypatch.setattr(nifti, "_volumes", kept := functools.lru_cache(maxsize=1)(load))
    found = load_conformed(str(tmp_path), "train", DataConfig(channels=1, image_size=8))
    assert found.images[:, 0, 0, 0].tolist() == [number for number in range(4) for _ in range(6)]
    assert loaded == [f"{number}.nii" for number in range(4)]
    assert kept.cache_info().currsize == 0


def test_without_the_extra_nifti_is_left_out_and_the_install_command_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write(tmp_path / "1.nii.gz", _VOLUME)
    monkeypatch.setattr(format_packages, "is_installed", lambda package: False)
    [left_out] = read_contents(tmp_path).left_out
    assert (left_out.what, left_out.reason, left_out.may_be_images) == (
        ".nii.gz",
        format_packages.why_unread("NIfTI"),
        True,
    )
