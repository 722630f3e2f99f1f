"""The contract of every artifact store."""

import hashlib
import os
import resource
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

import pytest

from fedssl.artifacts.s3.cache import Cache
from fedssl.artifacts.s3.store import S3Store
from fedssl.artifacts.store import FileStore, Store, digest_of
from fedssl.errors import ArtifactNotFound, DigestMismatch, OffsetMismatch
from support.object_store import ObjectStore

DATA = b"weights" * 1000
DIGEST = hashlib.sha256(DATA).hexdigest()
NONE = "0" * 64
TRICKS = ["", "..", "../../etc/passwd", "ab/cd", NONE[:-1], NONE + "0", "A" * 64, "g" * 64, NONE + "\n", "\0" * 64,
          "٠" * 64, "incoming", "/" + NONE, "../" + "a" * 61]  # fmt: skip


class Kind(Protocol):
    """Makes stores of one kind over the same bytes. `num_writers`: how many writers its server accepts for one name."""

    num_writers: int

    def open(self) -> Store: ...

    def damage(self, digest: str, content: bytes) -> None:
        """Replace the bytes of an artifact, which no store does by itself."""
        ...

    def empty(self) -> None:
        """Remove everything, including folders, while stores are open."""
        ...

    def held(self) -> list[str]:
        """Return the names of everything in the store, except local copies of artifacts."""
        ...

    def backdate(self, digest: str, seconds: float) -> None:
        """Make an artifact older."""
        ...

    def add(self, name: str) -> None:
        """Add something to the store that is not an artifact."""
        ...


class Files:
    num_writers = 6

    def __init__(self, folder: Path) -> None:
        self._root = folder / "store"

    def open(self) -> Store:
        return FileStore(self._root)

    def damage(self, digest: str, content: bytes) -> None:
        path = self._root / digest[:2] / digest[2:4] / digest
        path.write_bytes(content)
        os.utime(path, (time.time() - 60, time.time() - 60))  # a bit that flips on the disk does not change the time

    def empty(self) -> None:
        for path in self._root.iterdir():
            shutil.rmtree(path)

    def held(self) -> list[str]:
        return _names(self._root)

    def backdate(self, digest: str, seconds: float) -> None:
        then = time.time() - seconds
        os.utime(self.open().path(digest), (then, then))

    def add(self, name: str) -> None:
        (self._root / name).write_text("no artifact")


class S3:
    num_writers = 2

    def __init__(self, folder: Path, server: ObjectStore) -> None:
        self._server = server
        self._bucket = server.new_bucket()
        self._cache = folder / "cache"
        self._held: set[str] = set()
        self._guard = threading.Lock()

    def open(self) -> Store:
        return S3Store(self._server.bucket(self._bucket), Cache(self._cache, 1 << 30), self._lock)

    @contextmanager
    def _lock(self, name: str) -> Iterator[bool]:
        with self._guard:
            is_free = name not in self._held
            self._held.add(name)
        try:
            yield is_free
        finally:
            if is_free:
                self._held.remove(name)

    def damage(self, digest: str, content: bytes) -> None:
        self._server.bucket(self._bucket).put(f"{digest[:2]}/{digest[2:4]}/{digest}", content)
        (self._cache / "files" / digest).unlink(missing_ok=True)

    def empty(self) -> None:
        """Remove only the local folder, because a bucket has no folders."""
        shutil.rmtree(self._cache)

    def held(self) -> list[str]:
        unfinished = [upload.key for upload in self._server.bucket(self._bucket).multiparts()]
        return self._server.objects(self._bucket) + unfinished + _names(self._cache / "incoming")

    def backdate(self, digest: str, seconds: float) -> None:
        self._server.backdate(self._bucket, digest, seconds)

    def add(self, name: str) -> None:
        self._server.bucket(self._bucket).put(name, b"no artifact")


@pytest.fixture(params=["files", "s3"])
def kind(request: pytest.FixtureRequest, tmp_path: Path) -> Kind:
    if request.param == "files":
        return Files(tmp_path)
    return S3(tmp_path, request.getfixturevalue("object_store"))


@pytest.fixture
def store(kind: Kind) -> Store:
    return kind.open()


def _write(store: Store, data: bytes = DATA, expected: str | None = None) -> str:
    with store.writer() as writer:
        writer.write(data)
        return writer.commit(expected)


def _abort_write(store: Store) -> None:
    with store.writer() as writer:
        writer.write(DATA)
        1 / 0  # noqa: B018


def _write_parts(store: Store) -> None:
    with store.writer() as writer:
        writer.write(b"header")
        writer.write(DATA)
        writer.write(DATA)


def _names(folder: Path) -> list[str]:
    return [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]


def _arrived(store: Store) -> bytes:
    with store.partial("x").whole() as whole:
        return whole.path.read_bytes()


@pytest.mark.parametrize("expected", [None, DIGEST])
def test_a_committed_artifact_is_stored(store: Store, expected: str | None) -> None:
    assert DIGEST not in store
    assert _write(store, expected=expected) == DIGEST
    assert DIGEST in store
    assert store.path(DIGEST).read_bytes() == DATA
    assert digest_of(store.path(DIGEST)) == DIGEST


def test_an_artifact_can_be_written_in_pieces(store: Store) -> None:
    with store.writer() as writer:
        for start in range(0, len(DATA), 999):
            writer.write(DATA[start : start + 999])
            writer.flush()
            assert writer.path.read_bytes() == DATA[: start + 999]  # for checks before the commit
        writer.verify(DIGEST)
        assert DIGEST not in store
        assert writer.commit() == DIGEST
    assert store.path(DIGEST).read_bytes() == DATA


def test_an_empty_artifact_can_be_stored(store: Store) -> None:
    empty = hashlib.sha256(b"").hexdigest()
    assert _write(store, b"") == empty
    assert store.path(empty).read_bytes() == b""


def test_bytes_with_another_digest_than_announced_are_not_stored(store: Store, kind: Kind) -> None:
    with pytest.raises(DigestMismatch, match=f"sha256 {DIGEST}, but the announced one is {NONE}: send them again"):
        _write(store, expected=NONE)
    with store.writer() as writer:
        writer.write(DATA)
        with pytest.raises(DigestMismatch):
            writer.verify(NONE)
    assert DIGEST not in store
    assert NONE not in store
    assert kind.held() == []


def test_an_uncommitted_write_leaves_no_files(store: Store, kind: Kind) -> None:
    with store.writer() as writer:
        writer.write(DATA)
        writer.flush()
    with pytest.raises(ZeroDivisionError):
        _abort_write(store)
    assert DIGEST not in store
    assert kind.held() == []


def test_a_failed_write_leaves_no_files(store: Store, kind: Kind) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))  # fails like a full disk, also when the file is closed
    try:
        with pytest.raises(OSError, match="File too large"):
            _write_parts(store)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert kind.held() == []


def test_an_artifact_may_be_stored_repeatedly(store: Store, kind: Kind) -> None:
    assert [_write(store) for _ in range(3)] == [DIGEST] * 3
    assert len(kind.held()) == 1


def test_concurrent_writers_of_one_digest_store_it_once(store: Store, kind: Kind) -> None:
    start = threading.Barrier(kind.num_writers)
    digests: list[str] = []

    def write() -> None:
        start.wait()
        for _ in range(3):
            digests.append(_write(store))
            assert store.path(DIGEST).read_bytes() == DATA  # complete at every moment

    threads = [threading.Thread(target=write) for _ in range(kind.num_writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert digests == [DIGEST] * (3 * kind.num_writers)
    assert len(kind.held()) == 1


def test_an_opened_artifact_can_be_read_after_its_deletion(store: Store) -> None:
    _write(store)
    with store.path(DIGEST).open("rb") as file:
        _write(store)
        store.delete(DIGEST)
        assert file.read() == DATA


def test_any_range_can_be_read(store: Store) -> None:
    _write(store)
    assert store.size(DIGEST) == len(DATA)
    for start, stop in ((0, len(DATA)), (0, 1), (6999, 7000), (1000, 1999), (3, 3)):
        assert b"".join(store.read(DIGEST, start, stop)) == DATA[start:stop]
    with pytest.raises(ArtifactNotFound):
        store.size(NONE)


def test_an_artifact_whose_bytes_changed_has_another_version(store: Store, kind: Kind) -> None:
    _write(store)
    num_bytes, version = store.version(DIGEST)
    assert (num_bytes, version) == (len(DATA), store.version(DIGEST)[1])
    kind.damage(DIGEST, b"\0" + DATA[1:])
    assert store.version(DIGEST)[0] == len(DATA)
    assert store.version(DIGEST)[1] != version
    with pytest.raises(ArtifactNotFound):
        store.version(NONE)


def test_a_deleted_artifact_is_missing_and_deleting_it_again_is_allowed(store: Store, kind: Kind) -> None:
    other = _write(store, b"other")
    _write(store)
    store.delete(DIGEST)
    assert DIGEST not in store
    with pytest.raises(ArtifactNotFound, match=f"no artifact {DIGEST} is stored"):
        store.path(DIGEST)
    store.delete(DIGEST)  # deleting a missing artifact is not an error
    store.delete(NONE)
    assert other in store
    assert len(kind.held()) == 1
    assert _write(store) == DIGEST


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"\0" + DATA[1:], id="other"),
        *(
            pytest.param(c, id=i, marks=pytest.mark.full)
            for c, i in [(DATA[:-1], "cut"), (DATA + b"\0", "more"), (b"", "none")]
        ),
    ],
)
def test_a_damaged_artifact_is_set_aside_and_can_be_stored_again(store: Store, kind: Kind, content: bytes) -> None:
    _write(store)
    assert not store.set_aside(DIGEST)
    kind.damage(DIGEST, content)
    assert store.set_aside(DIGEST)
    assert not store.set_aside(DIGEST)  # only once: the process that moves it records it
    assert DIGEST not in store
    assert [file.digest for file in store.files()] == []
    [held] = kind.held()
    assert held.endswith(f"damaged/{DIGEST}")
    with pytest.raises(ArtifactNotFound):
        store.path(DIGEST)
    _write(store)
    assert not store.set_aside(DIGEST)
    assert store.path(DIGEST).read_bytes() == DATA
    kind.damage(DIGEST, content)  # it can be set aside a second time
    assert store.set_aside(DIGEST)
    assert store.drop_abandoned(60) == []
    time.sleep(1.1)  # object stores measure time in whole seconds
    assert store.drop_abandoned(0) == [len(content)]
    assert kind.held() == []


def test_a_missing_artifact_is_not_set_aside(store: Store) -> None:
    assert not store.set_aside(DIGEST)
    with pytest.raises(ArtifactNotFound):
        store.set_aside("../../etc/passwd")


def test_the_place_of_an_artifact_is_derived_from_its_digest(store: Store) -> None:
    assert store.place(DIGEST).endswith(f"/{DIGEST[:2]}/{DIGEST[2:4]}/{DIGEST}")


def test_missing_folders_are_created_again(store: Store, kind: Kind) -> None:
    """A backup is restored without `incoming`, and a local copy of a bucket may be emptied at any time."""
    _write(store)
    kind.empty()
    assert _write(store) == DIGEST
    assert store.path(DIGEST).read_bytes() == DATA
    kind.empty()
    assert store.drop_abandoned(60) == []
    store.partial("x").append([b"abc"], 0)
    assert _arrived(store) == b"abc"


def test_invalid_digests_are_refused(store: Store, kind: Kind, tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "passwd").write_text("root")
    for trick in TRICKS:
        assert trick not in store
        with pytest.raises(ArtifactNotFound, match="is not a sha256"):
            store.path(trick)
        with pytest.raises(ArtifactNotFound, match="is not a sha256"):
            store.delete(trick)
        with pytest.raises(DigestMismatch):
            _write(store, expected=trick)
    assert kind.held() == []


def test_a_stored_artifact_survives_a_restart(store: Store, kind: Kind) -> None:
    _write(store)
    assert kind.open().path(DIGEST).read_bytes() == DATA


def test_all_stored_artifacts_are_listed(store: Store, kind: Kind) -> None:
    assert list(store.files()) == []
    _write(store)
    _write(store, b"more")
    kind.add(f"{DIGEST[:2]}/{DIGEST[2:4]}/README")
    kind.backdate(DIGEST, 24 * 3600)
    with store.writer() as writer:
        writer.write(b"not yet")
        listed = {each.digest: each for each in store.files()}
    assert listed.keys() == {DIGEST, hashlib.sha256(b"more").hexdigest()}
    assert listed[DIGEST].num_bytes == len(DATA)
    assert sorted(each.age_seconds > 24 * 3600 - 1 for each in listed.values()) == [False, True]


def test_abandoned_writes_are_removed_by_age(store: Store, kind: Kind) -> None:
    with store.writer() as writer:
        writer.write(b"in progress")
        writer.flush()
        assert store.drop_abandoned(60) == []
        earlier = time.time() - 61
        os.utime(writer.path, (earlier, earlier))
        assert store.drop_abandoned(60) == [len(b"in progress")]
        assert not writer.path.exists()
    assert kind.held() == []


def test_a_partial_upload_becomes_an_artifact(store: Store, kind: Kind) -> None:
    partial = store.partial("x")
    assert (partial.size, partial.written_at, store.partials()) == (0, None, [])
    for start in range(0, len(DATA), 999):
        parts = [DATA[start : start + 400], DATA[start + 400 : start + 999]]
        store.partial("x").append(parts, start)  # by any process, after any restart
    assert (partial.size, store.partials()) == (len(DATA), ["x"])
    assert kind.open().partial("x").size == len(DATA)
    assert DIGEST not in store
    with kind.open().partial("x").whole() as whole:
        assert digest_of(whole.path) == DIGEST
        whole.keep(DIGEST)
    assert store.path(DIGEST).read_bytes() == DATA
    assert (partial.size, store.partials()) == (0, [])


def test_parts_can_only_be_appended_at_the_end(store: Store) -> None:
    partial = store.partial("x")
    for offset in (1, 7):
        with pytest.raises(OffsetMismatch, match="no bytes have arrived yet"):
            partial.append([b"a"], offset)
    assert store.partials() == []
    partial.append([b"abc"], 0)
    for offset in (0, 2, 4):
        with pytest.raises(OffsetMismatch, match="continue at byte 3"):
            partial.append([b"def"], offset)
    assert _arrived(store) == b"abc"
    partial.discard()
    partial.discard()
    assert (partial.size, store.partials()) == (0, [])


def test_concurrent_senders_of_one_file_append_each_byte_once(store: Store, kind: Kind) -> None:
    start = threading.Barrier(kind.num_writers)

    def send() -> None:
        start.wait()
        while (offset := store.partial("x").size) < len(DATA):
            with suppress(OffsetMismatch):  # another sender was faster
                store.partial("x").append([DATA[offset : offset + 500]], offset)

    threads = [threading.Thread(target=send) for _ in range(kind.num_writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert _arrived(store) == DATA


def test_a_partial_upload_can_be_locked_once_at_a_time(store: Store) -> None:
    partial = store.partial("x")
    partial.append([DATA], 0)
    with partial.locked() as held, store.partial("x").locked() as too:
        assert (held, too) == (True, False)
    with partial.locked() as held:
        assert held


def test_files_that_a_killed_process_left_are_removed_after_a_day(tmp_path: Path) -> None:
    FileStore(tmp_path)
    fresh, stale = tmp_path / "incoming" / "fresh", tmp_path / "incoming" / "stale"
    for path in (fresh, stale):
        path.write_bytes(b"half an upload")
    yesterday = time.time() - 25 * 3600
    os.utime(stale, (yesterday, yesterday))
    FileStore(tmp_path)
    assert (fresh.exists(), stale.exists()) == (True, False)
