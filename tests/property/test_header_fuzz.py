"""Nearly correct headers, changed in a few places: the reader refuses them, or reads the same as the library."""

import copy
import io
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.numpy import load

from fedssl.artifacts.header import Header, check_header, max_header_bytes, num_bytes, read_header
from fedssl.errors import ArtifactError
from fedssl.protocol.plan import TensorSpec
from support.fuzzing import examples

FUZZ = settings(
    max_examples=examples(60), deadline=None, suppress_health_check=list(HealthCheck), database=None, print_blob=True
)
DTYPES = ("F64", "F32", "F16", "I64", "I32", "I16", "I8", "U8")
ODD_NAMES = [
    "", ".", "..", "../../etc/passwd", "/etc/passwd", "C:\\x", "a/b", "a\x00b", "~", "$HOME", "%2e%2e", "__metadata__",
    "__proto__", "é", "e\u0301", "\u202ename", "\ufeffa", "\ud800", "🙂", "a" * 5000, "'; DROP TABLE runs; --",
    "\x1b[2J",
]  # fmt: skip
ODD_NUMBERS = [-1, -(2**63), 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**40, 0.5, 1e308, True, None, "8", [], {}]
ODD_VALUES = [*ODD_NUMBERS, "F32", "f32", "BOOL", "C64", "F8_E4M3", "F32\x00", {"a": {"a": {}}}, [[[[]]]]]


def _header(shapes: dict[str, tuple[str, list[int]]]) -> dict[str, Any]:
    document, position = {}, 0
    for name, (dtype, shape) in shapes.items():
        end = position + num_bytes(dtype, shape)
        document[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, end]}
        position = end
    return document


tensors = st.dictionaries(
    st.from_regex(r"\A[a-z]{1,6}(\.[a-z]{1,6})?\Z"),
    st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3)),
    min_size=1,
    max_size=5,
)


@st.composite
def changed(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Any]]:
    """Draw a correct header, and return it with a copy to which one to three changes were made."""
    right = _header(draw(tensors))
    wrong = copy.deepcopy(right)
    for _ in range(draw(st.integers(1, 3))):
        _CHANGES[draw(st.sampled_from(sorted(_CHANGES)))](draw, wrong)
    return right, wrong


def _some(draw: st.DrawFn, document: dict[str, Any]) -> dict[str, Any]:
    entry = document[draw(st.sampled_from(sorted(document)))]
    return entry if isinstance(entry, dict) else {}


def _value(draw: st.DrawFn, document: dict[str, Any]) -> None:
    _some(draw, document)[draw(st.sampled_from(["dtype", "shape", "data_offsets", "x"]))] = draw(
        st.sampled_from(ODD_VALUES)
    )


def _number(draw: st.DrawFn, document: dict[str, Any]) -> None:
    numbers = _some(draw, document).get(draw(st.sampled_from(["shape", "data_offsets"])))
    if isinstance(numbers, list) and numbers:
        numbers[draw(st.integers(0, len(numbers) - 1))] = draw(st.sampled_from(ODD_NUMBERS) | st.integers(-3, 300))


def _overlap(draw: st.DrawFn, document: dict[str, Any]) -> None:
    """Give one tensor the byte range of another, shifted by up to 8 bytes."""
    one, other = _some(draw, document), _some(draw, document)
    if isinstance(other.get("data_offsets"), list):
        by = draw(st.integers(-8, 8))
        one["data_offsets"] = [n + by if type(n) is int else n for n in other["data_offsets"]]


def _name(draw: st.DrawFn, document: dict[str, Any]) -> None:
    document[draw(st.sampled_from(ODD_NAMES))] = document.pop(draw(st.sampled_from(sorted(document))))


def _copy(draw: st.DrawFn, document: dict[str, Any]) -> None:
    document[draw(st.sampled_from(ODD_NAMES))] = copy.deepcopy(_some(draw, document))


def _recursive(draw: st.DrawFn, document: dict[str, Any]) -> None:
    """Put a copy of an entry into the entry itself. Repeating this nests it more deeply."""
    entry = _some(draw, document)
    entry[draw(st.sampled_from(["shape", "data_offsets", "dtype"]))] = copy.deepcopy(entry)


_CHANGES = {
    "value": _value, "number": _number, "overlap": _overlap, "name": _name, "copy": _copy, "recursive": _recursive
}  # fmt: skip


def _file(text: bytes, num_body_bytes: int) -> bytes:
    return len(text).to_bytes(8, "little") + text + bytes(min(max(num_body_bytes, 0), 10_000))


def _read(data: bytes) -> Header | None:
    """Return the header, or None if the reader refuses it or it does not match the length of the file.

    If the header is returned, the library has read the same tensors.
    """
    header, refusal = None, ""
    try:
        header = read_header(io.BytesIO(data))
    except ArtifactError as error:
        refusal = str(error)
    assert len(refusal) < 500
    refusal.encode()
    if header is None:
        return None
    if header.total_bytes != len(data):
        return None  # the API refuses it next, without reading the body
    try:
        loaded = load(data)
    except SafetensorError as error:
        raise AssertionError(f"accepted, but {error}: {header.text!r}") from None
    assert {name: tuple(array.shape) for name, array in loaded.items()} == {e.name: e.shape for e in header.entries}
    return header


@pytest.mark.full
@FUZZ
@given(changed())
def test_a_changed_header_is_refused_or_read_as_the_library_does(pair: tuple[dict[str, Any], dict[str, Any]]) -> None:
    right, wrong = pair
    specs = tuple(TensorSpec(name=n, dtype=e["dtype"], shape=tuple(e["shape"])) for n, e in right.items())
    size = max(entry["data_offsets"][1] for entry in right.values())
    header = _read(_file(json.dumps(wrong).encode("utf-8", "surrogatepass"), size))
    if header is None or wrong == right:
        return
    with pytest.raises(ArtifactError):  # even a readable header is not the declared one
        check_header(header, specs, "update")


@FUZZ
@given(tensors, st.data())
def test_changed_bytes_are_refused_or_read_as_the_library_does(
    shapes: dict[str, tuple[str, list[int]]], data: st.DataObject
) -> None:
    """Bytes are replaced, doubled and removed. This gives duplicate keys, truncated JSON and wrong lengths."""
    document = _header(shapes)
    file = bytearray(_file(json.dumps(document).encode(), max(e["data_offsets"][1] for e in document.values())))
    for _ in range(data.draw(st.integers(1, 4))):
        at, behind = sorted((data.draw(st.integers(0, len(file))), data.draw(st.integers(0, len(file)))))
        part = bytes(file[at : min(behind, at + 40)])
        file[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3) | st.just(part))
    _read(bytes(file))


@pytest.mark.parametrize("depth", [10, 1000, 50_000])
@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")], ids=["lists", "objects"])
def test_deeply_nested_headers_are_refused(depth: int, opening: str, closing: str) -> None:
    nested = opening * depth + "1" + closing * depth
    text = ('{"a":{"dtype":"F32","data_offsets":[0,4],"shape":' + nested + "}}").encode()
    assert _read(_file(text, 4)) is None


@pytest.mark.parametrize("length", [2**20, 2**40, 2**63, 2**64 - 1])
def test_a_header_with_a_huge_length_is_refused(length: int) -> None:
    with pytest.raises(ArtifactError):
        read_header(io.BytesIO(length.to_bytes(8, "little") + b"{}"), limit=max_header_bytes(()) + 64)
