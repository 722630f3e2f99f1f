"""Threads that read and write while the event loop sends and receives."""

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.datastructures import Headers

from fedssl.artifacts.store import FileStore
from fedssl_coordinator.core.problems import ProblemError
from fedssl_coordinator.storage.artifacts import memory, streaming


def _run(*, num_calls: int, fails_at: int = -1, own_error: bool = False) -> list[int]:
    done: list[int] = []

    def write(number: int) -> None:
        time.sleep(0.01)
        if number == fails_at:
            raise OSError("the disk is full")
        done.append(number)

    async def call() -> None:
        async with streaming.behind() as behind:
            for number in range(num_calls):
                await behind(write, number)
                assert len(done) <= number  # this call has not ended yet
            if own_error:
                raise LookupError

    try:
        asyncio.run(call())
    finally:
        assert done == sorted(done)
        _last[:] = done
    return done


_last: list[int] = []


def test_calls_run_one_after_another_and_have_ended_when_the_block_ends() -> None:
    assert _run(num_calls=5) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("fails_at", "done"), [(1, [0]), (4, [0, 1, 2, 3])], ids=["before the last", "the last"])
def test_no_call_follows_one_that_failed(fails_at: int, done: list[int]) -> None:
    with pytest.raises(OSError, match="full"):
        _run(num_calls=5, fails_at=fails_at)
    assert _last == done


def test_the_blocks_own_error_is_raised_after_the_last_call_has_ended() -> None:
    with pytest.raises(LookupError):
        _run(num_calls=2, fails_at=1, own_error=True)
    assert _last == [0]
    with pytest.raises(LookupError):
        _run(num_calls=2, own_error=True)
    assert _last == [0, 1]


def test_parts_are_read_ahead_in_order_until_an_error() -> None:
    def parts() -> Iterator[bytes]:
        yield b"a"
        yield b"b"
        raise ValueError("damaged")

    found: list[bytes] = []

    async def collect() -> None:
        async for part in streaming._ahead(parts()):
            found.append(part)

    with pytest.raises(ValueError, match="damaged"):
        asyncio.run(collect())
    assert found == [b"a", b"b"]


def test_one_download_per_minute_and_version_is_checked_against_the_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(streaming, "_checked_at", {})
    monkeypatch.setattr(streaming.time, "monotonic", lambda: now[0])
    assert [streaming._is_check_due("a", "1") for _ in range(3)] == [True, False, False]
    assert streaming._is_check_due("a", "2")  # it was rewritten
    assert streaming._is_check_due("b", "1")
    now[0] += 61
    assert [streaming._is_check_due("a", "1") for _ in range(2)] == [True, False]


@pytest.mark.parametrize(
    ("sizes", "kept"),
    [([1] * 1000, 2), ([1 << 18] * 4, 4), ([1, 1 << 18, 1, 1, 1 << 18], 4)],
    ids=["single bytes", "large chunks", "both"],
)
def test_only_small_chunks_are_joined(sizes: list[int], kept: int) -> None:
    chunks = [bytes([number % 256]) * size for number, size in enumerate(sizes)]
    parts: streaming.Parts = []
    for chunk in chunks:
        streaming.add_chunk(parts, chunk)
    assert b"".join(parts) == b"".join(chunks)
    assert len(parts) == kept


class _Removing(FileStore):
    """A store that deletes an artifact after its status was read, as garbage collection could."""

    is_removing = False

    def _about(self, digest: str) -> os.stat_result:
        about = super()._about(digest)
        if self.is_removing:
            self.delete(digest)
        return about


@pytest.mark.parametrize("num_bytes", [100, memory.LARGEST_BYTES + 1], ids=["kept in memory", "sent from its file"])
def test_an_artifact_deleted_during_the_request_is_reported_as_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_bytes: int
) -> None:
    store = _Removing(tmp_path)
    for module in (memory, streaming):
        monkeypatch.setattr(module, "store", lambda: store)
    with store.writer() as writer:
        writer.write(bytes(num_bytes))
        digest = writer.commit()
    streaming._is_check_due(digest, store.version(digest)[1])  # so that the download below is not checked
    store.is_removing = True
    with pytest.raises(ProblemError) as refusal:
        streaming.artifact_response(digest, Headers({}))
    assert (refusal.value.slug, digest in str(refusal.value)) == ("not-found", True)
