"""Writes files so that a crash leaves their old content or their new content, never a part of it."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def replaced_file(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """Yield a path next to `path` to write to, and rename it to `path` at the end of the block.

    If the block raises, `path` keeps its content and the new file is removed; the error of a full disk, or of
    a file that is too large for it, names `path`.
    With `durable`, the content and the new name are on the disk when the block has ended. Raises OSError if `path` is a
    device or a pipe: for a privileged user, the rename would remove /dev/null.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError(errno.EEXIST, "it is a device or a pipe, not a file: choose another name", str(path))
    incoming = path.with_name(f".{path.name}.incoming")
    try:
        yield incoming
        if durable:
            sync(incoming)
        incoming.replace(path)
    except BaseException as error:
        incoming.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno in (*NO_SPACE, errno.EFBIG) and error.filename is None:
            error.filename = str(path)
        raise
    if durable:
        sync(path.parent)


def write_atomically(path: Path, content: bytes | str, *, mode: int = 0o666, durable: bool = True) -> None:
    """Replace a file's content as `replaced_file` does. Text is written as UTF-8. The umask limits `mode`."""
    with replaced_file(path, durable=durable) as incoming:
        incoming.unlink(missing_ok=True)  # a killed process may have left it, with another mode
        with os.fdopen(os.open(incoming, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)


def write_private(path: Path, text: str) -> None:
    """Replace the content of a small file that only its owner can read (mode 0600)."""
    write_atomically(path, text, mode=0o600)


def sync(path: Path | str) -> None:
    """Wait until a file's content, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
