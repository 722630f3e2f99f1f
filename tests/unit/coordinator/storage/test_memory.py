"""Artifacts kept in memory: only bytes with the right digest, up to a limit."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from fedssl.artifacts.store import FileStore
from fedssl.errors import ArtifactNotFound
from fedssl_coordinator.storage.artifacts import memory
from fedssl_coordinator.storage.artifacts.memory import MemoryResponse, RecentArtifacts


class _Counting(FileStore):
    """A store that counts the artifacts it reads."""

    num_reads = 0

    def read(self, digest: str, start: int, stop: int) -> Any:
        self.num_reads += 1
        return super().read(digest, start, stop)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> _Counting:
    opened = _Counting(tmp_path)
    monkeypatch.setattr(memory, "store", lambda: opened)
    return opened


def _write(store: FileStore, content: bytes) -> str:
    with store.writer() as writer:
        writer.write(content)
        return writer.commit()


def _get(recent: RecentArtifacts, store: FileStore, digest: str) -> bytes | None:
    return recent.get(digest, *store.version(digest))


def test_an_artifact_is_read_only_once(store: _Counting) -> None:
    recent, digest = RecentArtifacts(), _write(store, b"weights")
    assert [_get(recent, store, digest) for _ in range(3)] == [b"weights"] * 3
    assert store.num_reads == 1


def test_only_one_of_many_threads_reads_an_artifact(store: _Counting) -> None:
    recent, digest = RecentArtifacts(), _write(store, b"weights")
    found: list[bytes | None] = []
    threads = [threading.Thread(target=lambda: found.append(_get(recent, store, digest))) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [b"weights"] * 20
    assert store.num_reads == 1


def test_the_least_recently_used_artifacts_are_dropped_above_the_limit(store: _Counting) -> None:
    recent = RecentArtifacts(most_bytes=10, largest_bytes=5)
    first, second, third = (_write(store, content) for content in (b"11111", b"22222", b"33333"))
    for digest in (first, second, first, third):  # the second is the least recently used
        _get(recent, store, digest)
    assert store.num_reads == 3
    _get(recent, store, first)
    assert store.num_reads == 3
    _get(recent, store, second)
    assert store.num_reads == 4


def test_a_large_artifact_is_not_read(store: _Counting) -> None:
    recent, digest = RecentArtifacts(largest_bytes=5), _write(store, b"123456")
    assert _get(recent, store, digest) is None
    assert store.num_reads == 0


def test_a_file_that_was_rewritten_is_read_and_checked_again(store: _Counting) -> None:
    recent, digest = RecentArtifacts(), _write(store, b"weights")
    assert _get(recent, store, digest) == b"weights"
    store.path(digest).write_bytes(b"damages")
    assert _get(recent, store, digest) is None
    store.path(digest).write_bytes(b"weights")
    assert _get(recent, store, digest) == b"weights"
    assert store.num_reads == 3


def test_a_file_deleted_before_it_is_read_is_reported_as_missing(store: _Counting) -> None:
    recent, digest = RecentArtifacts(), _write(store, b"weights")
    version = store.version(digest)
    store.delete(digest)
    with pytest.raises(ArtifactNotFound):
        recent.get(digest, *version)


def test_a_response_from_memory_sends_at_most_one_mebibyte_per_message() -> None:
    content, sent = bytes(range(256)) * 5000, list[Any]()

    async def send(message: Any) -> None:
        sent.append(message)

    response = MemoryResponse(content, {"ETag": '"1"', "Content-Length": str(len(content))}, "application/octet-stream")
    asyncio.run(response({"type": "http"}, None, send))  # type: ignore[arg-type]
    begun, *parts, last = sent
    assert begun["status"] == 200
    assert (b"content-length", b"1280000") in begun["headers"]
    assert [len(part["body"]) for part in parts] == [1 << 20, len(content) - (1 << 20)]
    assert b"".join(part["body"] for part in parts) == content
    assert last == {"type": "http.response.body", "body": b"", "more_body": False}
