"""The header parser is strict, raises only ArtifactError, and agrees with the safetensors library."""

import io
import json
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.numpy import save as save_numpy
from safetensors.torch import load as load_torch
from safetensors.torch import save as save_torch

from fedssl.artifacts.dtypes import ITEM_SIZES
from fedssl.artifacts.header import (
    Header,
    TensorEntry,
    check_header,
    header_length,
    max_file_bytes,
    max_header_bytes,
    num_bytes,
    parse_header,
    read_header,
)
from fedssl.errors import ArtifactError, ArtifactTooLarge, PlanMismatch
from fedssl.protocol.plan import TensorSpec

PLAIN = '{"a":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]},"b":{"dtype":"U8","shape":[3],"data_offsets":[8,11]}}'
SPECS = (TensorSpec(name="a", dtype="F32", shape=(2, 1)), TensorSpec(name="b", dtype="U8", shape=(3,)))

_NUMPY = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "|i1", "U8": "|u1"}
names = st.from_regex(r"\A[A-Za-z0-9_]{1,20}(\.[A-Za-z0-9_]{1,20}){0,3}\Z")
shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)
arrays = st.dictionaries(names, st.tuples(st.sampled_from(sorted(_NUMPY)), shapes), max_size=6)


def _filled_up(text: bytes) -> bytes:
    """Return the header padded with spaces, so that the tensors begin at a multiple of 8 bytes."""
    return text + b" " * (-len(text) % 8)


def _file(header: str | bytes, body: bytes = b"") -> bytes:
    text = header.encode() if isinstance(header, str) else header
    return len(text).to_bytes(8, "little") + text + body


def test_an_ordinary_header_is_parsed() -> None:
    header = parse_header(PLAIN.encode())
    assert header == Header(
        entries=(TensorEntry("a", "F32", (2, 1), 0, 8), TensorEntry("b", "U8", (3,), 8, 11)), data_start=8 + len(PLAIN)
    )
    assert header.total_bytes == 8 + len(PLAIN) + 11
    header = parse_header(_filled_up(PLAIN.encode()))
    check_header(header, SPECS, "update")
    check_header(header, SPECS[::-1], "update")  # the plan's order differs from the file's


def test_a_header_without_tensors_is_valid() -> None:
    assert parse_header(b"{}") == Header(entries=(), data_start=10)
    assert parse_header(b"{}").total_bytes == 10
    check_header(parse_header(_filled_up(b"{}")), (), "update")


def test_entries_are_sorted_by_their_byte_positions() -> None:
    turned = json.dumps(dict(reversed(json.loads(PLAIN).items())))
    assert [entry.name for entry in parse_header(turned.encode()).entries] == ["a", "b"]


def test_trailing_spaces_are_part_of_the_header() -> None:
    assert parse_header(PLAIN.encode() + b"   ").data_start == 8 + len(PLAIN) + 3


BAD: dict[str, tuple[str | bytes, str]] = {
    "nothing": (b"", "not a JSON object"),
    "an array": ("[]", "not a JSON object"),
    "a space in front": (" {}", "not a JSON object"),
    "a byte order mark": (b"\xef\xbb\xbf{}", "not a JSON object"),
    "two objects": ("{}{}", "cannot be read"),
    "not UTF-8": (b'{"\xff":1}', "cannot be read"),
    "nested": ('{"a":' * 100_000, "cannot be read"),
    "a number of 5000 digits": ('{"a":' + "9" * 5000 + "}", "cannot be read"),
    "minus zero": (PLAIN.replace("[0,", "[-0,"), "cannot be read"),
    "a leading zero": (PLAIN.replace("[2,1]", "[02,1]"), "cannot be read"),
    "a control character in a name": ('{"a\nb":1}', "cannot be read"),
    "a name twice": ('{"a":1,"a":1}', "a name occurs twice"),
    "a key twice": (PLAIN.replace('"shape":[3]', '"shape":[3],"shape":[3]'), "a name occurs twice"),
    "metadata": ('{"__metadata__":{}}', "__metadata__"),
    "half a character in a name": ('{"\\ud800":[]}', "tensor '\\\\ud800': its name holds half a character"),
    "an entry that is none": ('{"a":[]}', "tensor a: needs exactly"),
    "a missing key": ('{"a":{"dtype":"F32","shape":[]}}', "tensor a: needs exactly"),
    "a key too many": (PLAIN.replace('"shape":[3]', '"shape":[3],"x":0'), "tensor b: needs exactly"),
    "an unknown dtype": (PLAIN.replace("U8", "BOOL"), "tensor b: dtype must be one of F64, F32"),
    "a dtype in small letters": (PLAIN.replace("U8", "u8"), "tensor b: dtype must be one of"),
    "a size of 2**63": (PLAIN.replace("[3]", "[9223372036854775808]"), "none negative"),
    "a size with a point": (PLAIN.replace("[3]", "[3.0]"), "none negative"),
    "a size that is true": (PLAIN.replace("[3]", "[true]"), "none negative"),
    "sizes that overflow beside a zero": (
        PLAIN.replace("[3]", "[0,9223372036854775807,3]").replace("[8,11]", "[8,8]"),
        "more bytes than can be addressed",
    ),
    "bytes that overflow beside a zero": (
        PLAIN.replace("[3]", "[0,4611686018427387904,2]").replace("[8,11]", "[8,8]"),
        "more bytes than can be addressed",
    ),
    "infinity": (PLAIN.replace("[3]", "[Infinity]"), "none negative"),
    "nine dimensions": (PLAIN.replace("[3]", "[1,1,1,1,1,1,1,1,3]"), "at most 8 sizes"),
    "three offsets": (PLAIN.replace("[8,11]", "[8,11,11]"), "two byte positions"),
    "offsets turned round": (PLAIN.replace("[8,11]", "[11,8]"), "span another size"),
    "a byte too many": (PLAIN.replace("[8,11]", "[8,12]"), "span another size"),
    "a gap": (PLAIN.replace("[8,11]", "[9,12]"), "tensor b: its bytes leave a gap"),
    "a gap at the beginning": (PLAIN.replace("[0,8]", "[1,9]").replace("[8,11]", "[9,12]"), "tensor a: its bytes"),
    "an overlap": (PLAIN.replace("[8,11]", "[7,10]"), "or overlap another's"),
    "the same bytes twice": (PLAIN.replace("[8,11]", "[0,3]"), "or overlap another's"),
}


@pytest.mark.parametrize("case", BAD)
def test_invalid_headers_are_refused(case: str) -> None:
    text, what = BAD[case]
    with pytest.raises(ArtifactError, match=what.replace("(", r"\(")) as caught:
        parse_header(text.encode() if isinstance(text, str) else text)
    assert len(str(caught.value)) < 400


@given(st.binary(max_size=300))
def test_any_bytes_are_parsed_or_refused_with_an_artifact_error(data: bytes) -> None:
    for text in (data, b"{" + data, b'{"a":' + data + b"}"):
        try:
            parse_header(text)
        except ArtifactError:
            continue
    try:
        read_header(io.BytesIO(data))
    except ArtifactError:
        return


_scalars = st.none() | st.booleans() | st.integers(-5, 2**65) | st.floats() | st.text(max_size=5)
_odd = st.recursive(
    _scalars | st.sampled_from(["F32", "U8"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
_entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(sorted(ITEM_SIZES)) | _odd,
        "shape": st.lists(st.integers(-1, 5), max_size=3) | _odd,
        "data_offsets": st.lists(st.integers(-1, 30), min_size=2, max_size=2) | _odd,
    }
)


@given(st.dictionaries(st.text(max_size=4) | st.just("__metadata__"), _entries | _odd, max_size=4))
def test_any_json_is_parsed_or_refused_with_an_artifact_error(document: dict[str, Any]) -> None:
    try:
        header = parse_header(json.dumps(document).encode())
    except ArtifactError:
        return
    assert {entry.name for entry in header.entries} == document.keys()
    ends = [0, *(entry.stop for entry in header.entries)]
    assert [entry.start for entry in header.entries] == ends[:-1]


@given(arrays)
def test_files_of_the_library_are_read(tensors: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    data = save_numpy({name: np.zeros(shape, _NUMPY[dtype]) for name, (dtype, shape) in tensors.items()})
    specs = tuple(TensorSpec(name=name, dtype=dtype, shape=shape) for name, (dtype, shape) in tensors.items())  # type: ignore[arg-type]
    header = read_header(io.BytesIO(data))
    check_header(header, specs, "update")
    assert header.total_bytes == len(data) <= max_file_bytes(specs)
    assert header_length(data[:8], max_header_bytes(specs)) == header.data_start - 8
    for entry in header.entries:
        assert (entry.dtype, entry.shape) == tensors[entry.name]
        assert entry.stop - entry.start == num_bytes(entry.dtype, entry.shape)


_OLD = ["0", "8", "3", ",", ":", "{", "}", "[", "]", "F32", '"a"', '"b"', '"dtype"', "2,1"]
_NEW = ["", " ", "\n", "\t", "\x0b", "\xa0", "-0", "0", "00", "1", "8", "+8", "8e0", "8.0", "0.0", '"\\u0061"',
        '"\\ud800"', '"\\/"', "]", "[]", "NaN", "null", "BF16", "F16", '"a" ', "{}", "\x00",
        "\ufeff", "\u2028", "// x"]  # fmt: skip


def _edits() -> Iterator[str]:
    """Yield copies of the plain header with one change: a piece is replaced, or another is added before or after it."""
    for old, new in product(_OLD, _NEW):
        parts = PLAIN.split(old)
        for at in range(1, len(parts)):
            before, behind = old.join(parts[:at]), old.join(parts[at:])
            yield from (before + change + behind for change in (new, new + old, old + new))


def test_accepted_headers_never_fail_in_the_library() -> None:
    """An aggregator uses the library to open the files that the API accepts. The library must read the same tensors."""
    num_accepted = 0
    for text in _edits():
        try:
            header = parse_header(text.encode())
        except ArtifactError:
            continue
        num_accepted += 1
        data = _file(text, bytes(header.total_bytes - header.data_start))
        try:
            loaded = load_torch(data)
        except SafetensorError as error:
            raise AssertionError(f"accepted, but {error}: {text}") from None
        assert {name: tuple(t.shape) for name, t in loaded.items()} == {e.name: e.shape for e in header.entries}
    assert num_accepted > 100


def test_the_longest_names_and_sizes_fit_the_limit() -> None:
    shape = (0, *[255] * 7)  # fewer than 2**63 bytes cannot have more digits
    specs = tuple(TensorSpec(name="n" * 250 + f".{i:05d}", dtype="BF16", shape=shape) for i in range(3))
    entry = {"dtype": "BF16", "shape": shape, "data_offsets": [0, 0]}
    text = _filled_up(json.dumps({spec.name: entry for spec in specs}, separators=(",", ":")).encode())
    check_header(parse_header(text), specs, "update")
    room_for_offsets = 2 * 18 * len(specs)  # digits, if there were more tensors before these
    assert len(text) + room_for_offsets + 8 <= max_header_bytes(specs)


def test_bfloat16_is_accepted() -> None:
    data = save_torch({"x": torch.ones(3, dtype=torch.bfloat16)})
    spec = TensorSpec(name="x", dtype="BF16", shape=(3,))
    check_header(read_header(io.BytesIO(data)), (spec,), "update")
    assert len(data) <= max_file_bytes((spec,))


DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
          "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8}  # fmt: skip


def test_the_only_permitted_form_is_the_librarys() -> None:
    """A file written by the library is accepted. It has two tensors of each type, and their names are not sorted."""
    tensors = {f"{name}.{dtype}": torch.zeros(2, 1, dtype=kind) for dtype, kind in DTYPES.items() for name in "ba"}
    specs = tuple(TensorSpec(name=name, dtype=name.split(".")[1], shape=(2, 1)) for name in tensors)  # type: ignore[arg-type]
    assert ITEM_SIZES.keys() == DTYPES.keys()
    check_header(read_header(io.BytesIO(save_torch(tensors))), specs, "update")


TURNED = {
    "b": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
    "a": {"dtype": "F32", "shape": [2, 1], "data_offsets": [3, 11]},
}
OTHER_FORMS: dict[str, bytes] = {
    "more spaces behind": _filled_up(PLAIN.encode()) + b" " * 8,
    "no spaces behind": PLAIN.encode(),
    "tabs behind": _filled_up(PLAIN.encode()).replace(b" ", b"\t"),
    **{
        name: _filled_up(text.encode())
        for name, text in {
            "a space within": PLAIN.replace(",", ", ", 1),
            "a line break within": PLAIN.replace(":", ":\n", 1),
            "a letter spelt otherwise": PLAIN.replace('"a"', '"\\u0061"'),
            "the names in another order": json.dumps(dict([*json.loads(PLAIN).items()][::-1]), separators=(",", ":")),
            "the keys in another order": PLAIN.replace('"dtype":"U8","shape":[3]', '"shape":[3],"dtype":"U8"'),
            "the tensors in another order": json.dumps(TURNED, separators=(",", ":")),
        }.items()
    },
}


@pytest.mark.parametrize("case", OTHER_FORMS)
def test_the_right_tensors_in_another_form_are_refused(case: str) -> None:
    """Another form could hide information in an update whose tensors are as declared."""
    header = parse_header(OTHER_FORMS[case])
    with pytest.raises(ArtifactError, match="not in the only permitted form") as caught:
        check_header(header, SPECS, "update")
    assert not isinstance(caught.value, PlanMismatch)


@pytest.mark.parametrize("cut", [0, 7, 8, 20])
def test_a_file_that_ends_within_its_header_is_refused(cut: int) -> None:
    with pytest.raises(ArtifactError, match="the file ends within its"):
        read_header(io.BytesIO(_file(PLAIN)[:cut]))


def test_a_header_that_is_too_long_is_refused() -> None:
    assert header_length((100).to_bytes(8, "little"), 100) == 100
    for length in (101, 2**63, 2**64 - 1):
        with pytest.raises(ArtifactTooLarge, match=f"the header claims {length} bytes; at most 100 are possible here"):
            header_length(length.to_bytes(8, "little"), 100)


def test_every_difference_from_the_plan_is_reported() -> None:
    header = parse_header(PLAIN.encode())
    with pytest.raises(PlanMismatch) as caught:
        check_header(
            header, (SPECS[0].model_copy(update={"shape": (1, 2)}), TensorSpec(name="c", dtype="U8", shape=())), "x"
        )
    assert str(caught.value) == (
        "the x does not match the method's artifact plan: missing: c; not declared: b; "
        "a is F32[2, 1], declared F32[1, 2]"
    )


def test_many_differences_are_shortened_to_one_message() -> None:
    entries = {f"t{i:03}": {"dtype": "U8", "shape": [1], "data_offsets": [i, i + 1]} for i in range(300)}
    header = parse_header(json.dumps(entries).encode())
    with pytest.raises(PlanMismatch, match=r"not declared: t000, t001, t002, t003, t004 and 295 more$"):
        check_header(header, (), "update")
    specs = tuple(TensorSpec(name=name, dtype="I8", shape=(1,)) for name in entries)
    with pytest.raises(PlanMismatch, match=r"t004 is U8\[1\], declared I8\[1\]; \.\.\.$"):
        check_header(header, specs, "update")


def test_tensor_names_from_untrusted_files_are_printed_safely() -> None:
    for name in ("\x00", "\x1b[2J", "a" * 100_000, "\u202eevil"):
        entry = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
        header = parse_header(json.dumps({name: entry}).encode())
        with pytest.raises(PlanMismatch) as caught:
            check_header(header, (), "update")
        message = str(caught.value)
        assert message.isprintable()
        assert len(message) < 300
        message.encode()
