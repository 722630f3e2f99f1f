"""Writing tensors to files and reading them: equal tensors give equal bytes."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedssl.artifacts.header import check_header, parse_header
from fedssl.artifacts.tensors import (
    DTYPES,
    check_file,
    check_tensors,
    in_name_order,
    load_tensors,
    save_tensors,
    serialised,
    serialised_parts,
)
from fedssl.errors import PlanMismatch
from fedssl.protocol.plan import TensorSpec

# Artifacts are named by the sha256 of these bytes: a change here would change every stored digest.
GOLDEN = (
    b"p\x00\x00\x00\x00\x00\x00\x00"
    b'{"b":{"dtype":"I64","shape":[],"data_offsets":[0,8]},"a":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}}     '
    b"\x03\x00\x00\x00\x00\x00\x00\x00" + b"\x00\x00\x80?\x00\x00\x00@"
)


def _tensors() -> dict[str, torch.Tensor]:
    return {"b": torch.tensor(3), "a": torch.tensor([1.0, 2.0])}


def test_the_order_of_the_names_has_no_influence() -> None:
    one, two = _tensors(), dict(reversed(_tensors().items()))
    assert serialised(one) == serialised(two)
    assert list(in_name_order(one)) == ["a", "b"]


def test_the_bytes_equal_the_golden_file() -> None:
    assert serialised(_tensors()) == GOLDEN
    assert b"".join(serialised_parts(_tensors())) == GOLDEN


def test_strides_gradients_and_shared_memory_have_no_influence(tmp_path: Path) -> None:
    base = torch.arange(6.0).reshape(2, 3)
    views = {"t": base.T, "same": base.T, "grad": torch.nn.Parameter(base)}
    copies = {"t": base.T.contiguous(), "same": base.T.clone(), "grad": base.clone()}
    assert serialised(views) == serialised(copies) == b"".join(serialised_parts(views))
    save_tensors(views, tmp_path / "file")
    assert torch.equal(load_tensors(tmp_path / "file")["t"], base.T)


@given(st.sampled_from(sorted(DTYPES, key=str)), st.lists(st.integers(0, 3), max_size=4), st.integers(0, 9))
def test_every_dtype_and_shape_gives_a_valid_file(dtype: torch.dtype, shape: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensor = (torch.rand(shape, generator=generator) * 100).to(dtype)
    data = serialised({"x": tensor})
    assert b"".join(serialised_parts({"x": tensor})) == data
    length = int.from_bytes(data[:8], "little")
    header = parse_header(data[8 : 8 + length])
    check_header(header, (TensorSpec(name="x", dtype=DTYPES[dtype], shape=tuple(shape)),), "file")
    assert len(data) == header.total_bytes


def test_check_tensors_and_check_file_compare_with_the_plan(tmp_path: Path) -> None:
    declared = (TensorSpec(name="a", dtype="F32", shape=(2,)), TensorSpec(name="b", dtype="I64", shape=()))
    save_tensors(_tensors(), tmp_path / "file")
    check_tensors(_tensors(), declared, "update")
    check_file(tmp_path / "file", declared, "update")
    for wrong in (declared[:1], (*declared, TensorSpec(name="c", dtype="U8", shape=())), declared[::-1][:1]):
        with pytest.raises(PlanMismatch, match="the update does not match the method's artifact plan"):
            check_tensors(_tensors(), wrong, "update")
        with pytest.raises(PlanMismatch, match="the update does not match the method's artifact plan"):
            check_file(tmp_path / "file", wrong, "update")
