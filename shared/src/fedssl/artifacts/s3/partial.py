"""An artifact that arrives in several requests, at several processes: objects that are never written over."""

import os
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from fedssl.artifacts.s3.bucket import Bucket, Multipart, NoSuchObject, Object
from fedssl.artifacts.s3.cache import Cache
from fedssl.errors import ArtifactError, ArtifactNotFound, OffsetMismatch, StoreUnavailable

FOLDER = "partial"
Lock = Callable[[str], AbstractContextManager[bool]]
"""Holds a name against every other process; False: somebody else holds it."""

_KEY = re.compile(rf"{FOLDER}/([^/]+)/[0-9]{{20}}-[^/]+")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_PART_BYTES = 4 << 20
_MAX_OBJECTS = 10_000
COPY_BYTES = 5 << 30  # the most that S3 copies at once


@dataclass(frozen=True, slots=True)
class Piece:
    """What an object adds to the run of bytes from 0 on: its bytes from `skip` on."""

    object: Object
    skip: int


class S3Partial:
    """The bytes that have arrived so far: the longest unbroken run from byte 0 among the objects of one upload.

    An object is written once, under a name of its own that says where its bytes belong. Whoever writes, and however
    many at once, nothing is overwritten, and the run never gets shorter. Senders of other bytes for the same place are
    found out by the digest of the whole.
    """

    def __init__(self, bucket: Bucket, cache: Cache, lock: Lock, name: str) -> None:
        self._bucket = bucket
        self._cache = cache
        self._lock = lock
        self._name = name

    def part_bytes(self, num_bytes: int) -> int:
        """How much of an upload of this size is best written at once: half of its objects are for lines that break."""
        return max(_PART_BYTES, -(-num_bytes // (_MAX_OBJECTS // 2)))

    @property
    def size(self) -> int:
        """Bytes that are there; 0 before the first."""
        return _end(self.pieces())

    @property
    def written_at(self) -> float | None:
        """When the last bytes came, in seconds since 1970; None before the first."""
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

        Raises OffsetMismatch, writing nothing, and StoreUnavailable.
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
        """Hold it against other holders; False: somebody holds it."""
        return self._lock(f"{FOLDER}/{self._name}")

    def discard(self) -> None:
        """Remove what has arrived."""
        # Where the store lists by prefixes it names more: what was begun under another key.
        for upload in {*self.multiparts(), *self._bucket.multiparts(f"{FOLDER}/{self._name}/")}:
            self._bucket.abort(upload)
        for found in self._objects():
            self._bucket.delete(found.key)

    def pieces(self) -> list[Piece]:
        """What the run is made of, in its order."""
        return _run(self._objects())

    def multiparts(self) -> list[Multipart]:
        """What is on its way directly to the store, the first begun before the others."""
        found = self._bucket.multiparts(direct_key_of(self._name))
        return sorted(found, key=lambda upload: (upload.begun_at, upload.upload_id))

    def _objects(self) -> list[Object]:
        found = self._bucket.objects(f"{FOLDER}/{self._name}/")
        return [each for each in found if name_of(each.key) == self._name]


@dataclass(frozen=True, slots=True)
class S3Whole:
    """A copy of what has arrived. What is kept are the bytes of the copy, whatever may have arrived since."""

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


def place_of(digest: str) -> str:
    """An artifact's key. Raises ArtifactNotFound where there can be none."""
    if not _DIGEST.fullmatch(digest):
        raise ArtifactNotFound(f"{digest[:80]!r} is not a sha256 in lower-case hexadecimal")
    return f"{digest[:2]}/{digest[2:4]}/{digest}"


def key_of(name: str, offset: int, num_bytes: int) -> str:
    """A key that nobody has used."""
    return f"{FOLDER}/{name}/{offset:020d}-{num_bytes}-{secrets.token_hex(8)}"


def direct_key_of(name: str) -> str:
    """The key of what is sent directly: always the same, as some stores list multipart uploads by whole keys alone."""
    return f"{FOLDER}/{name}/{0:020d}-direct"


def name_of(key: str) -> str | None:
    """The upload that a key belongs to; None: it is not one of ours."""
    match = _KEY.fullmatch(key)
    return match and match[1]


def _run(objects: list[Object]) -> list[Piece]:
    """The objects' keys begin with their offsets, so their order is that of their bytes."""
    pieces: list[Piece] = []
    end = 0
    furthest: tuple[int, Object] | None = None  # of those that begin within the run: who reaches beyond it most
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
