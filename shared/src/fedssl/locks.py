"""Locks between processes, on an open file or on a folder."""

import fcntl
import os
import time
from pathlib import Path
from typing import IO

from fedssl.errors import FolderInUseError, LocalError

# How long processes that a killed holder has started may take to end.
AFTERLIFE_SECONDS = 10.0


def lock(file: int | IO[bytes], *, shared: bool = False) -> None:
    """Wait for the lock on an open file or folder. Closing the file releases it."""
    fcntl.flock(file, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)


def try_lock(file: int | IO[bytes]) -> bool:
    """Take the exclusive lock on an open file. Return False if another process has it. Closing the file releases it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_alive(pid: int) -> bool:
    """Return whether the process exists and is not a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return not Path("/proc/self").exists()
    return stat.rpartition(b")")[2].split()[0] not in (b"Z", b"X")


class FolderLock:
    """An exclusive lock on `folder`, held through the file `folder/<name>`, which contains the pid of the holder.

    The kernel releases the lock when the last process with the descriptor ends. A process that outlives the holder,
    such as a subreaper, can inherit the descriptor: the folder then stays locked until that process ends too.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._path = folder / name
        self._descriptor: int | None = None

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The open descriptor, for another process to inherit, or nothing while the lock is not held."""
        return () if self._descriptor is None else (self._descriptor,)

    def acquire(self) -> None:
        """Take the lock, unless this object already has it. Creates the folder (mode 0700).

        Raises:
            FolderInUseError: a living process holds the lock, or processes of a dead one do not end.
            LocalError: this user may not write to the folder.
        """
        if self._descriptor is not None:
            return
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        except PermissionError as error:
            raise LocalError(f"{error}: choose a folder of your own, or run this as its owner") from None
        deadline = time.monotonic() + AFTERLIFE_SECONDS
        while not try_lock(descriptor):
            holder = self._holder()
            if (holder and is_alive(holder)) or time.monotonic() > deadline:
                os.close(descriptor)
                raise FolderInUseError(self._folder, holder)
            time.sleep(0.05)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        self._descriptor = descriptor

    def release(self) -> None:
        """Release the lock, if it is held. The file stays."""
        if self._descriptor is None:
            return
        descriptor, self._descriptor = self._descriptor, None
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)

    def _holder(self) -> int:
        """Return the pid in the file, or 0 if there is none."""
        text = self._path.read_text(encoding="ascii").strip()
        return int(text) if text.isdigit() else 0
