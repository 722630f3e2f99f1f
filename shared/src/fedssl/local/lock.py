"""A lock on a folder, held by a living process and by whatever it has started."""

import fcntl
import os
import time
from pathlib import Path

from fedssl.local.errors import FolderInUseError, LocalError

# How long the processes of a holder that was killed may take to go.
AFTERLIFE_SECONDS = 10.0


def is_alive(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
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
    """An exclusive lock on `folder` through the file `folder/<name>`, which holds the pid of its holder.

    The kernel drops it when the last process with the descriptor ends. A keeper inherits the descriptor, so that a
    folder whose holder was killed becomes free only when the last process that it started has gone.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._path = folder / name
        self._descriptor: int | None = None

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The open descriptor, for a keeper to hold; empty while the lock is not held."""
        return () if self._descriptor is None else (self._descriptor,)

    def acquire(self) -> None:
        """Take the lock, or nothing if this object has it; creates the folder (mode 0700).

        Raises:
            FolderInUseError: a living process holds it, or the processes of a dead one do not go.
            LocalError: the folder is not ours to write.
        """
        if self._descriptor is not None:
            return
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        except PermissionError as error:
            raise LocalError(f"{error}: choose a folder of your own, or run this as its owner") from None
        deadline = time.monotonic() + AFTERLIFE_SECONDS
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                holder = self._holder()
                if (holder and is_alive(holder)) or time.monotonic() > deadline:
                    os.close(descriptor)
                    raise FolderInUseError(self._folder, holder) from None
            time.sleep(0.05)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        self._descriptor = descriptor

    def release(self) -> None:
        """Give the lock back, if it is held; the file stays."""
        if self._descriptor is None:
            return
        descriptor, self._descriptor = self._descriptor, None
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)

    def _holder(self) -> int:
        text = self._path.read_text(encoding="ascii").strip()
        return int(text) if text.isdigit() else 0
