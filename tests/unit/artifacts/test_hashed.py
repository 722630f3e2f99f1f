"""A file that is hashed while it is read."""

import hashlib
import io
from pathlib import Path

import pytest

from fedssl.artifacts.hashed import HashedFile
from fedssl.errors import DigestMismatch

CONTENT = bytes(range(256)) * 9000


@pytest.mark.parametrize("position", [0, 10, 2_000_000, len(CONTENT)])
def test_skipped_and_unread_bytes_are_hashed_too(position: int) -> None:
    file = HashedFile(io.BytesIO(CONTENT))
    assert file.read(10) == CONTENT[:10]
    file.seek(max(position, 10))
    assert file.read(5) == CONTENT[max(position, 10) :][:5]
    file.require(hashlib.sha256(CONTENT).hexdigest())


def test_other_bytes_are_refused() -> None:
    file = HashedFile(io.BytesIO(CONTENT[:-1]))
    with pytest.raises(DigestMismatch, match="send them again"):
        file.require(hashlib.sha256(CONTENT).hexdigest())


def test_appended_bytes_are_hashed_without_reading_them(tmp_path: Path) -> None:
    path, cut = tmp_path / "file", len(CONTENT) // 2
    path.write_bytes(CONTENT[:cut])
    with path.open("rb", buffering=0) as opened:
        file = HashedFile(opened)
        file.seek(cut)
        with path.open("ab") as end:
            end.write(CONTENT[cut:])
        file.add([CONTENT[cut : cut + 10], bytearray(CONTENT[cut + 10 : -5])])
        file.require(hashlib.sha256(CONTENT).hexdigest())
        assert file.is_at(path)
        (tmp_path / "other").write_bytes(CONTENT)
        (tmp_path / "other").replace(path)
        assert not file.is_at(path)
