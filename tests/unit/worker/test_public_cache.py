"""Registered public images on a data owner's machine are fetched once, checked, limited in size, and only if
allowed."""

import os
from pathlib import Path

import pytest
import torch

from fedssl.artifacts.tensors import load_tensors
from fedssl.client import NotFound
from fedssl.errors import ArtifactError, Cancelled, DataError, DigestMismatch
from fedssl.protocol.data import DataConfig, PublicDataConfig
from fedssl.protocol.work import Progress
from fedssl_worker.agent import Agent
from fedssl_worker.data import PublicImages
from fedssl_worker.executor import Executor
from fedssl_worker.public_cache import PublicCache
from support.data_sets import digits_file, labelled_bytes, public_bytes
from support.waiting import wait_until

from .conftest import CLIENT, CPU, WorkerHarness, make_spec

DATA = DataConfig(channels=1, image_size=8)
FLESD = {"name": "flesd", "reducer": {"name": "distillation", "num_anchors": 8, "batch_size": 4}}
ROOMY = 10**9


def _cache(harness: WorkerHarness, max_bytes: int = ROOMY) -> PublicCache:
    """Return a new cache on the same folder, as after a restart."""
    return PublicCache(harness.client, harness.folder / "public", max_bytes)


def _fetch(cache: PublicCache, digest: str) -> Path:
    return cache.path(digest, lambda count: None)


def _kept(harness: WorkerHarness) -> set[str]:
    return {path.stem for path in (harness.folder / "public").iterdir()}


def _executor(harness: WorkerHarness, max_bytes: int = ROOMY) -> Executor:
    return Executor(
        harness.client,
        harness.images,
        harness.states(),
        harness.folder / "broadcasts",
        client_id=CLIENT,
        device=CPU,
        public=PublicImages(CPU, cache=_cache(harness, max_bytes)),
    )


def test_public_images_are_fetched_once_for_all_runs_and_restarts(harness: WorkerHarness) -> None:
    content = public_bytes()
    digest = harness.coordinator.put(content)
    cache = _cache(harness)
    assert _fetch(cache, digest).read_bytes() == content
    assert _fetch(cache, digest) == _fetch(_cache(harness), digest)
    assert harness.coordinator.calls == ["GET artifact"]


def test_a_damaged_file_is_fetched_again(harness: WorkerHarness) -> None:
    """This holds even if the process has read the file before, because a disk may corrupt a bit at any time."""
    content = public_bytes()
    config = PublicDataConfig(dataset="scans", num_images=12, digest=harness.coordinator.put(content))
    cache = _cache(harness)
    path = _fetch(cache, str(config.digest))
    flipped = [content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :] for at in (3, 20, len(content) - 1)]
    for damage in (*flipped, content[:-1], content + b"\x00", b""):
        path.write_bytes(damage)
        images = PublicImages(CPU, cache=cache).load(config, DATA)
        assert images is not None
        assert path.read_bytes() == content
    path.unlink()
    assert _fetch(cache, str(config.digest)).is_file()


def test_an_interrupted_download_is_continued_and_counts_towards_the_limit(harness: WorkerHarness) -> None:
    content = public_bytes()
    digest, other = harness.coordinator.put(content), "0" * 64
    folder = harness.folder / "public"
    folder.mkdir()
    for name in (digest, other):
        (folder / f".{name}.safetensors.{name}.part").write_bytes(content[:100])
        os.utime(folder / f".{name}.safetensors.{name}.part", (1, 1))
    assert _fetch(_cache(harness), digest).read_bytes() == content
    assert len(list(folder.iterdir())) == 2  # the other one may still be requested
    _fetch(_cache(harness, len(content)), digest)
    assert _kept(harness) == {digest}


def test_the_least_recently_used_images_are_removed_first(harness: WorkerHarness) -> None:
    contents = [public_bytes(seed=seed) for seed in range(4)]
    digests = [harness.coordinator.put(content) for content in contents]
    cache = _cache(harness, max_bytes=2 * len(contents[0]))
    for age, digest in zip((300, 200, 100), digests, strict=False):
        path = _fetch(cache, digest)
        os.utime(path, (path.stat().st_mtime - age,) * 2)
    assert _kept(harness) == set(digests[1:3])
    _fetch(cache, digests[1])  # it is used now, so the other one is older
    _fetch(cache, digests[3])
    assert _kept(harness) == {digests[1], digests[3]}
    _fetch(_cache(harness, max_bytes=len(contents[0])), digests[3])  # a smaller limit applies at once
    assert _kept(harness) == {digests[3]}


def test_space_is_freed_before_the_download(harness: WorkerHarness) -> None:
    contents = [public_bytes(seed=seed) for seed in range(2)]
    digests = [harness.coordinator.put(content) for content in contents]
    cache = _cache(harness, max_bytes=len(contents[0]) + 100)
    _fetch(cache, digests[0])
    held: list[int] = []
    cache.path(
        digests[1], lambda count: held.append(sum(p.stat().st_size for p in (harness.folder / "public").iterdir()))
    )
    assert held
    assert max(held) <= len(contents[1])
    assert _kept(harness) == {digests[1]}


def test_public_images_larger_than_the_owner_allows_are_refused(harness: WorkerHarness) -> None:
    content = public_bytes()
    digest = harness.coordinator.put(content)
    with pytest.raises(
        DataError, match=r"exceed the 800 bytes that this worker may keep: raise its --max-public-bytes"
    ):
        _fetch(_cache(harness, 800), digest)
    assert _kept(harness) == set()
    assert _fetch(_cache(harness, len(content)), digest).is_file()


def test_an_owner_can_forbid_public_images(harness: WorkerHarness) -> None:
    digest = harness.coordinator.put(public_bytes())
    spec = make_spec(method=FLESD, public_data={"dataset": "scans", "num_images": 10, "digest": digest})
    for executor in (_executor(harness, 0), harness.executor()):
        with pytest.raises(DataError, match=r"fetches no public images|does not fetch the public images"):
            executor.execute(harness.item(spec, 1), lambda progress: None)
    assert harness.coordinator.calls == []


def test_public_images_that_are_missing_or_have_another_digest_are_refused(harness: WorkerHarness) -> None:
    digest = harness.coordinator.put(public_bytes())
    harness.coordinator.artifacts[digest] = public_bytes(seed=1)
    with pytest.raises(DigestMismatch):
        _fetch(_cache(harness), digest)
    with pytest.raises(NotFound):
        _fetch(_cache(harness), "0" * 64)
    assert _kept(harness) == set()


def test_a_file_that_is_not_a_public_data_set_is_refused(harness: WorkerHarness) -> None:
    """Otherwise a coordinator could send the digest of other data and receive their representations."""
    public = PublicImages(CPU, cache=_cache(harness))
    for content in (labelled_bytes(), b"\xff" * 100):
        config = PublicDataConfig(dataset="scans", num_images=4, digest=harness.coordinator.put(content))
        with pytest.raises(ArtifactError):
            public.load(config, DATA)


def test_a_public_data_set_with_too_few_images_is_refused(harness: WorkerHarness) -> None:
    config = PublicDataConfig(dataset="scans", num_images=13, digest=harness.coordinator.put(public_bytes()))
    with pytest.raises(DataError, match="scans has 12 images here, but the run's public_data needs 13"):
        PublicImages(CPU, cache=_cache(harness)).load(config, DATA)


@pytest.mark.parametrize("split", ["train", "test"])
def test_fetched_images_give_the_same_update_as_images_found_by_name(
    harness: WorkerHarness, tmp_path: Path, split: str
) -> None:
    digest = harness.coordinator.put(digits_file(tmp_path, split).read_bytes())
    public = {"dataset": "digits", "split": split, "num_images": 20, "seed": 5}
    by_name = harness.executor().execute(harness.item(make_spec(method=FLESD, public_data=public), 1), lambda _: None)
    pinned = make_spec(method=FLESD, public_data={**public, "digest": digest})
    fetched = _executor(harness).execute(harness.item(pinned, 1), lambda _: None)
    one, other = load_tensors(by_name.update), load_tensors(fetched.update)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_download_ends_when_the_work_is_cancelled(harness: WorkerHarness) -> None:
    digest = harness.coordinator.put(public_bytes(num_images=2000, size=64))
    spec = make_spec(method=FLESD, public_data={"dataset": "scans", "num_images": 10, "digest": digest})
    told: list[Progress] = []

    def on_progress(progress: Progress) -> None:
        told.append(progress)
        if len(told) == 3:
            raise Cancelled("the run was stopped")

    with pytest.raises(Cancelled):
        _executor(harness).execute(harness.item(spec, 1), on_progress)
    assert {progress.phase for progress in told} == {"downloading"}
    assert _kept(harness) == {f".{digest}.safetensors.{digest}"}  # a partial file, which the next run may continue


def test_the_lease_is_renewed_while_public_images_are_fetched(harness: WorkerHarness) -> None:
    digest = harness.coordinator.put(public_bytes())
    spec = make_spec(method=FLESD, public_data={"dataset": "scans", "num_images": 10, "digest": digest})

    def slow(call: str) -> None:
        if call == "GET artifact":
            wait_until(lambda: len(harness.coordinator.heartbeats) >= 2)

    harness.coordinator.before = slow
    assignment = harness.offer(spec, 1, lease_seconds=0.3)
    Agent(harness.client, _executor(harness), harness.egress(), claim_seconds=0.1).step()
    assert harness.coordinator.declined == []
    assert [submission.assignment_id for submission in harness.coordinator.submissions] == [assignment]
