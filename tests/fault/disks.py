"""Full disks: a small one that is mounted for the test, filled to the last byte, and emptied again."""

import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_BYTES = 8 << 20
_MOUNT = ("mount", "-t", "tmpfs", "-o", f"size={_BYTES},mode=0700", "fault")
_FEW_BYTES = 8192  # fewer than an update has, but more than a log gets within seconds


@contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """Mount a disk of 8 MiB at `folder`. Yields whether it is mounted, which the user may not be allowed to do."""
    folder.mkdir(parents=True, exist_ok=True)
    with suppress(FileNotFoundError):
        if subprocess.run([*_MOUNT, str(folder)], capture_output=True, check=False).returncode == 0:
            try:
                yield True
            finally:
                # Lazily, because a process that is being killed may still have a file open on it.
                subprocess.run(["umount", "--lazy", str(folder)], check=True)
            return
    yield False


@contextmanager
def filled_disk(folder: Path) -> Iterator[None]:
    """Fill the disk during the block."""
    ballast = folder / "ballast"
    try:
        with ballast.open("wb", buffering=0) as file, suppress(OSError):
            for size in (1 << 16, 1):
                with suppress(OSError):
                    while file.write(b"\0" * size):
                        pass
        yield
    finally:
        ballast.unlink()


@contextmanager
def unable_to_write(pid: int, log: Path) -> Iterator[None]:
    """Empty the log, and limit the process to files of 8 KiB during the block, if the user cannot mount a disk."""
    log.write_bytes(b"")
    soft, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (_FEW_BYTES, hard))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, hard))
