"""Files whose digest is checked while they are read."""

import hashlib
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from fedssl.artifacts.checked import CHUNK, checked_file, read_checked
from fedssl.artifacts.tensors import FileTensors, read_tensors, save_tensors, serialised
from fedssl.errors import ArtifactDamaged, ArtifactError

TENSORS = {
    "a": torch.arange(12.0).reshape(3, 4),
    "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "n": torch.tensor(3),
    "none": torch.empty(0, 5),
    "odd": torch.tensor([1, 2, 255], dtype=torch.uint8),
    "w": torch.tensor([7, 8], dtype=torch.int16),
}


def _file(tmp_path: Path, content: bytes | None = None) -> tuple[Path, str]:
    content = serialised(TENSORS) if content is None else content
    (tmp_path / "file").write_bytes(content)
    return tmp_path / "file", hashlib.sha256(content).hexdigest()


def test_the_tensors_read_are_those_written(tmp_path: Path) -> None:
    path, digest = _file(tmp_path)
    found = read_tensors(path, digest)
    assert list(found) == sorted(TENSORS)
    for name, tensor in TENSORS.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name], tensor)


def test_tensors_of_an_open_file_are_read_one_by_one_or_in_pieces(tmp_path: Path) -> None:
    path, _ = _file(tmp_path)
    with path.open("rb", buffering=0) as file:
        found = FileTensors(file)
        assert list(found) == sorted(TENSORS)
        for name, tensor in TENSORS.items():
            assert found[name].dtype == tensor.dtype
            assert torch.equal(found[name], tensor)
            pieces = list(found.pieces(name, 5))
            assert [len(piece) for piece in pieces] == [len(part) for part in torch.split(tensor.reshape(-1), 5)]
            assert torch.equal(torch.cat(pieces), tensor.reshape(-1))
        os.truncate(path, path.stat().st_size - 1)
        with pytest.raises(ArtifactError, match="the file ends within tensor odd"):
            found["odd"]
        file.seek(0)
        with pytest.raises(ArtifactError, match="bytes, but its header describes"):
            FileTensors(file)


def test_tensors_that_were_read_do_not_change_with_the_file(tmp_path: Path) -> None:
    """The bytes that were hashed are the bytes that are used. A memory map would show later changes on disk."""
    path, digest = _file(tmp_path)
    found = read_tensors(path, digest)
    save_tensors({name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}, tmp_path / "zeros")
    with path.open("r+b") as file:
        file.write((tmp_path / "zeros").read_bytes())
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())


@pytest.mark.parametrize("at", [0, 7, 8, 30, -200, -1], ids=lambda at: f"byte {at}")
@pytest.mark.parametrize("bit", [0, 7])
def test_a_flipped_bit_is_detected(tmp_path: Path, at: int, bit: int) -> None:
    path, digest = _file(tmp_path)
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << bit
    path.write_bytes(content)
    with pytest.raises(
        ArtifactDamaged, match=f"{digest} has other bytes: their sha256 is {hashlib.sha256(content).hexdigest()}"
    ):
        read_tensors(path, digest)


@pytest.mark.parametrize("change", ["cut", "cut to its header", "empty", "appended", "a hole at the end"])
def test_a_changed_length_is_detected(tmp_path: Path, change: str) -> None:
    path, digest = _file(tmp_path)
    content = path.read_bytes()
    path.write_bytes(
        {
            "cut": content[:-1],
            "cut to its header": content[:100],
            "empty": b"",
            "appended": content + b"x",
            "a hole at the end": content + bytes(3 * CHUNK),
        }[change]
    )
    with pytest.raises(ArtifactDamaged, match=digest):
        read_tensors(path, digest)


def test_a_missing_file_raises_file_not_found(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_checked(tmp_path / "file", "0" * 64)


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK])
def test_files_of_every_length_are_read_whole(tmp_path: Path, size: int) -> None:
    content = np.random.default_rng(0).bytes(size)
    path, digest = _file(tmp_path, content)
    assert read_checked(path, digest).tobytes() == content
    with pytest.raises(ArtifactDamaged):
        read_checked(path, "0" * 64)


def test_a_file_that_grows_while_it_is_read_is_reported_as_damaged(tmp_path: Path) -> None:
    path, digest = _file(tmp_path, b"abc")
    with checked_file(path) as file:
        assert file.read(10).tobytes() == b"abc"
        with path.open("ab") as more:
            more.write(b"d")
        with pytest.raises(ArtifactDamaged):
            file.require(digest)


def test_an_intact_file_without_tensors_is_not_reported_as_damaged(tmp_path: Path) -> None:
    for content in (b"", b"\x00" * 8, b"\xff" * 100, serialised(TENSORS) + b"x"):
        path, digest = _file(tmp_path, content)
        with pytest.raises(ArtifactError) as caught:
            read_tensors(path, digest)
        assert not isinstance(caught.value, ArtifactDamaged)
