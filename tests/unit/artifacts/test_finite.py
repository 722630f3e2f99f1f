"""NaN and infinity are found at every position, and all other values pass."""

import io
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from fedssl.artifacts import finite
from fedssl.artifacts.finite import InMemory, check_finite, check_finite_in
from fedssl.artifacts.hashed import HashedFile
from fedssl.artifacts.header import parse_header, read_header
from fedssl.artifacts.tensors import DTYPES
from fedssl.errors import ArtifactError, NotFinite

FLOATS = [dtype for dtype in DTYPES if dtype.is_floating_point]
WHOLE = [dtype for dtype in DTYPES if not dtype.is_floating_point]


def _check(folder: Path, **tensors: torch.Tensor) -> None:
    path = folder / "file"
    path.write_bytes(save(tensors))
    with path.open("rb") as file:
        header = read_header(file)
    check_finite(path, header)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("position", [0, 1, 3, 4, 5, 8, 9])
def test_one_bad_value_is_found_at_every_position(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, value: float, position: int
) -> None:
    monkeypatch.setattr(finite, "_CHUNK", 4)  # values at the edges of pieces
    tensor = torch.ones(10, dtype=dtype)
    tensor[position] = value
    with pytest.raises(NotFinite, match="tensor bad holds NaN or infinity: training diverged"):
        _check(tmp_path, good=torch.ones(10, dtype=dtype), bad=tensor)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_finite_extremes_pass(tmp_path: Path, dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    smallest = float(info.smallest_normal) / 2  # subnormal
    _check(tmp_path, x=torch.tensor([info.max, info.min, info.tiny, smallest, -smallest, 0.0, -0.0], dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_all_bit_patterns_of_sixteen_bit_floats_are_classified(tmp_path: Path, dtype: torch.dtype) -> None:
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    finite_ones = patterns[torch.isfinite(patterns)]
    _check(tmp_path, x=finite_ones)
    for pattern in patterns[~torch.isfinite(patterns)][::37]:
        with pytest.raises(NotFinite):
            _check(tmp_path, x=torch.cat([finite_ones[:5], pattern.reshape(1)]))


@pytest.mark.parametrize("dtype", WHOLE, ids=str)
def test_integers_always_pass(tmp_path: Path, dtype: torch.dtype) -> None:
    info = torch.iinfo(dtype)
    _check(tmp_path, x=torch.tensor([info.min, info.max, -1 if info.min else 0], dtype=dtype))


def test_integers_whose_bytes_would_be_nan_as_floats_pass(tmp_path: Path) -> None:
    _check(tmp_path, x=torch.full((64,), 0xFF, dtype=torch.uint8), y=torch.full((8,), -1, dtype=torch.int64))


@pytest.mark.parametrize("shape", [(0,), (3, 0, 2), ()])
def test_empty_and_scalar_tensors_pass(tmp_path: Path, shape: tuple[int, ...]) -> None:
    _check(tmp_path, x=torch.ones(shape))


def test_a_scalar_nan_is_found(tmp_path: Path) -> None:
    with pytest.raises(NotFinite, match="tensor x"):
        _check(tmp_path, x=torch.tensor(math.nan))


@pytest.mark.parametrize("missing", [1, 3, 4, 40])
def test_a_file_that_is_too_short_is_refused_without_an_endless_loop(tmp_path: Path, missing: int) -> None:
    data = save({"x": torch.ones(10)})
    path = tmp_path / "file"
    path.write_bytes(data[:-missing])
    header = parse_header(data[8 : len(data) - 40])
    with pytest.raises(ArtifactError, match="the file ends within tensor x"):
        check_finite(path, header)


def test_bytes_in_memory_are_checked_like_a_file() -> None:
    whole = torch.ones(2, dtype=torch.int64)
    data = save({"a": torch.ones(3, 5), "b": whole, "c": torch.ones(15)})
    header = read_header(io.BytesIO(data))
    check_finite_in(InMemory(data), header)
    with pytest.raises(ArtifactError, match="the file ends within tensor c"):
        check_finite_in(InMemory(data[:-4]), header)
    data = save({"a": torch.ones(3), "b": whole, "c": torch.tensor([1.0, math.inf]), "d": torch.ones(4)})
    with pytest.raises(NotFinite, match="tensor c holds"):
        check_finite_in(InMemory(data), read_header(io.BytesIO(data)))


def test_a_file_can_be_checked_while_it_is_hashed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(save({"a": torch.ones(3), "b": torch.tensor([1.0, math.nan]), "c": torch.ones(4)}))
    with path.open("rb") as file:
        header = read_header(file)
        file.seek(0)
        with pytest.raises(NotFinite, match="tensor b holds"):
            check_finite_in(HashedFile(file), header)
