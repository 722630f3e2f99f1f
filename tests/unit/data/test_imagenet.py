"""Subsets of ImageNet, written by the tests in the layouts that their authors distribute."""

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedssl.data import Split, find_dataset, load_dataset, load_labels
from fedssl.errors import DataError

WORDS = "n00000001\tgoldfish, Carassius auratus\nn00000002\ttench\nn99999999\tnot in the set\n"


def _jpeg(value: int, size: int = 64, mode: str = "RGB") -> bytes:
    out = io.BytesIO()
    Image.new(mode, (size, size), value if mode == "L" else (value, value, value)).save(out, "JPEG", quality=95)
    return out.getvalue()


def _tiny_files() -> dict[str, bytes]:
    """Return the files of two classes, listed in reverse. Each has 3 training and 2 validation images; two are grey."""
    files = {"wnids.txt": b"n00000002\nn00000001\n", "words.txt": WORDS.encode()}
    for label in (1, 2):
        for i in (0, 1, 10):
            name = f"train/n0000000{label}/images/n0000000{label}_{i}.JPEG"
            files[name] = _jpeg(100 * label + i, mode="L" if i == 10 else "RGB")
        files[f"train/n0000000{label}/n0000000{label}_boxes.txt"] = b"n_0.JPEG\t0\t0\t1\t1\n"
    classes = {0: 2, 1: 1, 2: 2, 10: 1}
    for i in classes:
        files[f"val/images/val_{i}.JPEG"] = _jpeg(10 + i)
    lines = (f"val_{i}.JPEG\tn0000000{label}\t0\t32\t44\t62\n" for i, label in classes.items())
    files["val/val_annotations.txt"] = "".join(lines).encode()
    files["test/images/test_0.JPEG"] = _jpeg(1)
    return files


def _write(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def _write_zip(path: Path, files: dict[str, bytes]) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(f"tiny-imagenet-200/{name}", content)


def _sorted_into_classes(files: dict[str, bytes]) -> dict[str, bytes]:
    """Rearrange `val` and the `images` folders as the usual scripts do after unpacking."""
    lines = files["val/val_annotations.txt"].decode().splitlines()
    labels = dict(line.split("\t")[:2] for line in lines)
    changed = {}
    for name, content in files.items():
        if name.startswith("val/images/"):
            image = name.rpartition("/")[2]
            changed[f"val/{labels[image]}/images/{image}"] = content
        elif name != "val/val_annotations.txt":
            changed[name.replace("/images/", "/") if name.startswith("train/") else name] = content
    return changed


@pytest.mark.parametrize("layout", ["zip", "folder", "sorted"])
def test_tiny_imagenet_is_read_from_every_layout(tmp_path: Path, layout: str) -> None:
    files = _tiny_files()
    if layout == "zip":
        _write_zip(tmp_path / "tiny-imagenet-200.zip", files)
    else:
        _write(tmp_path / "tiny-imagenet-200", files if layout == "folder" else _sorted_into_classes(files))
    train, test = (load_dataset("tiny-imagenet", split, tmp_path) for split in ("train", "test"))
    assert train.images.shape == (6, 3, 64, 64)
    assert train.labels is not None
    assert train.labels.tolist() == [0, 0, 0, 1, 1, 1], "classes in the order of their ids, not of wnids.txt"
    assert train.images[:, 0, 0, 0].tolist() == [100, 101, 110, 200, 201, 210]
    assert train.images[2, :, 5, 5].tolist() == [110, 110, 110], "grey files become three channels"
    assert train.class_names == ("goldfish", "tench")
    assert test.labels is not None
    assert test.labels.tolist() == [1, 0, 0, 1], "the same order in every layout"
    assert test.images[:, 0, 0, 0].tolist() == [10, 11, 20, 12]


def test_tiny_imagenet_is_read_in_another_shape(tmp_path: Path) -> None:
    _write_zip(tmp_path / "tiny-imagenet-200.zip", _tiny_files())
    grey = load_dataset("tiny-imagenet", "train", tmp_path, image_size=16, channels=1)
    assert grey.images.shape == (6, 1, 16, 16)
    assert grey.images[:, 0, 3, 3].tolist() == [100, 101, 110, 200, 201, 210]


def test_labels_are_read_without_decoding(tmp_path: Path) -> None:
    files = _tiny_files()
    files["train/n00000001/images/n00000001_0.JPEG"] = b"no image"
    _write(tmp_path / "tiny-imagenet-200", files)
    labels, names = load_labels("tiny-imagenet", "train", tmp_path)
    assert labels is not None
    assert labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert names == ("goldfish", "tench")
    with pytest.raises(DataError, match=r"n00000001_0\.JPEG"):
        load_dataset("tiny-imagenet", "train", tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "split", "words"),
    [
        ("wnids.txt", b"", "train", "one WordNet id per line"),
        ("wnids.txt", b"n00000001\nn00000001\n", "train", "each once"),
        ("wnids.txt", b"n00000001\n../../etc\n", "train", "WordNet id"),
        ("wnids.txt", b"n00000001\nn00000003\n", "train", "no images of the class n00000003"),
        ("wnids.txt", b"n00000001\n", "test", r"val_annotations\.txt has no class of wnids\.txt for val_0\.JPEG"),
        ("val/val_annotations.txt", b"val_0.JPEG\n", "test", r"has no class of wnids\.txt for val_0\.JPEG"),
        ("val/val_annotations.txt", b"\xff\xfe\t\t\n\n", "test", "no class"),
    ],
)
def test_damaged_tiny_imagenet_lists_are_refused(
    tmp_path: Path, name: str, content: bytes, split: Split, words: str
) -> None:
    _write(tmp_path / "tiny-imagenet-200", _tiny_files() | {name: content})
    with pytest.raises(DataError, match=words):
        load_dataset("tiny-imagenet", split, tmp_path)


def _mini(folder: Path, num_images: int = 12) -> dict[str, list[str]]:
    """Write five classes, distributed over the three lists like the classes of the real data set."""
    folder.mkdir()
    (folder / "images").mkdir()
    lists = {"train": ["n02", "n00", "n04"], "val": ["n01"], "test": ["n03"]}
    by_class = {}
    for name, classes in lists.items():
        rows = []
        for label in classes:
            by_class[label] = [f"{label}{i:08d}.jpg" for i in range(num_images)]
            rows += [f"{image},{label}" for image in reversed(by_class[label])]
            for i, image in enumerate(by_class[label]):
                (folder / "images" / image).write_bytes(_jpeg(20 * int(label[1:]) + i, size=84))
        (folder / f"{name}.csv").write_text("\r\n".join(["filename,label", *rows]) + "\r\n")
    return by_class


def test_mini_imagenet_splits_the_images_of_all_classes(tmp_path: Path) -> None:
    _mini(tmp_path / "mini-imagenet")
    train, test = (load_dataset("mini-imagenet", split, tmp_path) for split in ("train", "test"))
    assert train.images.shape == (50, 3, 84, 84)
    assert test.images.shape == (10, 3, 84, 84)
    assert train.labels is not None
    assert test.labels is not None
    assert np.bincount(train.labels).tolist() == [10] * 5
    assert np.bincount(test.labels).tolist() == [2] * 5, "the last sixth"
    assert train.class_names == ("n00", "n01", "n02", "n03", "n04")
    assert train.images[10:20, 0, 0, 0].tolist() == list(range(20, 30)), "in the order of the names"
    assert test.images[2:4, 0, 0, 0].tolist() == [30, 31]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "filename,label"),
        ("image,class\na.jpg,n1\n", "filename,label"),
        ("filename,label\n../../../etc/passwd.jpg,n1\n", "not an image and its class"),
        ("filename,label\n/etc/passwd,n1\n", "not an image and its class"),
        ("filename,label\nn0000000000.jpg\n", "not an image and its class"),
        ("filename,label\nn0100000000.jpg,n09\nn0100000000.jpg,n09\n", "twice"),
        ("filename,label\nmissing.jpg,n1\n", r"lacks 1 of the .* missing\.jpg"),
    ],
)
def test_damaged_mini_imagenet_lists_are_refused(tmp_path: Path, text: str, words: str) -> None:
    _mini(tmp_path / "mini-imagenet")
    (tmp_path / "mini-imagenet" / "val.csv").write_text(text)
    with pytest.raises(DataError, match=words):
        load_dataset("mini-imagenet", "train", tmp_path)


def _imagenet(folder: Path, num_classes: int) -> None:
    for number in range(num_classes):
        for split, num in (("train", 2), ("val", 1)):
            for i in range(num):
                path = folder / split / f"n{number:08d}" / f"{split}_{i}.JPEG"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(_jpeg(2 * number + i, size=40))


@pytest.mark.parametrize("beside", [True, False])
def test_imagenet_100_has_the_classes_of_its_list(tmp_path: Path, beside: bool) -> None:  # noqa: FBT001
    _imagenet(tmp_path / "imagenet", 6)
    where = tmp_path if beside else tmp_path / "imagenet"
    (where / "imagenet100.txt").write_text("n00000004\nn00000001\n")
    train = load_dataset("imagenet-100", "train", tmp_path, image_size=32)
    test = load_dataset("imagenet-100", "test", tmp_path)
    assert train.images.shape == (4, 3, 32, 32)
    assert test.images.shape == (2, 3, 224, 224)
    assert train.class_names == ("n00000001", "n00000004")
    assert train.images[:, 0, 0, 0].tolist() == [2, 3, 8, 9]
    assert test.labels is not None
    assert test.labels.tolist() == [0, 1]


def test_imagenet_100_without_a_list_must_have_100_classes(tmp_path: Path) -> None:
    _imagenet(tmp_path / "imagenet-100", 100)
    labels, names = load_labels("imagenet-100", "test", tmp_path)
    assert labels is not None
    assert labels.tolist() == list(range(100))
    assert len(names) == 100
    _imagenet(tmp_path / "imagenet-100", 101)
    assert find_dataset("imagenet-100", "train", tmp_path) is None
    with pytest.raises(DataError, match=r"imagenet100\.txt"):
        load_labels("imagenet-100", "test", tmp_path)


def test_imagenet_100_may_consist_of_links(tmp_path: Path) -> None:
    _imagenet(tmp_path / "all", 3)
    for split in ("train", "val"):
        (tmp_path / "imagenet-100" / split).mkdir(parents=True)
        (tmp_path / "imagenet-100" / split / "n00000002").symlink_to(tmp_path / "all" / split / "n00000002")
    (tmp_path / "imagenet100.txt").write_text("n00000002\n")
    assert len(load_dataset("imagenet-100", "train", tmp_path, image_size=32)) == 2


def test_a_listed_class_that_is_missing_is_named(tmp_path: Path) -> None:
    _imagenet(tmp_path / "imagenet", 2)
    (tmp_path / "imagenet100.txt").write_text("n00000001\nn00000009\n")
    with pytest.raises(DataError, match="n00000009 in train"):
        load_dataset("imagenet-100", "train", tmp_path)
