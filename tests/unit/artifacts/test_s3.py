"""The object store's parts: addresses, local copies and runs of bytes. The essential operations on a second server."""

import hashlib
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest
from botocore.exceptions import ClientError

from fedssl.artifacts.s3 import bucket as bucket_module
from fedssl.artifacts.s3 import cache as cache_module
from fedssl.artifacts.s3 import partial as partial_module
from fedssl.artifacts.s3.address import S3Address
from fedssl.artifacts.s3.bucket import Bucket, Multipart, Object, SentPart
from fedssl.artifacts.s3.cache import Cache
from fedssl.artifacts.s3.partial import _end, _run
from fedssl.artifacts.s3.store import S3Store
from fedssl.artifacts.store import DirectPart, place_of
from fedssl.errors import SpecError, StoreUnavailable
from support.object_store import Moto

pytestmark = pytest.mark.full


@pytest.mark.parametrize(
    "url",
    ["", "bucket", "http://bucket", "s3://", "s3://key:secret@bucket", "s3://bucket?endpoint=host:9000",
     "s3://bucket?endpoint=https://key@host", "s3://bucket?secret=x", "s3://bucket#x"],
)  # fmt: skip
def test_invalid_addresses_are_refused(url: str) -> None:
    with pytest.raises(SpecError, match="the object store's"):
        S3Address.parse(url)


def test_an_address_is_parsed() -> None:
    parsed = S3Address.parse("s3://bucket/a/b/?endpoint=http://host:9000&region=r&public_endpoint=https://out")
    assert parsed == S3Address("bucket", "a/b", "http://host:9000", "r", "https://out")
    assert S3Address.parse("s3://bucket") == S3Address("bucket")


def _add(cache: Cache, digest: str, num_bytes: int, age: float = 0) -> None:
    descriptor, path = cache.scratch()
    with os.fdopen(descriptor, "wb") as file:
        file.write(b"a" * num_bytes)
    then = time.time() - age
    os.utime(cache.adopt(path, digest), (then, then))


def test_the_least_recently_used_copies_make_room_and_those_in_use_stay(tmp_path: Path) -> None:
    cache = Cache(tmp_path, 250)
    for digest, age in (("old", 300.0), ("older", 400.0), ("now", 0.0)):
        _add(cache, digest, 100, age)
    assert cache.find("older", 100) is None  # it was deleted to make room for "now"
    assert cache.find("old", 100) is not None  # used just now, so it counts as the newest
    _add(cache, "more", 100)
    assert all(cache.find(digest, 100) for digest in ("old", "now", "more"))  # copies in use stay, even above the limit
    assert Cache(tmp_path, 250).find("more", 100) is not None


def test_old_files_of_a_killed_writer_are_deleted_when_the_next_process_starts(tmp_path: Path) -> None:
    cache, times = Cache(tmp_path, 250), (time.time() - 7200, time.time())
    paths = []
    for then in times:
        descriptor, path = cache.scratch()
        os.write(descriptor, b"half")
        os.close(descriptor)
        os.utime(path, (then, then))
        paths.append(path)
    Cache(tmp_path, 250)
    assert [path.exists() for path in paths] == [False, True]


def test_a_copy_requested_while_room_is_made_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache(tmp_path, 150)
    _add(cache, "old", 100, 300)
    now, found = time.time, []

    def ask() -> float:  # runs after the ages of all copies were read
        monkeypatch.undo()
        found.append(Cache(tmp_path, 150).find("old", 100))
        return now()

    monkeypatch.setattr(cache_module.time, "time", ask)
    descriptor, path = cache.scratch()
    os.write(descriptor, b"a" * 100)
    os.close(descriptor)
    cache.adopt(path, "new")
    assert found[0].is_file()


def _object(offset: int, num_bytes: int, name: str = "x") -> Object:
    return Object(f"partial/u/{offset:020d}-{num_bytes}-{name}", num_bytes, datetime.now(UTC), "")


@pytest.mark.parametrize(
    ("objects", "end"),
    [
        ([], 0),
        ([(5, 5)], 0),
        ([(0, 5)], 5),
        ([(0, 5), (5, 5)], 10),
        ([(0, 5), (0, 8), (8, 1)], 9),
        ([(0, 8), (5, 5), (6, 1), (20, 5)], 10),
        ([(0, 4), (2, 4), (3, 9), (11, 2)], 13),
    ],
)
def test_the_longest_unbroken_run_is_found(objects: list[tuple[int, int]], end: int) -> None:
    data = bytes(range(64))
    pieces = _run([_object(offset, size, str(index)) for index, (offset, size) in enumerate(objects)])
    assert _end(pieces) == end
    taken = b""
    for piece in pieces:
        offset = int(piece.object.key.rpartition("/")[2].split("-")[0])
        taken += data[offset + piece.skip : offset + piece.object.num_bytes]
    assert taken == data[:end]


def test_an_unresponsive_store_is_given_up_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bucket_module.SECONDS * bucket_module.ATTEMPTS < 50  # Postgres ends a transaction that waits for a minute
    monkeypatch.setattr(bucket_module, "SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.1)
        address = S3Address.parse(f"s3://b?endpoint=http://127.0.0.1:{server.getsockname()[1]}&region=r")
        with pytest.raises(StoreUnavailable, match="Read timeout"):
            Bucket(address, "any", "anything").find("x")
        for _ in range(bucket_module.ATTEMPTS):
            server.accept()[0].close()
        with pytest.raises(TimeoutError):
            server.accept()


@pytest.mark.parametrize("num_bytes", [1, 20 * 10**9, 42 * 10**9, 10**12])
def test_an_upload_of_any_size_fits_into_the_allowed_number_of_objects(tmp_path: Path, num_bytes: int) -> None:
    address = S3Address.parse("s3://b?endpoint=http://127.0.0.1:9&region=r")
    store = S3Store(Bucket(address, "any", "anything"), Cache(tmp_path, 1), _free)
    part_bytes = store.partial("x").part_bytes(num_bytes)
    assert part_bytes >= 4 << 20
    assert 2 * num_bytes / part_bytes <= partial_module._MAX_OBJECTS  # twice as many, for broken connections


@contextmanager
def _free(name: str) -> Iterator[bool]:
    yield True


@pytest.fixture(scope="module")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Moto]:
    with Moto(tmp_path_factory.mktemp("moto")) as server:
        yield server


@pytest.fixture
def bucket(moto: Moto) -> Bucket:
    return moto.bucket()


@pytest.fixture
def store(bucket: Bucket, tmp_path: Path) -> S3Store:
    return S3Store(bucket, Cache(tmp_path / "cache", 1 << 20), _free)


def _upload_part(part: DirectPart, data: bytes) -> None:
    assert httpx.put(part.url, content=data, trust_env=False, timeout=60).is_success


def _stored(store: S3Store, data: bytes) -> str:
    with store.writer() as writer:
        writer.write(data)
        return writer.commit()


def test_a_copy_is_synced_before_it_is_found_and_one_of_the_wrong_size_is_fetched_again(
    store: S3Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, fsync = set(), os.fsync

    def noting(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noting)
    digest = _stored(store, b"weights")
    copy = tmp_path / "cache" / "files" / digest
    copy.unlink()
    synced.clear()
    assert store.path(digest).stat().st_ino in synced
    for wrong in (b"", b"weight", b"weights!"):  # a power cut can leave such files on some file systems
        copy.write_bytes(wrong)
        assert store.path(digest).read_bytes() == b"weights"


def test_a_direct_upload_that_ends_while_it_is_inspected_keeps_its_time(
    store: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = Bucket.parts

    def ending(self: Bucket, upload: Multipart) -> list[SentPart]:
        monkeypatch.setattr(Bucket, "parts", parts)
        assert store.direct("x", 100).missing(9) == []
        return parts(self, upload)

    [part] = store.direct("x", 100).missing(9)
    _upload_part(part, b"x" * 100)
    monkeypatch.setattr(Bucket, "parts", ending)
    assert store.partial("x").written_at == pytest.approx(time.time(), abs=60)


def test_multipart_uploads_are_found_if_the_server_lists_them_only_by_whole_key(
    bucket: Bucket, store: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MinIO lists them so: it treats a prefix as a key."""
    listed = Bucket.multiparts

    def by_key(self: Bucket, prefix: str = "") -> Iterator[Multipart]:
        return (upload for upload in list(listed(self, prefix)) if upload.key == prefix)

    monkeypatch.setattr(Bucket, "multiparts", by_key)
    for name in "xy":
        direct = store.direct(name, 100)
        [part] = direct.missing(9)
        assert len(direct.missing(9)) == len(list(listed(bucket, f"partial/{name}/"))) == 1  # continues the same upload
        assert store.partial(name).written_at is not None
    _upload_part(part, b"x" * 100)
    assert store.direct("y", 100).missing(9) == []
    assert store.partial("y").size == 100
    for name in "xy":
        store.partial(name).discard()
    assert (list(listed(bucket)), list(bucket.objects())) == ([], [])


def test_foreign_objects_in_the_bucket_stay_and_are_not_taken_for_uploads(bucket: Bucket, store: S3Store) -> None:
    others = ["partial/", "partial/readme/more/00000000000000000000-1-a", "partial/readme/notes.txt"]
    for key in others:
        bucket.put(key, b"hello")
    bucket.begin("backups/database.tar")
    bucket.begin(place_of("a" * 64))
    assert store.partials() == []
    assert store.partial("readme").size == 0
    assert store.partial("readme").written_at is None
    store.partial("readme").discard()
    assert store.drop_abandoned(60) == [0]
    assert [each.key for each in bucket.objects()] == others
    assert [each.key for each in bucket.multiparts()] == ["backups/database.tar"]


@pytest.mark.parametrize("after", ["copy", "comparison"])
def test_an_object_stored_again_while_its_damaged_copy_is_set_aside_stays(
    bucket: Bucket, store: S3Store, monkeypatch: pytest.MonkeyPatch, after: str
) -> None:
    digest = _stored(store, b"weights")
    bucket.put(place_of(digest), b"damaged")
    copy, find, finds = Bucket.copy, Bucket.find, 0

    def copying(self: Bucket, source: Object, key: str) -> None:
        copy(self, source, key)
        if after == "copy":
            bucket.put(place_of(digest), b"weights")

    def finding(self: Bucket, key: str) -> Object | None:
        nonlocal finds
        found, finds = find(self, key), finds + 1
        if after == "comparison" and finds == 2:
            bucket.put(place_of(digest), b"weights")
        return found

    with monkeypatch.context() as patched:
        patched.setattr(Bucket, "copy", copying)
        patched.setattr(Bucket, "find", finding)
        assert not store.set_aside(digest)
    assert store.path(digest).read_bytes() == b"weights"


def test_a_store_without_conditional_deletes_sets_damage_aside(
    bucket: Bucket, store: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = _stored(store, b"weights")
    bucket.put(place_of(digest), b"damaged")
    delete = bucket._s3.delete_object

    def refusing(**values: str) -> object:
        if "IfMatch" in values:
            raise ClientError({"Error": {"Code": "NotImplemented", "Message": "a header"}}, "DeleteObject")
        return delete(**values)

    monkeypatch.setattr(bucket._s3, "delete_object", refusing)
    assert store.set_aside(digest)
    assert [found.key for found in bucket.objects()] == [f"damaged/{digest}"]


def test_the_essential_operations_work_on_a_second_server(bucket: Bucket, store: S3Store) -> None:
    data = b"weights" * 1000
    digest = hashlib.sha256(data).hexdigest()
    with store.writer() as writer:
        writer.write(data)
        assert writer.commit(digest) == digest
    assert b"".join(store.read(digest, 100, 200)) == data[100:200]
    link = store.link(digest, 60)
    assert link is not None
    assert httpx.get(link, headers={"Range": "bytes=5-"}, trust_env=False, timeout=60).content == data[5:]
    store.delete(digest)
    assert digest not in store
    store.partial("x").append([data[:3000]], 0)
    store.partial("x").append([data[3000:]], 3000)
    with store.partial("x").whole() as whole:
        whole.keep(digest)
    assert store.path(digest).read_bytes() == data
    direct = store.direct("y", len(data))
    assert direct is not None
    [part] = direct.missing(9)
    assert (part.offset, part.num_bytes) == (0, len(data))
    assert store.partials() == ["y"]
    assert httpx.put(part.url, content=data, trust_env=False, timeout=60).is_success
    assert direct.missing(9) == []
    assert not httpx.put(part.url, content=data, trust_env=False, timeout=60).is_success  # senders can no longer write
    assert store.partial("y").size == len(data)
    store.partial("y").discard()
    upload = bucket.begin(place_of(digest))
    assert upload
    assert [each.key for each in bucket.multiparts()] == [place_of(digest)]
    store.drop_abandoned(60)
    assert list(bucket.multiparts()) == []
    assert [each.digest for each in store.files()] == [digest]
