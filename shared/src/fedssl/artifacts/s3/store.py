"""The content-addressed store in a bucket, with the layout of the one in a folder: `ab/cd/abcd...`."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from fedssl.artifacts.s3.bucket import Bucket, NoSuchObject, Object
from fedssl.artifacts.s3.cache import Cache
from fedssl.artifacts.s3.direct import S3Direct
from fedssl.artifacts.s3.partial import COPY_BYTES, FOLDER, Lock, S3Partial, name_of
from fedssl.artifacts.store import FileWriter, StoredFile, digest_of_parts, place_of
from fedssl.errors import ArtifactDamaged, ArtifactNotFound

_DAMAGED = "damaged"
_PLACE = re.compile(r"[0-9a-f]{2}/[0-9a-f]{2}/([0-9a-f]{64})")


class S3Store:
    """A store in a bucket. An artifact is an object, stored whole under its digest after the digest was verified.

    `path` returns a copy in a local folder. Methods raise StoreUnavailable besides the errors of the protocol.
    """

    def __init__(self, bucket: Bucket, cache: Cache, lock: Lock) -> None:
        self._bucket = bucket
        self._cache = cache
        self._lock = lock

    @contextmanager
    def writer(self) -> Iterator[FileWriter]:
        writer = FileWriter(self._adopt, *self._cache.scratch())
        try:
            yield writer
        finally:
            writer.close()

    def partial(self, name: str) -> S3Partial:
        return S3Partial(self._bucket, self._cache, self._lock, name)

    def partials(self) -> list[str]:
        keys = [found.key for found in self._bucket.objects(f"{FOLDER}/")]
        keys += [upload.key for upload in self._bucket.multiparts(f"{FOLDER}/")]
        return sorted({name for key in keys if (name := name_of(key)) is not None})

    def path(self, digest: str) -> Path:
        found = self._find(digest)
        path = self._cache.find(digest, found.num_bytes)
        return self._fetched(digest, found) if path is None else path

    def size(self, digest: str) -> int:
        return self._find(digest).num_bytes

    def version(self, digest: str) -> tuple[int, str]:
        found = self._find(digest)
        return found.num_bytes, f"{found.etag}-{found.modified_at.isoformat()}"

    def read(self, digest: str, start: int, stop: int) -> Iterator[bytes]:
        try:
            yield from self._bucket.read(place_of(digest), start, stop)
        except NoSuchObject:
            raise ArtifactNotFound(f"artifact {digest} was removed from the store just now") from None

    def open(self, digest: str) -> None:
        return None

    def link(self, digest: str, seconds: int) -> str | None:
        return self._bucket.signed_get(place_of(digest), seconds)

    def direct(self, name: str, num_bytes: int) -> S3Direct | None:
        return S3Direct(self._bucket, self.partial(name), name, num_bytes)

    def __contains__(self, digest: str) -> bool:
        try:
            return self._bucket.find(place_of(digest)) is not None
        except ArtifactNotFound:
            return False

    def place(self, digest: str) -> str:
        return self._bucket.url(place_of(digest))

    def set_aside(self, digest: str) -> bool:
        self._cache.drop(digest)
        aside = f"{_DAMAGED}/{digest}"
        with self._lock(aside) as held:
            found = self._bucket.find(place_of(digest)) if held else None
            if found is None or found.num_bytes > COPY_BYTES:
                return False
            try:
                if digest_of_parts(self._bucket.read(found.key, 0, found.num_bytes)) == digest:
                    return False
                self._bucket.copy(found, aside)  # many stores refuse it if the artifact was stored again
            except NoSuchObject:
                return False
            return self._bucket.delete_unchanged(found)

    def delete(self, digest: str) -> None:
        self._bucket.delete(place_of(digest))
        self._cache.drop(digest)

    def files(self) -> Iterator[StoredFile]:
        now = datetime.now(UTC)
        for found in self._bucket.objects():
            if place := _PLACE.fullmatch(found.key):
                yield StoredFile(place[1], found.num_bytes, (now - found.modified_at).total_seconds())

    def drop_abandoned(self, seconds: float) -> list[int]:
        dropped = self._cache.drop_abandoned(seconds)
        now = datetime.now(UTC)
        for found in self._bucket.objects(f"{_DAMAGED}/"):
            if (now - found.modified_at).total_seconds() > seconds:
                self._bucket.delete(found.key)
                dropped.append(found.num_bytes)
        for upload in self._bucket.multiparts():
            if not _PLACE.fullmatch(upload.key):
                continue  # an upload that is arriving, which ends by itself, or one that is not fedssl's
            try:
                parts = self._bucket.parts(upload)
            except NoSuchObject:  # it has just ended
                continue
            moved_at = max([upload.begun_at, *(part.sent_at for part in parts)])
            if (now - moved_at).total_seconds() > seconds:
                self._bucket.abort(upload)
                dropped.append(sum(part.num_bytes for part in parts))
        return dropped

    def _find(self, digest: str) -> Object:
        found = self._bucket.find(place_of(digest))
        if found is None:
            raise ArtifactNotFound(f"no artifact {digest} is stored")
        return found

    def _adopt(self, path: Path, digest: str) -> None:
        self._bucket.upload(place_of(digest), path)
        self._cache.adopt(path, digest)

    def _fetched(self, digest: str, found: Object) -> Path:
        """Return a local copy. Raises ArtifactDamaged if the store has other bytes."""
        descriptor, scratch = self._cache.scratch()
        try:
            with os.fdopen(descriptor, "wb") as file:
                actual = digest_of_parts(self._bucket.read(found.key, 0, found.num_bytes), file.write)
            if actual != digest:
                raise ArtifactDamaged(f"the object of artifact {digest} has other bytes: their sha256 is {actual}")
            return self._cache.adopt(scratch, digest)
        except NoSuchObject:
            raise ArtifactNotFound(f"artifact {digest} was removed from the store just now") from None
        finally:
            scratch.unlink(missing_ok=True)
