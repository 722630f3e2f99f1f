"""SVHN, read from MAT-files written by SciPy, and the errors for damaged files."""

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import scipy.io

from fedssl.data import load_dataset, load_labels
from fedssl.errors import DataError

RNG = np.random.default_rng(0)


def _write(path: Path, labels: list[float], *, compress: bool = True, **more: object) -> np.ndarray:
    pixels = RNG.integers(0, 256, (32, 32, 3, len(labels))).astype(np.uint8)
    arrays = {"X": pixels, "y": np.array(labels, np.uint8)[:, np.newaxis]} | more
    path.parent.mkdir(parents=True, exist_ok=True)
    scipy.io.savemat(path, arrays, do_compression=compress)
    return pixels


@pytest.mark.parametrize("compress", [True, False])
@pytest.mark.parametrize("below", ["", "svhn"])
def test_both_splits_are_read(tmp_path: Path, below: str, compress: bool) -> None:  # noqa: FBT001
    train = _write(tmp_path / below / "train_32x32.mat", [1, 10, 9, 4, 5], compress=compress)
    test = _write(tmp_path / below / "test_32x32.mat", [2], compress=compress)
    data = load_dataset("svhn", "train", tmp_path)
    assert data.images.shape == (5, 3, 32, 32)
    assert np.array_equal(data.images, train.transpose(3, 2, 0, 1)), "rows stay rows"
    assert data.labels is not None
    assert data.labels.tolist() == [1, 0, 9, 4, 5], "10 stands for the digit 0"
    assert data.class_names == tuple("0123456789")
    assert np.array_equal(load_dataset("svhn", "test", tmp_path).images[0], test[..., 0].transpose(2, 0, 1))
    labels, _ = load_labels("svhn", "test", tmp_path)
    assert labels is not None
    assert labels.tolist() == [2]


def test_labels_may_have_any_number_type_and_other_variables_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "train_32x32.mat"
    _write(path, [1, 2], y=np.array([[3.0], [10.0]]), note="made by hand", meta={"a": 1}, z=np.array([1 + 2j]))
    labels = load_dataset("svhn", "train", tmp_path).labels
    assert labels is not None
    assert labels.tolist() == [3, 0]


def test_scipy_reads_the_same_images(tmp_path: Path) -> None:
    path = tmp_path / "train_32x32.mat"
    _write(path, [7, 10, 1])
    theirs, ours = scipy.io.loadmat(path), load_dataset("svhn", "train", tmp_path)
    assert np.array_equal(theirs["X"].transpose(3, 2, 0, 1), ours.images)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"y": np.array([[0]], np.uint8)}, "1 to 10"),
        ({"y": np.array([[11]], np.uint8)}, "1 to 10"),
        ({"y": np.array([[1.5]])}, "1 to 10"),
        ({"y": np.array([[np.nan]])}, "1 to 10"),
        ({"y": np.array([[1], [2]], np.uint8)}, "2 labels"),
        ({"y": "text"}, "0 labels"),
        ({"X": np.zeros((28, 28, 3, 1), np.uint8)}, "no array X"),
        ({"X": np.zeros((32, 32, 3, 1))}, "no array X"),
        ({"X": np.zeros((32, 32, 3), np.uint8)}, "no array X"),
    ],
)
def test_wrong_contents_are_refused(tmp_path: Path, changes: dict[str, object], words: str) -> None:
    _write(tmp_path / "train_32x32.mat", [1], **changes)
    with pytest.raises(DataError, match=words):
        load_dataset("svhn", "train", tmp_path)


@pytest.mark.parametrize("compress", [True, False])
def test_files_truncated_at_any_position_are_refused(tmp_path: Path, compress: bool) -> None:  # noqa: FBT001
    path = tmp_path / "train_32x32.mat"
    _write(path, [1, 2], compress=compress)
    whole = path.read_bytes()
    for length in (0, 60, 127, 128, 130, 136, 150, 1000, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(DataError, match="train_32x32"):
            load_dataset("svhn", "train", tmp_path)


def test_a_changed_byte_in_the_tags_never_crashes_the_reader(tmp_path: Path) -> None:
    """Readers of this format have crashed on smaller errors."""
    path = tmp_path / "train_32x32.mat"
    _write(path, [1, 2], compress=False)
    whole = path.read_bytes()
    for at in range(124, 200):
        for value in (0, 1, 15, 255):
            path.write_bytes(whole[:at] + bytes([value]) + whole[at + 1 :])
            try:
                data = load_dataset("svhn", "train", tmp_path)
            except DataError:
                continue
            assert data.images.shape == (2, 3, 32, 32)


def test_an_element_that_inflates_endlessly_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedssl.data.svhn._MAX_BYTES", 1 << 20)
    path = tmp_path / "train_32x32.mat"
    _write(path, [1])
    header = path.read_bytes()[:128]
    bomb = zlib.compress(struct.pack("<II", 14, 64) + bytes(64 << 20))
    path.write_bytes(header + struct.pack("<II", 15, len(bomb)) + bomb)
    with pytest.raises(DataError, match="larger than SVHN"):
        load_dataset("svhn", "train", tmp_path)


def test_missing_files_are_reported_with_where_to_get_and_put_them(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"fedssl data fetch svhn.*train_32x32\.mat.*FEDSSL_DATA"):
        load_dataset("svhn", "train", tmp_path)
