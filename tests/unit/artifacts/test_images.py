"""Files of images: they equal the library's own bytes, are read through a memory map, and other files are refused."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save

from fedssl.artifacts.header import read_header
from fedssl.artifacts.images import (
    MAX_HEADER_BYTES,
    LabelledShape,
    PublicShape,
    Stream,
    data_set_shape,
    labelled_streams,
    map_labelled,
    map_public,
    public_streams,
    streams_digest,
    write_streams,
)
from fedssl.artifacts.store import digest_of
from fedssl.errors import ArtifactError, ArtifactTooLarge
from fedssl.protocol.plan import TensorSpec

IMAGES = np.arange(5 * 3 * 8 * 8, dtype=np.uint8).reshape(5, 3, 8, 8)
LABELS = np.array([2, 0, 1, 2, 0], np.int64)
NAMES = ("cat", "dög", "eel")


def _text(names: tuple[str, ...] = NAMES) -> NDArray[np.uint8]:
    return np.frombuffer(json.dumps(names).encode(), np.uint8)


def _labelled(**changes: Any) -> dict[str, NDArray[Any]]:
    whole = {"train_images": IMAGES, "train_labels": LABELS, "test_images": IMAGES[:2], "test_labels": LABELS[:2]}
    return {name: value for name, value in {**whole, **changes}.items() if value is not None}


def _file(folder: Path, arrays: dict[str, NDArray[Any]]) -> Path:
    path = folder / "images.safetensors"
    path.write_bytes(save({name: np.ascontiguousarray(array) for name, array in arrays.items()}))
    return path


def _streams(names: tuple[str, ...] = NAMES) -> list[Stream]:
    shape = LabelledShape(5, 2, 3, 8)
    return labelled_streams(shape, [IMAGES[:2], IMAGES[2:]], LABELS, [IMAGES[:2]], LABELS[:2], names)


def test_a_public_data_set_equals_the_librarys_own_file(tmp_path: Path) -> None:
    path = tmp_path / "public"
    streams = public_streams(PublicShape(5, 3, 8), [IMAGES[:1], IMAGES[1:4], IMAGES[4:]])
    digest = write_streams(path, streams)
    assert path.read_bytes() == save({"images": IMAGES})
    assert digest == digest_of(path) == streams_digest(streams)
    assert np.array_equal(map_public(path), IMAGES)
    with path.open("rb") as file:
        assert data_set_shape(read_header(file)) == PublicShape(5, 3, 8)


@pytest.mark.parametrize("names", [NAMES, ()])
def test_a_labelled_data_set_equals_the_librarys_own_file(tmp_path: Path, names: tuple[str, ...]) -> None:
    path = tmp_path / "labelled"
    write_streams(path, _streams(names))
    assert path.read_bytes() == save(_labelled(class_names=_text(names) if names else None))
    found = map_labelled(path)
    assert (found.class_names, found.num_classes) == (names, 3)
    for name, array in _labelled().items():
        mapped = getattr(found, name)
        assert np.array_equal(mapped, array)
        assert mapped.dtype == array.dtype
        assert not mapped.flags.writeable
    with path.open("rb") as file:
        assert data_set_shape(read_header(file)) == LabelledShape(5, 2, 3, 8)
    assert load_file(path).keys() == _labelled(class_names=_text(names) if names else None).keys()


def test_parts_that_do_not_make_up_the_whole_raise_a_value_error(tmp_path: Path) -> None:
    for shape, parts in ((PublicShape(6, 3, 8), [IMAGES]), (PublicShape(5, 1, 8), [IMAGES])):
        with pytest.raises(ValueError, match="images: "):
            write_streams(tmp_path / "x", public_streams(shape, parts))


_HUGE = np.zeros((1, 1, 520, 520), np.uint8)

NO_PUBLIC_SET: dict[str, tuple[dict[str, NDArray[Any]], str]] = {
    "weights": ({"encoder.weight": np.zeros((2, 2), np.float32)}, "not a public data set"),
    "nothing": ({}, "not a public data set"),
    "a labelled set": (_labelled(), "not a public data set"),
    "images and something else": ({"images": IMAGES, "more": IMAGES}, "not a public data set"),
    "another name": ({"image": IMAGES}, "not a public data set"),
    "floats": ({"images": IMAGES.astype(np.float32)}, r"it is F32\[5, 3, 8, 8\]"),
    "signed": ({"images": IMAGES.view(np.int8)}, "it is I8"),
    "two channels": ({"images": IMAGES[:, :2]}, "C 1 or 3"),
    "channels last": ({"images": IMAGES.transpose(0, 2, 3, 1)}, "C 1 or 3"),
    "not square": ({"images": IMAGES[..., :4]}, "must be U8 images"),
    "too small": ({"images": IMAGES[..., :4, :4]}, "S 8 to 512"),
    "too large": ({"images": _HUGE}, "S 8 to 512"),
    "no images": ({"images": IMAGES[:0]}, "must be U8 images"),
    "three dimensions": ({"images": IMAGES[:, 0]}, "must be U8 images"),
}


@pytest.mark.parametrize("case", NO_PUBLIC_SET)
def test_invalid_public_data_sets_are_refused(tmp_path: Path, case: str) -> None:
    arrays, what = NO_PUBLIC_SET[case]
    with pytest.raises(ArtifactError, match=what):
        map_public(_file(tmp_path, arrays))


NO_LABELLED_SET: dict[str, tuple[dict[str, NDArray[Any]], str]] = {
    "a public set": ({"images": IMAGES}, "not a labelled data set"),
    "a missing split": (_labelled(test_images=None, test_labels=None), "not a labelled data set"),
    "a tensor too many": (_labelled(secret=IMAGES), "not a labelled data set"),
    "splits of two sizes": (_labelled(test_images=np.zeros((2, 3, 16, 16), np.uint8)), "differ in channels or size"),
    "splits of two colours": (_labelled(test_images=np.zeros((2, 1, 8, 8), np.uint8)), "differ in channels or size"),
    "too few labels": (
        _labelled(train_labels=LABELS[:4]),
        r"train_labels must be one I64 number per image, shape \[5\]",
    ),
    "narrow labels": (_labelled(test_labels=LABELS[:2].astype(np.int32)), "test_labels must be one I64"),
    "a negative label": (_labelled(test_labels=np.array([0, -1])), "they are -1 to 2"),
    "a huge label": (_labelled(train_labels=LABELS + 2**40), "labels must be 0 to 65535"),
    "a label without a name": (_labelled(class_names=_text(("cat", "dog"))), "labels must be 0 to 1; they are 0 to 2"),
    "names that are no list": (_labelled(class_names=np.frombuffer(b'{"a": 1}', np.uint8)), "JSON list"),
    "names that are no JSON": (_labelled(class_names=np.frombuffer(b"\xff\xfe", np.uint8)), "JSON list"),
    "names nested deeply": (_labelled(class_names=np.frombuffer(b"[" * 100_000, np.uint8)), "JSON list"),
    "half a character": (_labelled(class_names=np.frombuffer(b'["a", "\\ud800", "c"]', np.uint8)), "names in UTF-8"),
    "NUL in a name": (_labelled(class_names=np.frombuffer(b'["a", "\\u0000", "c"]', np.uint8)), "without NUL"),
    "names that are numbers": (_labelled(class_names=np.frombuffer(b"[1, 2, 3]", np.uint8)), "JSON list"),
    "no names at all": (_labelled(class_names=np.zeros(0, np.uint8)), "class_names must be at most"),
    "more names than anybody needs": (_labelled(class_names=np.zeros(2**20 + 1, np.uint8)), "class_names must be"),
    "names as floats": (_labelled(class_names=np.zeros(8, np.float32)), "class_names must be at most"),
}


@pytest.mark.parametrize("case", NO_LABELLED_SET)
def test_invalid_labelled_data_sets_are_refused(tmp_path: Path, case: str) -> None:
    arrays, what = NO_LABELLED_SET[case]
    with pytest.raises(ArtifactError, match=what):
        map_labelled(_file(tmp_path, arrays))


def test_files_that_are_not_data_sets_are_refused() -> None:
    for arrays in ({"encoder.weight": IMAGES}, {}, {"images": IMAGES, "train_images": IMAGES}):
        header = read_header(io.BytesIO(save(arrays)))
        with pytest.raises(ArtifactError, match=r"not a data set: make it with `fedssl public-dataset add`"):
            data_set_shape(header)


def test_truncated_and_padded_files_are_refused(tmp_path: Path) -> None:
    whole = save({"images": IMAGES})
    path = tmp_path / "images.safetensors"
    for spoilt in (whole[:-1], whole + b"\0", whole[:60], whole[:5], b""):
        path.write_bytes(spoilt)
        with pytest.raises(ArtifactError):
            map_public(path)


def test_a_header_that_claims_a_huge_size_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "images.safetensors"
    path.write_bytes((MAX_HEADER_BYTES + 1).to_bytes(8, "little") + save({"images": IMAGES})[8:])
    with pytest.raises(ArtifactTooLarge, match="at most 4096"):
        map_public(path)


def test_metadata_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "images.safetensors"
    path.write_bytes(save({"images": IMAGES}, metadata={"owner": "somebody"}))
    with pytest.raises(ArtifactError, match="__metadata__"):
        map_public(path)


def test_a_stream_describes_its_tensor() -> None:
    [stream] = public_streams(PublicShape(5, 3, 8), [IMAGES])
    assert stream.spec == TensorSpec(name="images", dtype="U8", shape=(5, 3, 8, 8))
