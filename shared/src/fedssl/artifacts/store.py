"""The content-addressed store: bytes are stored under their sha256, written once and never changed."""

import errno
import hashlib
import os
import re
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from fedssl.artifacts.partial import Partial, PartialFile
from fedssl.errors import ArtifactNotFound, DigestMismatch
from fedssl.files import sync

_DIGEST = re.compile(r"[0-9a-f]{64}")
_ABANDONED_SECONDS = 24 * 3600
_WRITTEN_SECONDS = 10  # bytes that are damaged later have an older modification time
_CHUNK = 1 << 20


def drop_old_files(folder: Path, seconds: float) -> list[int]:
    """Remove the files that were not written to for `seconds`, and return their sizes in bytes."""
    dropped: list[int] = []
    if not folder.is_dir():
        return dropped
    for path in folder.iterdir():
        with suppress(FileNotFoundError):  # another process removed it at the same time
            about = path.stat()
            if time.time() - about.st_mtime > seconds:
                path.unlink()
                dropped.append(about.st_size)
    return dropped


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One artifact as the store holds it. `age_seconds` have passed since its last byte was written."""

    digest: str
    num_bytes: int
    age_seconds: float


class Writer(Protocol):
    """Takes an artifact's bytes as they arrive. Nothing is visible in the store until `commit`."""

    path: Path
    """The file that has the bytes meanwhile, for checks before the commit."""

    def write(self, data: bytes | bytearray | memoryview) -> None: ...

    def flush(self) -> None:
        """Make everything written so far readable at `path`."""
        ...

    def sync(self) -> None:
        """Sync what was written so far to the disk, so that less is left for `commit`. Raises OSError.

        Another thread may write more meanwhile.
        """
        ...

    def verify(self, expected: str) -> None:
        """Raise DigestMismatch unless this is the digest of what was written so far."""
        ...

    def commit(self, expected: str | None = None) -> str:
        """Store what was written and return its digest. Raises DigestMismatch, storing nothing, if not `expected`."""
        ...


@dataclass(frozen=True, slots=True)
class DirectPart:
    """Bytes of an upload that its sender may PUT at `url`: `num_bytes` from `offset` on."""

    offset: int
    num_bytes: int
    url: str


class Direct(Protocol):
    """An upload that is sent to the store without passing through the coordinator."""

    def missing(self, limit: int) -> list[DirectPart]:
        """Return where to send the missing parts, at most `limit` of them.

        If there are none, the upload is complete.
        """
        ...


class Store(Protocol):
    """A store of artifacts."""

    @contextmanager
    def writer(self) -> Iterator[Writer]:
        """Yield a writer for one artifact. Without a commit in the block, nothing remains."""
        ...

    def partial(self, name: str) -> Partial:
        """Return the upload with a name that the caller chooses. It outlives the process that receives its bytes."""
        ...

    def partials(self) -> list[str]:
        """Return the names of all uploads in progress."""
        ...

    def path(self, digest: str) -> Path:
        """Return a local file to read or memory-map. Raises ArtifactNotFound."""
        ...

    def size(self, digest: str) -> int:
        """Return an artifact's size in bytes. Raises ArtifactNotFound."""
        ...

    def version(self, digest: str) -> tuple[int, str]:
        """Return an artifact's size in bytes, and a text that differs once its bytes were written again.

        It differs even if they have the same content. Raises ArtifactNotFound.
        """
        ...

    def read(self, digest: str, start: int, stop: int) -> Iterator[bytes]:
        """Yield an artifact's bytes from `start` up to `stop`, one MiB at a time, from the store itself."""
        ...

    def open(self, digest: str) -> BinaryIO | None:
        """Return the artifact's file, opened for reading, or None if it is not a file on this machine.

        Raises ArtifactNotFound.
        """
        ...

    def link(self, digest: str, seconds: int) -> str | None:
        """Return a URL at which anyone may fetch the artifact for `seconds`, or None if this store has no URLs."""
        ...

    def direct(self, name: str, num_bytes: int) -> Direct | None:
        """Return how `partial(name)` may bypass the coordinator, or None if this store does not support that."""
        ...

    def __contains__(self, digest: str) -> bool: ...

    def place(self, digest: str) -> str:
        """Return where the artifact belongs, for people who restore it from a backup."""
        ...

    def set_aside(self, digest: str) -> bool:
        """Read an artifact again, and move it to `damaged/DIGEST` if its bytes do not match the digest.

        The store then no longer has the artifact. Returns whether this caller moved it. A file that is being written
        stays. Local copies of the artifact are removed.
        """
        ...

    def delete(self, digest: str) -> None:
        """Remove an artifact. It is not an error if it does not exist."""
        ...

    def files(self) -> Iterator[StoredFile]:
        """Yield everything that is stored, in no order. What is stored or removed meanwhile may be included or not."""
        ...

    def drop_abandoned(self, seconds: float) -> list[int]:
        """Remove what killed writers left behind and what was set aside, at least `seconds` ago.

        Returns the sizes in bytes.
        """
        ...


class FileStore:
    """A store in a folder: `ab/cd/abcd...`. Each file is written elsewhere, synced, and then renamed into place.

    Artifacts that arrive in one request are written below `incoming`, those that arrive in parts below `partial`.
    `damaged` holds files whose bytes did not match their digests.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._root = str(root)  # each update needs several paths, which take a tenth of the time as strings
        self._incoming = root / "incoming"
        self._partial = root / "partial"
        self._damaged = root / "damaged"
        self._incoming.mkdir(parents=True, exist_ok=True)
        self._is_mounted = root.is_mount()
        self._synced: set[str] = set()  # folders whose own names this process has synced: at most 65,792
        with suppress(OSError):  # a read-only store can still be read; a collection reports the failure
            drop_old_files(self._incoming, _ABANDONED_SECONDS)

    @contextmanager
    def writer(self) -> Iterator["FileWriter"]:
        try:
            descriptor, name = tempfile.mkstemp(dir=self._incoming)
        except FileNotFoundError:
            self._make(self._incoming)
            descriptor, name = tempfile.mkstemp(dir=self._incoming)
        writer = FileWriter(self._adopt, descriptor, Path(name))
        try:
            yield writer
        finally:
            writer.close()

    def partial(self, name: str) -> PartialFile:
        return PartialFile(self._partial / name, self._adopt, lambda: self._make(self._partial))

    def partials(self) -> list[str]:
        return [path.name for path in self._partial.iterdir()] if self._partial.is_dir() else []

    def path(self, digest: str) -> Path:
        self._about(digest)
        return Path(self.place(digest))

    def size(self, digest: str) -> int:
        return self.version(digest)[0]

    def version(self, digest: str) -> tuple[int, str]:
        about = self._about(digest)
        return about.st_size, f"{about.st_ino}-{about.st_mtime_ns}-{about.st_ctime_ns}"

    def open(self, digest: str) -> BinaryIO:
        self._about(digest)
        try:
            return open(self.place(digest), "rb")
        except FileNotFoundError:  # removed just now
            raise ArtifactNotFound(_missing(digest)) from None

    def read(self, digest: str, start: int, stop: int) -> Iterator[bytes]:
        with self.open(digest) as file:
            file.seek(start)
            while start < stop and (chunk := file.read(min(_CHUNK, stop - start))):
                start += len(chunk)
                yield chunk

    def link(self, digest: str, seconds: int) -> str | None:
        return None

    def direct(self, name: str, num_bytes: int) -> Direct | None:
        return None

    def __contains__(self, digest: str) -> bool:
        try:
            self._about(digest)
        except ArtifactNotFound:
            return False
        return True

    def set_aside(self, digest: str) -> bool:
        place, aside = Path(self.place(digest)), self._damaged / digest
        try:
            with place.open("rb") as file:
                if 0 <= time.time() - os.fstat(file.fileno()).st_mtime < _WRITTEN_SECONDS:
                    return False  # it may be restored from a backup at this moment
                if hashlib.file_digest(file, "sha256").hexdigest() == digest:
                    return False
                self._make(self._damaged)
                place.replace(aside)
                is_it = os.path.samestat(os.fstat(file.fileno()), aside.stat())
            if not is_it:  # it was stored again at this moment
                aside.replace(place)
                return False
            os.utime(aside)  # it is kept for a while from now on
        except FileNotFoundError:
            return False
        return True

    def delete(self, digest: str) -> None:
        Path(self.place(digest)).unlink(missing_ok=True)

    def files(self) -> Iterator[StoredFile]:
        for path in self.root.glob("[0-9a-f][0-9a-f]/[0-9a-f][0-9a-f]/*"):
            with suppress(FileNotFoundError):  # removed meanwhile
                about = path.stat()
                if _DIGEST.fullmatch(path.name):
                    yield StoredFile(path.name, about.st_size, time.time() - about.st_mtime)

    def drop_abandoned(self, seconds: float) -> list[int]:
        return drop_old_files(self._incoming, seconds) + drop_old_files(self._damaged, seconds)

    def _make(self, folder: Path) -> None:
        """Create a folder of the store if it is missing, for example after a restore.

        Raises OSError if the store's file system is not mounted: what was written then would not be in the store later.
        """
        if folder.is_dir():
            return
        if self._is_mounted and not self.root.is_mount():
            raise OSError(errno.ENODEV, "the store's file system is not mounted", str(self.root))
        folder.mkdir(exist_ok=True)

    def place(self, digest: str) -> str:
        return f"{self._root}/{place_of(digest)}"

    def _about(self, digest: str) -> os.stat_result:
        """Return an artifact's status. Raises ArtifactNotFound, or OSError if the file system does not answer."""
        about = None
        with suppress(FileNotFoundError, NotADirectoryError):
            about = os.stat(self.place(digest))
        if about is None or not stat.S_ISREG(about.st_mode):
            raise ArtifactNotFound(_missing(digest))
        return about

    def _adopt(self, path: Path, digest: str) -> None:
        place = self.place(digest)
        folder = os.path.dirname(place)
        folders = (folder, os.path.dirname(folder))
        try:
            os.replace(path, place)
        except FileNotFoundError:  # the first file of its folder
            self._synced -= {each for each in folders if not os.path.isdir(each)}
            os.makedirs(folder, exist_ok=True)
            os.replace(path, place)
        sync(folder)
        for each in folders:
            if each not in self._synced:
                sync(os.path.dirname(each))
                self._synced.add(each)


class FileWriter:
    """Writes to a separate file and computes its digest on the way. `adopt` stores the file under that digest."""

    def __init__(self, adopt: Callable[[Path, str], None], descriptor: int, path: Path) -> None:
        self.path = path
        self._adopt = adopt
        self._file = os.fdopen(descriptor, "wb")
        self._hash = hashlib.sha256()
        self._is_adopted = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._hash.update(data)
        self._file.write(data)

    def flush(self) -> None:
        self._file.flush()

    def sync(self) -> None:
        os.fdatasync(self._file.fileno())

    def verify(self, expected: str) -> None:
        require_digest(self._hash.hexdigest(), expected)

    def commit(self, expected: str | None = None) -> str:
        if expected is not None:
            self.verify(expected)
        digest = self._hash.hexdigest()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._adopt(self.path, digest)
        self._is_adopted = True
        return digest

    def close(self) -> None:
        """Close the file, and remove it if it was not committed."""
        if not self._is_adopted:
            # Closing writes what is buffered, which fails on a full disk. The file would stay there and keep it full.
            with suppress(OSError):
                self._file.close()
            self.path.unlink(missing_ok=True)


def _missing(digest: str) -> str:
    return f"no artifact {digest} is stored"


def require_digest(digest: str, expected: str) -> None:
    """Raise DigestMismatch unless bytes that were received have the digest that was announced."""
    if digest != expected:
        raise DigestMismatch(
            f"the bytes received have sha256 {digest}, but the announced one is {expected}: send them again"
        )


def place_of(digest: str) -> str:
    """Return an artifact's relative path in a store. Raises ArtifactNotFound if `digest` is not a sha256."""
    if not _DIGEST.fullmatch(digest):
        raise ArtifactNotFound(f"{digest[:80]!r} is not a sha256 in lower-case hexadecimal")
    return f"{digest[:2]}/{digest[2:4]}/{digest}"


def digest_of_parts(
    parts: Iterable[bytes | memoryview], write: Callable[[bytes | memoryview], object] = lambda part: None
) -> str:
    """Return the sha256 of bytes that come in parts. Each part is also written."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
        write(part)
    return digest.hexdigest()


def digest_of(path: Path) -> str:
    """Return the sha256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
