"""Atomic writes: a file has its old content or its new content, never a part."""

import errno
import os
import stat
from pathlib import Path

import pytest

from fedssl.files import replaced_file, write_atomically, write_private


def test_a_block_that_raises_leaves_the_old_content_and_no_other_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def fail_halfway() -> None:
        with replaced_file(path) as incoming:
            incoming.write_text("ne")
            raise ValueError("half")

    with pytest.raises(ValueError, match="half"):
        fail_halfway()

    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_error_names_the_file(tmp_path: Path) -> None:
    """The operating system's error names no file if the file was already open."""
    path = tmp_path / "file"
    with pytest.raises(OSError, match=f"No space left on device: '{path}'"), replaced_file(path):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_device_or_pipe_is_not_replaced(tmp_path: Path) -> None:
    """The rename would succeed for a privileged user, and remove the device."""
    path = tmp_path / "pipe"
    os.mkfifo(path)

    with pytest.raises(OSError, match="is a device or a pipe"):
        write_atomically(path, "new")

    assert list(tmp_path.iterdir()) == [path]
    assert path.is_fifo()


@pytest.mark.parametrize("durable", [True, False])
def test_content_is_replaced(tmp_path: Path, *, durable: bool) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    write_atomically(path, "n\u00e9w", durable=durable)

    assert path.read_bytes() == "n\u00e9w".encode()
    assert list(tmp_path.iterdir()) == [path]


def test_a_private_file_is_private_even_if_a_killed_process_left_a_public_one(tmp_path: Path) -> None:
    path = tmp_path / "token"
    (tmp_path / ".token.incoming").write_text("left behind")
    (tmp_path / ".token.incoming").chmod(0o644)

    write_private(path, "secret")

    assert path.read_text() == "secret"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
