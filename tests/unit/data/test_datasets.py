"""Data sets in every supported format, written by the tests themselves, and the errors for damaged ones."""

import gzip
import os
import pickle
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image
from sklearn.datasets import load_digits
from torch.nn import functional

from fedssl.data import (
    DATA_VARIABLE,
    DATASETS,
    KNOWN,
    ImageData,
    conform,
    find_dataset,
    find_fashion_mnist,
    load_conformed,
    load_dataset,
    load_labels,
    save_npz,
)
from fedssl.data.catalogue import Split
from fedssl.errors import DataError
from fedssl.protocol.data import DataConfig

RNG = np.random.default_rng(0)


class _Poison:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return RuntimeError, ("unpickled",)


def _idx(array: np.ndarray) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def _write_fashion_mnist(folder: Path, *, compress: bool = True) -> dict[str, np.ndarray]:
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {}
    for stem, num in (("train", 7), ("t10k", 3)):
        arrays[f"{stem}-images-idx3-ubyte"] = RNG.integers(0, 256, (num, 28, 28)).astype(np.uint8)
        arrays[f"{stem}-labels-idx1-ubyte"] = RNG.integers(0, 10, num).astype(np.uint8)
    for name, array in arrays.items():
        path = folder / (f"{name}.gz" if compress else name)
        path.write_bytes(gzip.compress(_idx(array)) if compress else _idx(array))
    return arrays


@pytest.mark.parametrize("compress", [True, False])
@pytest.mark.parametrize("below", ["", "fashion-mnist", "FashionMNIST/raw"])
def test_fashion_mnist_is_read(tmp_path: Path, below: str, compress: bool) -> None:  # noqa: FBT001
    arrays = _write_fashion_mnist(tmp_path / below, compress=compress)
    for split, stem in (("train", "train"), ("test", "t10k")):
        data = load_dataset("fashion-mnist", split, tmp_path)  # type: ignore[arg-type]
        assert np.array_equal(data.images[:, 0], arrays[f"{stem}-images-idx3-ubyte"])
        assert data.labels is not None
        assert data.labels.dtype == np.int64
        assert data.labels.tolist() == arrays[f"{stem}-labels-idx1-ubyte"].tolist()
        assert data.class_names[9] == "Ankle boot"
    assert find_fashion_mnist(tmp_path) == tmp_path / below


def test_the_root_is_searched_first_then_the_variable_the_fetched_files_and_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, variable, fetched = tmp_path / "root", tmp_path / "variable", tmp_path / "cache" / "fedssl"
    system = tmp_path / "system" / "fashion-mnist"
    for place in (root, variable, fetched / "fashion-mnist", system):
        assert find_fashion_mnist() != place
        _write_fashion_mnist(place)
    monkeypatch.setenv(DATA_VARIABLE, str(variable))
    assert find_fashion_mnist(root) == root
    assert find_fashion_mnist(tmp_path / "elsewhere") == variable
    monkeypatch.delenv(DATA_VARIABLE)
    assert find_fashion_mnist(tmp_path / "elsewhere") == fetched / "fashion-mnist"
    (fetched / "fashion-mnist" / "t10k-labels-idx1-ubyte.gz").unlink()
    assert find_fashion_mnist() == system


def test_missing_fashion_mnist_is_reported_with_how_to_get_it(tmp_path: Path) -> None:
    _write_fashion_mnist(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(DataError, match=DATA_VARIABLE):
        load_dataset("fashion-mnist", "train", tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not gzip at all",
        gzip.compress(b""),
        gzip.compress(b"\0\0\x0d\x01\0\0\0\x01\0\0\0\0"),  # floats
        gzip.compress(_idx(np.zeros((2, 28, 28), np.uint8))[:-1]),
        gzip.compress(_idx(np.zeros((2, 28, 28), np.uint8)))[:-9],
        gzip.compress(b"\0\0\x08\x03" + b"\xff" * 12),  # an absurd shape
        gzip.compress(b"\0\0\x08\xff" + b"\0" * 8),
        gzip.compress(_idx(np.zeros((8, 28, 28), np.uint8))),  # more images than labels
        gzip.compress(_idx(np.zeros((2, 28, 28), np.uint8)) + bytes(4 << 20)),  # more than the limit set below
    ],
    # explicit names: a gzip file contains the time, and two test processes must collect the same tests
    ids=(
        "empty",
        "plain",
        "nothing",
        "floats",
        "cut",
        "cut-gzip",
        "absurd-shape",
        "absurd-rank",
        "too-many",
        "too-long",
    ),
)
def test_damaged_idx_files_are_refused(tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedssl.data.formats._MAX_BYTES", 1 << 20)
    _write_fashion_mnist(tmp_path)
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(content)
    with pytest.raises(DataError, match="train-images-idx3-ubyte"):
        load_dataset("fashion-mnist", "train", tmp_path)


def test_labels_without_a_class_are_refused(tmp_path: Path) -> None:
    _write_fashion_mnist(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(_idx(np.array([0, 10, 1], np.uint8))))
    with pytest.raises(DataError, match="labels above 9"):
        load_dataset("fashion-mnist", "test", tmp_path)
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    (folder / "test_batch.bin").write_bytes(bytes([10]) + bytes(3072))
    with pytest.raises(DataError, match="not CIFAR-10"):
        load_dataset("cifar10", "test", tmp_path)


def test_cifar10_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    records = RNG.integers(0, 256, (12, 3073)).astype(np.uint8)
    records[:, 0] %= 10
    for i in range(5):
        (folder / f"data_batch_{i + 1}.bin").write_bytes(records[2 * i : 2 * i + 2].tobytes())
    (folder / "test_batch.bin").write_bytes(records[10:].tobytes())
    (folder / "batches.meta.txt").write_text("airplane\nautomobile\n\n")
    train, test = load_dataset("cifar10", "train", tmp_path), load_dataset("cifar10", "test", tmp_path)
    assert np.array_equal(train.images.reshape(10, -1), records[:10, 1:])
    assert train.images.shape == (10, 3, 32, 32)
    assert train.labels is not None
    assert train.labels.tolist() == records[:10, 0].tolist()
    assert len(test) == 2
    assert train.class_names == ("airplane", "automobile")
    (folder / "batches.meta.txt").write_bytes(b"\xff\xfe\n")
    assert len(load_dataset("cifar10", "train", tmp_path)) == 10, "names are only for people"
    (folder / "data_batch_5.bin").write_bytes(b"short")
    with pytest.raises(DataError, match="data_batch_5"):
        load_dataset("cifar10", "train", tmp_path)


def test_cifar100_uses_the_fine_label(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-100-binary"
    folder.mkdir()
    record = bytes([3, 77]) + bytes(range(256)) * 12
    for name in ("train.bin", "test.bin"):
        (folder / name).write_bytes(record)
    data = load_dataset("cifar100", "test", tmp_path)
    assert data.labels is not None
    assert data.labels.tolist() == [77]
    assert data.images[0, 0, 0, :5].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_the_pickled_version_is_never_opened(tmp_path: Path, name: str) -> None:
    """Its files are present, and are not opened."""
    poison = pickle.dumps(_Poison())
    for folder, files in (
        ("cifar-10-batches-py", [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch", "batches.meta"]),
        ("cifar-100-python", ["train", "test", "meta"]),
    ):
        (tmp_path / folder).mkdir()
        for file in files:
            (tmp_path / folder / file).write_bytes(poison)
    with pytest.raises(DataError, match="pickle"):
        load_dataset(name, "train", tmp_path)


def test_missing_cifar_reports_that_pickles_are_not_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="pickle"):
        load_dataset("cifar10", "train", tmp_path)


@pytest.mark.parametrize("split", ["train", "test"])
def test_digits_equal_those_that_scikit_learn_loads(split: Split) -> None:
    rows = slice(None, 1437) if split == "train" else slice(1437, None)
    bunch = load_digits()
    images = torch.from_numpy(np.asarray(bunch.images[rows], np.float32)).unsqueeze(1) * (255 / 16)
    enlarged = functional.interpolate(images, scale_factor=2, mode="bilinear", align_corners=False).round()
    found = load_dataset("digits", split)
    assert np.array_equal(found.images, enlarged.to(torch.uint8).numpy())
    assert found.labels is not None
    assert np.array_equal(found.labels, bunch.target[rows])


def test_digits_have_the_same_images_on_every_load() -> None:
    train, test = load_dataset("digits", "train"), load_dataset("digits", "test")
    assert train.images.shape == (1437, 1, 16, 16)
    assert test.images.shape == (360, 1, 16, 16)
    for data in (train, test):
        assert data.labels is not None
        assert np.bincount(data.labels).min() > 0.08 * len(data)
    assert train.images.max() == 255
    assert np.array_equal(train.images, load_dataset("digits", "train").images)


def _colour(value: int) -> tuple[int, int, int]:
    return value, 255 - value, 7


def test_an_image_folder_is_read(tmp_path: Path) -> None:
    for name, value in (("b/2.png", 40), ("b/10.png", 30), ("a/x.PNG", 10)):
        path = tmp_path / "set" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (10, 8), _colour(value)).save(path)
    (tmp_path / "set" / "a" / "notes.txt").write_text("not an image")
    (tmp_path / "set" / ".hidden").mkdir()
    data = load_dataset("set", "train", tmp_path)
    assert data.class_names == ("a", "b")
    assert data.labels is not None
    assert data.labels.tolist() == [0, 1, 1]
    assert data.images.shape == (3, 3, 8, 8), "the first image's shorter side"
    assert data.images[:, :, 0, 0].tolist() == [list(_colour(value)) for value in (10, 30, 40)]
    assert load_dataset(str(tmp_path / "set"), "train", image_size=5, channels=1).images.shape == (3, 1, 5, 5)
    with pytest.raises(DataError, match="train and test"):
        load_dataset("set", "test", tmp_path)


def test_an_image_folder_with_splits_and_grey_images_is_read(tmp_path: Path) -> None:
    for split, num in (("train", 3), ("test", 1)):
        (tmp_path / split / "only").mkdir(parents=True)
        for i in range(num):
            Image.new("L", (8, 8), 50 * i).save(tmp_path / split / "only" / f"{i}.png")
    train, test = (load_dataset(str(tmp_path), split) for split in ("train", "test"))
    assert train.images[:, 0, 0, 0].tolist() == [0, 50, 100]
    assert train.images.shape == (3, 1, 8, 8)
    assert len(test) == 1


def test_grey_images_of_16_bits_keep_the_upper_8(tmp_path: Path) -> None:
    pixels = np.arange(2**16, dtype=np.uint16).reshape(256, 256)
    Image.fromarray(pixels).save(tmp_path / "1.png")
    turned = Image.Exif()
    turned[ExifTags.Base.Orientation] = 3  # by 180 degrees
    Image.fromarray(pixels).save(tmp_path / "2.png", exif=turned)
    data = load_dataset(str(tmp_path), "train")
    assert data.images.shape == (2, 1, 256, 256), "one channel"
    assert np.array_equal(data.images[0, 0], pixels >> 8)
    assert np.array_equal(data.images[1, 0], pixels[::-1, ::-1] >> 8)
    assert np.array_equal(load_dataset(str(tmp_path), "train", channels=3).images[0, 2], pixels >> 8)


def test_grey_images_with_transparency_have_one_channel(tmp_path: Path) -> None:
    Image.new("LA", (8, 8), (70, 10)).save(tmp_path / "1.png")
    data = load_dataset(str(tmp_path), "train")
    assert data.images.shape == (1, 1, 8, 8)
    assert data.images.max() == data.images.min() == 70


@pytest.mark.parametrize("mode", ["I", "F"])
def test_images_with_an_unknown_range_of_values_are_refused(
    tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "1.png").touch()
    monkeypatch.setattr("fedssl.data.decode_file.Image.open", lambda *_, **__: Image.new(mode, (8, 8), 300))
    with pytest.raises(DataError, match=r"1\.png: the range of its values is unknown: choose which values"):
        load_dataset(str(tmp_path), "train")


def test_the_val_folder_is_used_as_the_test_split(tmp_path: Path) -> None:
    for split, value in (("train", 10), ("val", 20)):
        (tmp_path / split / "only").mkdir(parents=True)
        Image.new("L", (8, 8), value).save(tmp_path / split / "only" / "1.png")
    assert load_dataset(str(tmp_path), "train").images[0, 0, 0, 0] == 10
    assert load_dataset(str(tmp_path), "test").images[0, 0, 0, 0] == 20


def test_a_class_missing_from_one_split_of_a_folder_changes_no_class_number(tmp_path: Path) -> None:
    for name, value in (("train/a", 10), ("train/b", 20), ("train/d", 30), ("val/b", 20), ("val/c", 40), ("val/d", 30)):
        (tmp_path / name).mkdir(parents=True)
        Image.new("L", (8, 8), value).save(tmp_path / name / "1.png")
    train, test = (load_dataset(str(tmp_path), split) for split in ("train", "test"))
    numbers = [dict(zip(each.images[:, 0, 0, 0].tolist(), each.labels.tolist(), strict=True)) for each in (train, test)]
    assert numbers == [{10: 0, 20: 1, 30: 2}, {20: 1, 30: 2, 40: 3}]
    assert train.class_names == ("a", "b", "d")
    assert test.class_names == ("a", "b", "d", "c")
    assert load_labels(str(tmp_path), "test")[1] == test.class_names


def test_class_folders_with_names_that_are_not_utf_8_are_read(tmp_path: Path) -> None:
    for name in (b"M\xfcller", b"Zebra"):
        folder = tmp_path / os.fsdecode(name)
        folder.mkdir()
        Image.new("L", (8, 8), len(name)).save(folder / "1.png")
    data = load_dataset(str(tmp_path), "train")
    assert data.class_names == ("M\ufffdller", "Zebra")
    assert data.images[:, 0, 0, 0].tolist() == [6, 5]
    assert load_labels(str(tmp_path), "train")[1] == data.class_names


def test_loose_images_are_unlabelled(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "1.jpg")
    data = load_dataset(str(tmp_path), "train")
    assert data.labels is None
    assert data.class_names == ()
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match=r"both images \(1.jpg\) and sub-folders \(folder\): move"):
        load_dataset(str(tmp_path), "train")


def test_image_folders_are_cropped_to_the_central_square(tmp_path: Path) -> None:
    pixels = np.zeros((8, 24, 3), np.uint8)
    pixels[:, 8:16] = 200
    Image.fromarray(pixels).save(tmp_path / "wide.png")
    assert load_dataset(str(tmp_path), "train").images.min() == 200


@pytest.mark.parametrize("content", [b"", b"\x89PNG\r\n\x1a\n cut short", pickle.dumps([1])])
def test_a_damaged_image_is_named(tmp_path: Path, content: bytes) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "1.png")
    (tmp_path / "2.png").write_bytes(content)
    with pytest.raises(DataError, match=r"2\.png"):
        load_dataset(str(tmp_path), "train")


def test_a_truncated_image_is_named(tmp_path: Path) -> None:
    Image.fromarray(RNG.integers(0, 256, (40, 40, 3)).astype(np.uint8)).save(tmp_path / "1.png")
    (tmp_path / "1.png").write_bytes((tmp_path / "1.png").read_bytes()[:-2000])
    with pytest.raises(DataError, match=r"1\.png"):
        load_dataset(str(tmp_path), "train")


@pytest.mark.parametrize("kind", ["JPEG", "MPO"])
def test_a_jpeg_whose_end_was_replaced_by_zeros_is_named(tmp_path: Path, kind: str) -> None:
    """An interrupted copy leaves such a file. libjpeg decodes the zeros as grey, without an error."""
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    path = tmp_path / "1.jpg"
    Image.fromarray(pixels).save(path, kind, progressive=True)
    whole = path.read_bytes()
    half = len(whole) // 2
    for after in (bytes(4096), b"of a camera" + bytes(4096)):
        path.write_bytes(whole + after)
        assert len(load_dataset(str(tmp_path), "train")) == 1
    path.write_bytes(whole[:half] + bytes(len(whole) - half))
    with pytest.raises(DataError, match=r"1\.jpg: its end is missing: it has zeros there"):
        load_dataset(str(tmp_path), "train")


def test_an_empty_folder_and_an_unknown_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds no images.*\.npy\)$"):
        load_dataset(str(tmp_path), "train")
    (tmp_path / "scans.npz").write_bytes(b"")
    with pytest.raises(DataError, match=r"cannot read .*scans\.npz: .*; repair the file, or move it out"):
        load_dataset(str(tmp_path), "train")
    with pytest.raises(DataError, match="fashion-mnist"):
        load_dataset("no-such-set", "train", tmp_path)
    with pytest.raises(DataError, match="train or test"):
        load_dataset("digits", "validation")  # type: ignore[arg-type]
    (tmp_path / "file.bin").write_bytes(b"")
    with pytest.raises(DataError, match="neither"):
        load_dataset(str(tmp_path / "file.bin"), "train")


def test_a_saved_npz_is_read_back(tmp_path: Path) -> None:
    train = ImageData(RNG.integers(0, 256, (4, 3, 9, 9)).astype(np.uint8), np.array([0, 1, 1, 0]), ("cat", "dog"))
    test = ImageData(RNG.integers(0, 256, (2, 3, 9, 9)).astype(np.uint8))
    save_npz(tmp_path / "deep" / "set.npz", train, test)
    read = load_dataset("set.npz", "train", tmp_path / "deep")
    assert np.array_equal(read.images, train.images)
    assert read.labels is not None
    assert read.labels.tolist() == [0, 1, 1, 0]
    assert read.class_names == ("cat", "dog")
    read = load_dataset(str(tmp_path / "deep/set.npz"), "test")
    assert np.array_equal(read.images, test.images)
    assert read.labels is None


@pytest.mark.parametrize("shape", [(5, 8, 9), (5, 8, 9, 1), (5, 1, 8, 9), (5, 8, 9, 3), (5, 3, 8, 9)])
def test_npz_layouts_are_recognised(tmp_path: Path, shape: tuple[int, ...]) -> None:
    images = RNG.integers(0, 256, shape).astype(np.uint8)
    np.savez(tmp_path / "set.npz", images=images)
    data = load_dataset(str(tmp_path / "set.npz"), "train")
    channels = 3 if 3 in shape else 1
    assert data.images.shape == (5, channels, 8, 9)
    pixel = images[2, 4, 5] if shape[-1] in (1, 3, 9) and shape[1] == 8 else images[2, :, 4, 5]
    assert data.images[2, :, 4, 5].tolist() == np.atleast_1d(pixel).tolist()


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"pictures": np.zeros((2, 8, 8), np.uint8)}, "no array images"),
        ({"images": np.zeros((2, 8, 8), np.float32)}, "uint8"),
        ({"images": np.zeros((2, 18, 18, 17), np.uint8)}, "shape"),
        ({"images": np.zeros((2, 8, 8), np.uint8), "labels": np.zeros(3, np.int64)}, "labels"),
        ({"images": np.zeros((2, 8, 8), np.uint8), "labels": np.zeros(2)}, "whole numbers"),
        ({"images": np.zeros((2, 8, 8), np.uint8), "labels": np.array([0, -1])}, "0 or larger"),
        ({"images": np.zeros((2, 8, 8), np.uint8), "labels": np.array([0, 10**15])}, "below 1000000"),
        ({"images": np.zeros((2, 0, 8), np.uint8)}, "no pixels"),
        ({"images": np.array([{"a": 1}])}, "cannot read"),
    ],
)
def test_invalid_npz_arrays_are_refused(tmp_path: Path, arrays: dict[str, np.ndarray], words: str) -> None:
    np.savez(tmp_path / "set.npz", **arrays)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=words):
        load_dataset(str(tmp_path / "set.npz"), "train")


def test_an_npz_member_that_is_not_an_array_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "set.npz", "w") as archive:
        archive.writestr("images", b"raw")
    with pytest.raises(DataError, match="images is not an array"):
        load_dataset(str(tmp_path / "set.npz"), "train")


def test_a_file_that_is_not_an_npz_is_refused(tmp_path: Path) -> None:
    for content in (b"", b"nonsense", pickle.dumps({"images": 1}), b"PK\x03\x04 cut"):
        (tmp_path / "set.npz").write_bytes(content)
        with pytest.raises(DataError, match=r"set\.npz"):
            load_dataset(str(tmp_path / "set.npz"), "train")
    np.save(tmp_path / "plain.npy", np.zeros(3))
    (tmp_path / "plain.npy").rename(tmp_path / "plain.npz")
    with pytest.raises(DataError, match=r"plain\.npz"):
        load_dataset(str(tmp_path / "plain.npz"), "train")


def test_a_subset_has_its_images_and_labels_and_wrong_shapes_are_refused() -> None:
    data = ImageData(np.arange(5 * 64, dtype=np.uint8).reshape(5, 1, 8, 8), np.arange(5))
    part = data.subset(np.array([3, 1]))
    assert part.labels is not None
    assert part.labels.tolist() == [3, 1]
    assert part.images[:, 0, 0, 0].tolist() == [192, 64]
    with pytest.raises(DataError, match="N, C, H, W"):
        ImageData(np.zeros((5, 17, 8, 8), np.uint8))


def test_conform_returns_images_of_the_right_shape_unchanged() -> None:
    data = ImageData(np.zeros((2, 1, 28, 28), np.uint8))
    assert conform(data, DataConfig(channels=1, image_size=28)) is data


def test_conform_resizes_crops_and_changes_channels() -> None:
    images = np.zeros((3, 1, 8, 12), np.uint8)
    images[:, :, :, 2:10] = 100
    data = ImageData(images, np.arange(3))
    out = conform(data, DataConfig(channels=3, image_size=16))
    assert out.images.shape == (3, 3, 16, 16)
    assert out.labels is not None
    assert (out.images[:, :, 4:12, 4:12] == 100).all()
    colours = np.broadcast_to(np.array([10, 20, 30], np.uint8).reshape(1, 3, 1, 1), (2, 3, 8, 8))
    grey = conform(ImageData(colours), DataConfig(channels=1, image_size=8))
    assert (grey.images == round(0.299 * 10 + 0.587 * 20 + 0.114 * 30)).all()


def test_image_files_are_decoded_directly_to_the_runs_size(tmp_path: Path) -> None:
    """PIL scales each image once. Scaling to the first image's size before that would blur, and take more memory."""
    pixels = RNG.integers(0, 256, (64, 64, 3)).astype(np.uint8)
    Image.fromarray(pixels).save(tmp_path / "1.png")
    data = load_conformed(str(tmp_path), "train", DataConfig(channels=1, image_size=16))
    expected = Image.fromarray(pixels).convert("L").resize((16, 16), Image.Resampling.BILINEAR)
    assert np.array_equal(data.images[0, 0], np.asarray(expected))
    arrays = load_conformed("digits", "test", DataConfig(channels=3, image_size=8))
    assert arrays.images.shape == (360, 3, 8, 8)


def test_labels_are_read_without_decoding_images(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.png").write_bytes(b"not looked into")
    labels, names = load_labels(str(tmp_path), "train")
    assert labels is not None
    assert labels.tolist() == [0, 1]
    assert names == ("cat", "dog")
    save_npz(tmp_path / "set.npz", ImageData(np.zeros((2, 1, 8, 8), np.uint8), np.array([1, 0]), ("a", "b")))
    labels, names = load_labels("set.npz", "train", tmp_path)
    assert labels is not None
    assert labels.tolist() == [1, 0]
    assert names == ("a", "b")
    digits, _ = load_labels("digits", "train")
    assert digits is not None
    assert len(digits) == 1437


def test_every_missing_known_data_set_is_reported_with_how_to_get_it(tmp_path: Path) -> None:
    assert tuple(KNOWN) == DATASETS
    for name, known in KNOWN.items():
        assert find_dataset(name, "train", tmp_path) is None
        if known.find is None:
            assert len(load_dataset(name, "train")) == known.num_train
            continue
        for split in ("train", "test"):
            with pytest.raises(DataError) as error:
                load_dataset(name, split, tmp_path)  # type: ignore[arg-type]
            assert known.title in str(error.value)
            assert known.source in str(error.value)
            assert DATA_VARIABLE in str(error.value)
            assert (f"fedssl data fetch {name}" in str(error.value)) == known.fetchable


def test_an_incomplete_data_set_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _write_fashion_mnist(tmp_path)
    load_dataset("fashion-mnist", "train", tmp_path)
    assert "there are 7 train images, but 60,000 were published" in caplog.text
    caplog.clear()
    load_dataset("digits", "train")
    assert caplog.text == ""


def test_an_array_larger_than_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez_compressed(tmp_path / "set.npz", images=np.zeros((2, 8, 8), np.uint8))
    monkeypatch.setattr("fedssl.data.array_files.os.sysconf", lambda _: 8)  # 8 pages of 8 bytes
    with pytest.raises(DataError, match=r"set\.npz: an array takes .* GB of memory"):
        load_dataset(str(tmp_path / "set.npz"), "train")


def test_more_images_than_fit_into_memory_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.new("L", (9, 9)).save(tmp_path / "1.png")
    monkeypatch.setattr("fedssl.data.array_files.os.sysconf", lambda _: 8)
    with pytest.raises(DataError, match=r"GB at 9 x 9 pixels, but this machine has .* smaller image size"):
        load_dataset(str(tmp_path), "train")
    assert load_dataset(str(tmp_path), "train", image_size=8).images.shape == (1, 1, 8, 8)
