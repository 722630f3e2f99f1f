"""An artifact that arrives in several requests, at several processes, as objects that are never overwritten."""

import os
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from fedssl.artifacts.s3.bucket import Bucket, Multipart, NoSuchObject, Object
from fedssl.artifacts.s3.cache import Cache
from fedssl.artifacts.store import place_of
from fedssl.errors import ArtifactError, OffsetMismatch, StoreUnavailable

FOLDER = "partial"
Lock = Callable[[str], AbstractContextManager[bool]]
"""Locks a name against every other process. Yields False if another one holds it."""

_KEY = re.compile(rf"{FOLDER}/([^/]+)/[0-9]{{20}}-[^/]+")
_PART_BYTES = 4 << 20
_MAX_OBJECTS = 10_000
COPY_BYTES = 5 << 30  # the most that S3 copies at once


@dataclass(frozen=True, slots=True)
class Piece:
    """The bytes that an object adds to the run of bytes from 0 on: those from `skip` on."""

    object: Object
    skip: int


class S3Partial:
    """The bytes that have arrived so far: the longest unbroken run from byte 0 among the objects of one upload.

    Each object is written once, under a unique name that states where its bytes belong. However many processes write
    at once, nothing is overwritten, and the run never gets shorter. If other bytes are sent for the same place, the
    digest of the whole detects it.
    """

    def __init__(self, bucket: Bucket, cache: Cache, lock: Lock, name: str) -> None:
        self._bucket = bucket
        self._cache = cache
        self._lock = lock
        self._name = name

    def part_bytes(self, num_bytes: int) -> int:
        """Return the best number of bytes to write at once: half of the objects are reserved for broken connections."""
        return max(_PART_BYTES, -(-num_bytes // (_MAX_OBJECTS // 2)))

    @property
    def size(self) -> int:
        """Return how many bytes have arrived."""
        return _end(self.pieces())

    @property
    def written_at(self) -> float | None:
        """Return when the last bytes arrived, in seconds since 1970, or None if none have arrived."""
        times = []
        for upload in self.multiparts():
            times.append(upload.begun_at)
            with suppress(NoSuchObject):  # it has just ended: its object is found next
                times += [part.sent_at for part in self._bucket.parts(upload)]
        times += [found.modified_at for found in self._objects()]
        return max(times).timestamp() if times else None

    @contextmanager
    def whole(self) -> Iterator["S3Whole"]:
        pieces = self.pieces()
        descriptor, scratch = self._cache.scratch()
        try:
            with os.fdopen(descriptor, "wb") as file:
                for piece in pieces:
                    file.writelines(self._bucket.read(piece.object.key, piece.skip, piece.object.num_bytes))
            yield S3Whole(scratch, self, self._bucket, self._cache, pieces)
        except NoSuchObject as error:
            raise StoreUnavailable(f"what has arrived was dropped meanwhile: {error}") from None
        finally:
            scratch.unlink(missing_ok=True)

    def append(self, parts: Sequence[bytes | bytearray], offset: int) -> None:
        """Write the parts as one object at the end, which must be `offset`.

        Raises OffsetMismatch, or ArtifactError if there are too many objects; in both cases nothing is written. Raises
        StoreUnavailable.
        """
        objects = self._objects()
        size = _end(_run(objects))
        if size != offset:
            there = f"{size} bytes have arrived" if size else "no bytes have arrived yet"
            raise OffsetMismatch(f"{there}: continue at byte {size}, not at {offset}")
        if len(objects) >= _MAX_OBJECTS:
            raise ArtifactError(f"it came in more than {_MAX_OBJECTS} requests: send it again, more of it in each")
        if data := b"".join(parts):
            self._bucket.put(key_of(self._name, offset, len(data)), data)

    def sync(self) -> None:
        """Do nothing: what has arrived is in the object store."""

    def open(self) -> None:
        """Return None, because what has arrived is in several objects, and longer ones may replace some of them."""

    def locked(self) -> AbstractContextManager[bool]:
        """Lock it against other holders. Yields False if another one holds it."""
        return self._lock(f"{FOLDER}/{self._name}")

    def discard(self) -> None:
        """Remove what has arrived."""
        # A store that lists by prefix also names uploads that were begun under another key.
        for upload in {*self.multiparts(), *self._bucket.multiparts(f"{FOLDER}/{self._name}/")}:
            self._bucket.abort(upload)
        for found in self._objects():
            self._bucket.delete(found.key)

    def pieces(self) -> list[Piece]:
        """Return the pieces of the run, in order."""
        return _run(self._objects())

    def multiparts(self) -> list[Multipart]:
        """Return the uploads that go directly to the store, in the order in which they were begun."""
        found = self._bucket.multiparts(direct_key_of(self._name))
        return sorted(found, key=lambda upload: (upload.begun_at, upload.upload_id))

    def _objects(self) -> list[Object]:
        found = self._bucket.objects(f"{FOLDER}/{self._name}/")
        return [each for each in found if name_of(each.key) == self._name]


@dataclass(frozen=True, slots=True)
class S3Whole:
    """A copy of what has arrived. `keep` stores the bytes of the copy, whatever has arrived since."""

    path: Path
    _partial: S3Partial
    _bucket: Bucket
    _cache: Cache
    _pieces: list[Piece]

    def keep(self, digest: str) -> None:
        only = self._pieces[0].object if len(self._pieces) == 1 else None
        if only is not None and only.num_bytes <= COPY_BYTES:
            self._bucket.copy(only, place_of(digest))
        else:
            self._bucket.upload(place_of(digest), self.path)
        self._cache.adopt(self.path, digest)
        self._partial.discard()


def key_of(name: str, offset: int, num_bytes: int) -> str:
    """Return a key that has not been used."""
    return f"{FOLDER}/{name}/{offset:020d}-{num_bytes}-{secrets.token_hex(8)}"


def direct_key_of(name: str) -> str:
    """Return the one key for direct uploads: some stores list multipart uploads only by whole keys."""
    return f"{FOLDER}/{name}/{0:020d}-direct"


def name_of(key: str) -> str | None:
    """Return the upload that a key belongs to, or None if it is not one of ours."""
    match = _KEY.fullmatch(key)
    return match and match[1]


def _run(objects: list[Object]) -> list[Piece]:
    """Return the run's pieces. The keys begin with the objects' offsets, so their order is that of the bytes."""
    pieces: list[Piece] = []
    end = 0
    furthest: tuple[int, Object] | None = None  # the object that begins within the run and reaches furthest beyond it
    for found in sorted(objects, key=lambda each: each.key):
        offset = int(found.key.rpartition("/")[2].partition("-")[0])
        if offset > end and furthest is not None:
            pieces.append(Piece(furthest[1], end - furthest[0]))
            end, furthest = furthest[0] + furthest[1].num_bytes, None
        if offset > end:
            return pieces
        reach = offset + found.num_bytes
        if reach > end and (furthest is None or reach > furthest[0] + furthest[1].num_bytes):
            furthest = (offset, found)
    if furthest is not None:
        pieces.append(Piece(furthest[1], end - furthest[0]))
    return pieces


def _end(pieces: list[Piece]) -> int:
    return sum(piece.object.num_bytes - piece.skip for piece in pieces)
