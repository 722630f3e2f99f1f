"""The coordinator with its artifacts in an object store: several API processes, direct transfers, and outages."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest

from fedssl.artifacts.s3.bucket import Bucket, Multipart, Object
from fedssl.artifacts.s3.direct import S3Direct
from fedssl.artifacts.tensors import load_tensors
from fedssl.client import Client, Retry, WorkerClient
from support.coordinator import Coordinator
from support.data_sets import public_bytes, write_file
from support.federation import tensors_for
from support.object_store import ObjectStore, wait_for_answer
from support.preloaded import preloaded
from support.processes import free_port
from support.scenario import Scenario
from support.servers import Servers
from support.tables import Tables
from support.tus import Tus
from support.uploads import digest, safetensors_bytes, split_file

pytestmark = [pytest.mark.full, pytest.mark.integration]

PATIENT = Retry(seconds=60, first_delay=0.05, max_delay=0.5)
DATA = public_bytes(num_images=1500, size=64)  # 6 MB: two objects if it arrives in parts
DIGEST = digest(DATA)
PLACE = f"some/where/{DIGEST[:2]}/{DIGEST[2:4]}/{DIGEST}"


@pytest.fixture
def bucket(object_store: ObjectStore) -> str:
    return object_store.new_bucket()


@contextmanager
def _over(
    servers: Servers, object_store: ObjectStore, bucket: str, folder: Path, **more: str
) -> Iterator[tuple[Coordinator, str]]:
    with servers.database() as url:
        settings = {**object_store.environment(bucket, folder / "cache"), **more}
        with Coordinator(url, servers.redis_url, folder / "unused", **settings) as running:
            yield running, url


@contextmanager
def _another(running: Coordinator, folder: Path) -> Iterator[str]:
    """Run a second API process, which shares only the servers with the first, and yield its address."""
    port = free_port()
    own = {"FEDSSL_STORE_CACHE_PATH": str(folder / "another"), "FEDSSL_STORE_PATH": "/nowhere"}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **own}
    with (folder / "another.log").open("wb") as log:
        process = preloaded().start("fedssl_coordinator", ["api", "--port", str(port)], environment, log)
    try:
        wait_for_answer(f"http://127.0.0.1:{port}", process)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def test_an_upload_continues_at_another_process(
    servers: Servers, object_store: ObjectStore, bucket: str, tmp_path: Path
) -> None:
    with _over(servers, object_store, bucket, tmp_path) as (first, _), _another(first, tmp_path) as second:
        with Tus(first) as tus:
            location = tus.begin(len(DATA), DIGEST)
            assert tus.send(location, DATA[:5_000_000], 0).status_code == 204
        parts = [name for name in object_store.objects(bucket) if "/partial/" in name]
        assert len(parts) == 2
        headers = {"Authorization": f"Bearer {first.admin_token}", "Tus-Resumable": "1.0.0"}
        with httpx.Client(base_url=second, headers=headers, timeout=60, trust_env=False) as other:
            assert other.head(location).headers["upload-offset"] == "5000000"
            part = {"Upload-Offset": "5000000", "Content-Type": "application/offset+octet-stream"}
            answer = other.patch(location, content=DATA[5_000_000:], headers=part)
            assert (answer.status_code, answer.headers["upload-offset"]) == (204, str(len(DATA)))
            beginning = other.get(f"/v1/artifacts/{DIGEST}", headers={"Range": "bytes=10-99"})
            assert (beginning.status_code, beginning.content) == (206, DATA[10:100])
        assert object_store.objects(bucket) == [PLACE]
        with WorkerClient(first.url, first.admin_token) as reader:
            reader.download(DIGEST, tmp_path / "fetched")
        assert (tmp_path / "fetched").read_bytes() == DATA


def test_artifacts_are_transferred_directly_and_not_through_the_api(
    servers: Servers, object_store: ObjectStore, bucket: str, tmp_path: Path
) -> None:
    source = write_file(tmp_path, DATA)
    with _over(servers, object_store, bucket, tmp_path, FEDSSL_STORE_DIRECT="1") as (running, _):
        with Client(running.url, running.admin_token, retry=PATIENT) as client:
            assert client.add_public_dataset("scans", source).digest == DIGEST
            assert [entry.name for entry in client.artifact_header(DIGEST).entries] == ["images"]
        assert object_store.objects(bucket) == [PLACE]
        with running.http() as http:
            assert http.get(f"/v1/artifacts/{DIGEST}").content == DATA  # for clients without direct transfer
            answer = http.get(f"/v1/artifacts/{DIGEST}", headers={"Accept-Direct": "1"})
        assert (answer.status_code, answer.headers["etag"]) == (307, f'"{DIGEST}"')
        assert answer.headers["location"].startswith(f"{object_store.endpoint}/{bucket}/{PLACE}?")
        part = tmp_path / f".fetched.{DIGEST}.part"
        part.write_bytes(DATA[:1_000_000])  # fetched by an earlier process
        told: list[int] = []
        with WorkerClient(running.url, running.admin_token, retry=PATIENT) as reader:
            reader.download(DIGEST, tmp_path / "fetched", on_bytes=told.append)
        assert (tmp_path / "fetched").read_bytes() == DATA
        assert min(told) > 1_000_000


def test_a_client_that_cannot_reach_the_object_store_transfers_through_the_api(
    servers: Servers, object_store: ObjectStore, bucket: str, tmp_path: Path
) -> None:
    source = write_file(tmp_path, DATA)
    url = object_store.url(bucket, public_endpoint=f"http://127.0.0.1:{free_port()}")
    with _over(servers, object_store, bucket, tmp_path, FEDSSL_STORE_DIRECT="1", FEDSSL_STORE_URL=url) as (running, _):
        with Client(running.url, running.admin_token, retry=PATIENT) as client:
            assert client.add_public_dataset("scans", source).digest == DIGEST  # the parts that it began are removed
            assert not client._connection.direct_transfer.is_open
        assert list(object_store.bucket(bucket).multiparts()) == []
        assert object_store.objects(bucket) == [PLACE]
        with WorkerClient(running.url, running.admin_token, retry=PATIENT) as reader:
            reader.download(DIGEST, tmp_path / "fetched")
            assert not reader._connection.direct_transfer.is_open
        assert (tmp_path / "fetched").read_bytes() == DATA


def test_directly_uploaded_files_are_checked_like_all_others(
    servers: Servers, object_store: ObjectStore, bucket: str, tmp_path: Path
) -> None:
    with (
        _over(servers, object_store, bucket, tmp_path, FEDSSL_STORE_DIRECT="1") as (running, url),
        Tables(url) as tables,
    ):
        scenario = Scenario(running, tables, tmp_path, "a")
        item = scenario.claim("a")
        good = safetensors_bytes(tensors_for(item.plan.update, 1.0))
        header, body = split_file(good)
        infinite = good[: len(good) - len(body)] + b"\x00\x00\x80\x7f" * (len(body) // 4) + body[len(body) // 4 * 4 :]
        with Tus(running, scenario.workers["a"]._connection._http.headers["authorization"].split()[1]) as tus:
            too_large = tus.announce(10**9, digest(good), item.assignment_id)
            assert (too_large.status_code, too_large.json()["type"]) == (413, "urn:fedssl:problem:artifact-too-large")
            for announced, sent in ((good, good[:-1] + b"\x01"), (infinite, infinite), (DATA[: len(good)],) * 2):
                location = tus.begin(len(announced), digest(announced), item.assignment_id)
                [part] = tus.request("POST", f"{location}/parts").json()["parts"]
                assert httpx.put(part["url"], content=sent + b"more", trust_env=False, timeout=60).status_code == 403
                assert httpx.put(part["url"], content=sent, trust_env=False, timeout=60).status_code == 200
                assert tus.request("POST", f"{location}/parts").status_code == 422
                assert httpx.put(part["url"], content=sent, trust_env=False, timeout=60).status_code in (403, 404)
                assert not any("/partial/" in name for name in object_store.objects(bucket))
            assert header
        scenario.work("a")
        scenario.advance()
        assert scenario.rounds[0].verdict == "aggregated"


def test_a_direct_upload_expires_even_if_the_store_lists_nothing_for_a_prefix(
    servers: Servers, object_store: ObjectStore, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MinIO, for example, lists multipart uploads only by whole keys."""
    listed = Bucket.multiparts

    def by_key(self: Bucket, prefix: str = "") -> Iterator[Multipart]:
        return (upload for upload in list(listed(self, prefix)) if upload.key == prefix)

    monkeypatch.setattr(Bucket, "multiparts", by_key)
    with _over(servers, object_store, bucket, tmp_path, FEDSSL_STORE_DIRECT="1") as (running, _), Tus(running) as tus:
        from fedssl_coordinator.storage.uploads.expiry import expire_uploads

        location = tus.begin(len(DATA), DIGEST)
        assert len(tus.request("POST", f"{location}/parts").json()["parts"]) == 1
        # The upload is removed between two checks: no part is missing, and none has arrived.
        with monkeypatch.context() as patch:
            patch.setattr(S3Direct, "missing", lambda self, limit: [])
            answer = tus.request("POST", f"{location}/parts")
        assert (answer.status_code, answer.json()["type"]) == (423, "urn:fedssl:problem:upload-busy")
        expire_uploads(datetime.now(UTC) + timedelta(days=2))
        assert tus.request("HEAD", location).status_code == 404
        assert list(listed(object_store.bucket(bucket))) == []


def test_a_data_set_is_read_once_and_outside_of_transactions(
    servers: Servers, object_store: ObjectStore, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, keys = Bucket.read, list[str]()

    def slowly(self: Bucket, key: str, start: int, stop: int) -> Iterator[bytes]:
        keys.append(key)
        time.sleep(1.5)
        return read(self, key, start, stop)

    find = Bucket.find

    def looking_slowly(self: Bucket, key: str) -> Object | None:
        time.sleep(1.5)
        return find(self, key)

    monkeypatch.setattr(Bucket, "read", slowly)
    settings = {"FEDSSL_STORE_DIRECT": "1", "FEDSSL_IDLE_TRANSACTION_SECONDS": "1"}
    with _over(servers, object_store, bucket, tmp_path, **settings) as (running, _):
        source = write_file(tmp_path, DATA)
        with Client(running.url, running.admin_token, retry=Retry(seconds=0)) as client:
            assert client.add_public_dataset("scans", source).digest == DIGEST
            assert [key.partition("/")[0] for key in keys] == ["partial"]  # the copy that was checked is kept
            (tmp_path / "cache" / "files" / DIGEST).unlink()
            monkeypatch.setattr(Bucket, "find", looking_slowly)
            assert client.add_public_dataset("again", source).digest == DIGEST
            assert len(keys) == 2
            with Tus(running) as tus:
                assert tus.announce(len(DATA), DIGEST).headers["upload-offset"] == str(len(DATA))


def test_an_upload_survives_an_outage_of_the_store_for_seconds(
    servers: Servers, object_store: ObjectStore, bucket: str, tmp_path: Path
) -> None:
    source = write_file(tmp_path, DATA)
    with _over(servers, object_store, bucket, tmp_path) as (running, _):
        object_store.stop()

        def come_back() -> None:
            time.sleep(3)
            object_store.start()

        back = threading.Thread(target=come_back)
        back.start()
        try:
            with Client(running.url, running.admin_token, retry=PATIENT) as client:
                assert client.add_public_dataset("scans", source).digest == DIGEST
        finally:
            back.join()
        assert object_store.objects(bucket) == [PLACE]


def test_a_damaged_copy_is_fetched_again_and_a_damaged_object_is_set_aside(
    servers: Servers, object_store: ObjectStore, bucket: str, tmp_path: Path
) -> None:
    with _over(servers, object_store, bucket, tmp_path) as (running, url), Tables(url) as tables:
        scenario = Scenario(running, tables, tmp_path, "ab", num_rounds=1)
        scenario.work("a", value=1.0)
        scenario.work("b", value=3.0)
        [update, _] = [str(part.update) for part in scenario.round.assignments]
        state = str(scenario.run.server_state)
        for digest in (update, state):  # damaged local copies are fetched again
            _flip(tmp_path / "cache" / "files" / digest)
        [place] = (object_store.folder / bucket).rglob(update)
        content = place.read_bytes()
        _flip(place)
        object_store.look_again()
        scenario.advance()
        assert scenario.states() == [("a", 1, "expired"), ("a", 2, "offered"), ("b", 1, "accepted")]
        assert [event.data["digest"] for event in scenario.events("artifact.damaged")] == [update]
        assert [update in key for key in object_store.objects(bucket) if "/damaged/" in key] == [True]
        scenario.work("a", value=1.0)
        scenario.advance()
        assert scenario.run.outcome == "completed"
        [place] = [path for path in (object_store.folder / bucket).rglob(update) if "damaged" not in path.parts]
        assert place.read_bytes() == content


def _flip(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def test_missing_and_damaged_objects_in_the_bucket_are_found(
    servers: Servers, object_store: ObjectStore, bucket: str, tmp_path: Path
) -> None:
    with _over(servers, object_store, bucket, tmp_path) as (running, url), Tables(url) as tables:
        scenario = Scenario(running, tables, tmp_path, "ab")
        from fedssl_coordinator.core.store import store
        from fedssl_coordinator.storage.retention.collection import collect
        from fedssl_coordinator.storage.retention.verification import verify_store

        scenario.work("a", value=1.0)
        scenario.work("b", value=3.0)
        scenario.advance()
        assert [checked.fault for checked in verify_store()] == [None, None]  # both rounds' weights
        broadcast = scenario.round.broadcast
        assert broadcast is not None
        assert load_tensors(store().path(broadcast))
        [place] = (object_store.folder / bucket).rglob(broadcast)
        content = place.read_bytes()
        place.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        object_store.look_again()
        assert "has other bytes" in [checked.fault for checked in verify_store()]  # the local copy does not count
        place.unlink()
        object_store.look_again()
        assert "is missing" in [checked.fault for checked in verify_store()]
        collected = collect()
        assert collected is not None
        assert collected.counts["update"] == 2
