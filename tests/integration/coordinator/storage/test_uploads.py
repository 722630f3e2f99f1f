"""Uploads continue where they broke off. They complete over a connection that breaks, and never exceed their limit."""

import base64
import errno
import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import numpy as np
import pytest
from safetensors.numpy import save

from fedssl.artifacts.partial import PartialFile
from fedssl.artifacts.tensors import serialised
from fedssl.client import Client, Retry, WorkerClient
from fedssl.client.uploads import WHOLE_BYTES
from fedssl.errors import StoreUnavailable
from fedssl_coordinator.core.models import PartialUpload
from fedssl_coordinator.storage.artifacts import streaming
from fedssl_coordinator.storage.uploads import streaming as uploads
from support.coordinator import Coordinator
from support.data_sets import public_bytes, write_file
from support.federation import tensors_for
from support.proxy import BreakingProxy
from support.scenario import Scenario
from support.servers import Servers
from support.tables import ChangeWatcher, Tables
from support.tus import Tus
from support.uploads import build_file, digest, safetensors_bytes, split_file

PATIENT = Retry(seconds=20, first_delay=0.01, max_delay=0.1)
DATA = public_bytes(num_images=1000, size=64)  # 4 MB
DIGEST = digest(DATA)
OTHER = DATA[:-1] + bytes([DATA[-1] ^ 1])
HEADER = len(DATA) - len(split_file(DATA)[1])


@pytest.fixture
def tus(coordinator: Coordinator) -> Iterator[Tus]:
    with Tus(coordinator) as tus:
        yield tus


def _stored(coordinator: Coordinator, name: str = DIGEST) -> bytes:
    return (coordinator.store / name[:2] / name[2:4] / name).read_bytes()


def _partials(coordinator: Coordinator) -> list[Path]:
    return list((coordinator.store / "partial").glob("*"))


def test_four_megabytes_arrive_over_a_connection_that_breaks_repeatedly(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    source, told = write_file(tmp_path, DATA), list[int]()
    with (
        BreakingProxy(coordinator.url, after_bytes=700_000, bytes_per_second=20e6) as proxy,
        Client(proxy.url, coordinator.admin_token, retry=PATIENT) as client,
        WorkerClient(proxy.url, coordinator.admin_token, retry=PATIENT) as reader,
    ):
        assert client.add_public_dataset("scans", source, on_bytes=told.append).digest == DIGEST
        assert proxy.num_cuts >= 5
        assert proxy.num_bytes < 2 * len(DATA)  # it continued, and did not start from scratch
        assert _stored(coordinator) == DATA
        assert _partials(coordinator) == []
        assert max(told) == len(DATA)
        cuts = proxy.num_cuts
        reader.download(DIGEST, tmp_path / "fetched")
        assert proxy.num_cuts >= cuts + 5
    assert (tmp_path / "fetched").read_bytes() == DATA


@pytest.mark.full
def test_an_upload_continues_after_a_restart_of_the_coordinator(servers: Servers, tmp_path: Path) -> None:
    source, store = write_file(tmp_path, DATA), tmp_path / "store"
    told: list[list[int]] = [[]]
    with servers.database() as url, ExitStack() as first, ExitStack() as second:
        begun = first.enter_context(Coordinator(url, servers.redis_url, store))
        proxy = second.enter_context(BreakingProxy(begun.url, bytes_per_second=20e6))
        client = second.enter_context(Client(proxy.url, begun.admin_token, retry=PATIENT))

        def restart(done: int) -> None:
            told[-1].append(done)
            if len(told) == 1 and done >= 3 << 20:
                told.append([])
                while not sum(path.stat().st_size for path in _partials(begun)):
                    time.sleep(0.01)
                first.close()
                again = second.enter_context(Coordinator(url, servers.redis_url, store))
                proxy.target = ("127.0.0.1", int(again.url.rpartition(":")[2]))

        client.add_public_dataset("scans", source, on_bytes=restart)
        assert _stored(begun) == DATA
        assert _partials(begun) == []
    before, after = told
    assert 0 < after[0] <= max(before) < len(DATA)


def test_the_same_file_from_several_concurrent_senders_is_stored_once(
    coordinator: Coordinator, tmp_path: Path, tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Otherwise a sender waits for a second whenever another one is sending.
    monkeypatch.setattr("fedssl.client.connection.retry_after", lambda headers: 0.05)
    source = write_file(tmp_path, DATA)
    tokens = [coordinator.admin_token, coordinator.admin_token, coordinator.operator_token]
    names: list[str] = []

    def send(number: int, token: str) -> None:
        with Client(proxy.url, token, retry=PATIENT) as client:
            names.append(client.add_public_dataset(f"scans-{number}", source).digest)

    with BreakingProxy(coordinator.url, after_bytes=1_500_000) as proxy:
        threads = [threading.Thread(target=send, args=pair) for pair in enumerate(tokens)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert names == [DIGEST] * 3
    assert _stored(coordinator) == DATA
    assert tables.query("SELECT digest, num_bytes FROM artifacts") == [(DIGEST, len(DATA))]


def test_a_part_is_accepted_only_where_the_last_one_ended(coordinator: Coordinator, tus: Tus) -> None:
    location = tus.begin(len(DATA), DIGEST)
    assert tus.offset(location) == 0
    assert tus.send(location, DATA[:1_000_000], 0).headers["upload-offset"] == "1000000"
    for wrong in (0, 999_999, 1_000_001, len(DATA)):
        answer = tus.send(location, DATA[wrong : wrong + 10], wrong)
        assert (answer.status_code, answer.json()["type"]) == (409, "urn:fedssl:problem:offset-mismatch")
        assert "continue at byte 1000000" in answer.json()["detail"]
    assert tus.offset(location) == 1_000_000
    again = tus.announce(len(DATA), DIGEST)  # a sender that remembers nothing
    assert (again.headers["location"], again.headers["upload-offset"]) == (location, "1000000")
    assert tus.send(location, DATA[1_000_000:], 1_000_000).headers["upload-offset"] == str(len(DATA))
    assert _stored(coordinator) == DATA
    assert tus.offset(location) == len(DATA)
    assert tus.send(location, DATA, 0).status_code == 409
    assert tus.announce(len(DATA), DIGEST).headers["upload-offset"] == str(len(DATA))


def test_a_file_that_is_finished_while_it_is_announced_again_is_not_sent_again(
    coordinator: Coordinator, tus: Tus, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedssl_coordinator.storage.uploads import repository

    find, location = repository.find, tus.begin(len(DATA), DIGEST)

    def finish_before(*asked: Any) -> PartialUpload | None:
        monkeypatch.undo()
        with Tus(coordinator) as other:
            assert other.send(location, DATA, 0).status_code == 204
        return find(*asked)

    monkeypatch.setattr(repository, "find", finish_before)
    assert tus.announce(len(DATA), DIGEST).headers["upload-offset"] == str(len(DATA))


def test_a_file_that_was_complete_but_not_checked_before_a_kill_is_checked_on_request(
    coordinator: Coordinator, tus: Tus, monkeypatch: pytest.MonkeyPatch
) -> None:
    location, locked = tus.begin(len(DATA), DIGEST), PartialFile.locked
    partial = coordinator.store / "partial" / location.rpartition("/")[2].replace("-", "")
    partial.parent.mkdir(exist_ok=True)
    partial.write_bytes(DATA)

    def finish_before(self: PartialFile) -> Any:
        monkeypatch.undo()
        with Tus(coordinator) as other:
            assert other.offset(location) == len(DATA)
        return locked(self)

    monkeypatch.setattr(PartialFile, "locked", finish_before)
    assert tus.offset(location) == len(DATA)  # although another request has finished it in between
    assert _stored(coordinator) == DATA
    assert not partial.exists()


@pytest.mark.parametrize("offset", [0, 2_000_000], ids=["one request", "two requests"])
def test_bytes_with_another_digest_are_refused_and_removed(
    offset: int, coordinator: Coordinator, change_watcher: ChangeWatcher, tus: Tus
) -> None:
    with change_watcher.nothing_changes() as events:
        location = tus.begin(len(DATA), DIGEST)
        if offset:
            assert tus.send(location, OTHER[:offset], 0).status_code == 204
        answer = tus.send(location, OTHER[offset:], offset)
        assert (answer.status_code, answer.json()["type"]) == (422, "urn:fedssl:problem:artifact-rejected")
        assert f"the announced one is {DIGEST}" in answer.json()["detail"]
        assert tus.request("HEAD", location).status_code == 404
    assert [event.kind for event in events] == ["artifact.refused"]


def test_a_file_that_replaced_the_received_one_is_hashed_before_it_is_stored(
    coordinator: Coordinator, tus: Tus, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    append, location = PartialFile.append, tus.begin(len(DATA), DIGEST)

    def append_and_replace(partial: PartialFile, parts: list[bytes], offset: int) -> None:
        append(partial, parts, offset)
        if partial.size == len(DATA):
            (tmp_path / "other").write_bytes(OTHER)
            (tmp_path / "other").replace(partial.path)

    monkeypatch.setattr(PartialFile, "append", append_and_replace)
    answer = tus.send(location, DATA, 0)
    assert (answer.status_code, answer.json()["type"]) == (422, "urn:fedssl:problem:artifact-rejected")


@pytest.mark.parametrize("way", ["PUT", "tus"])
def test_an_upload_is_synced_while_it_arrives_and_refused_if_the_disk_fails(
    way: str, coordinator: Coordinator, tus: Tus, monkeypatch: pytest.MonkeyPatch
) -> None:
    def send() -> httpx.Response:
        if way == "tus":
            return tus.send(tus.begin(len(DATA), DIGEST), DATA, 0)
        with coordinator.http() as http:
            return http.put(f"/v1/artifacts/{DIGEST}", content=DATA)

    synced: list[int] = []

    def fail(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_size)
        if len(synced) == 2:
            raise OSError(errno.EIO, "the disk is broken")

    monkeypatch.setattr(f"{streaming.__name__}.SYNC_BYTES", 1 << 20)
    monkeypatch.setattr(f"{uploads.__name__}.SYNC_BYTES", 1 << 20)
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, fail)
    assert send().status_code == 503
    assert len(synced) >= 2
    assert synced[0] < len(DATA)
    assert _partials(coordinator) == []
    assert send().status_code in (201, 204)
    assert _stored(coordinator) == DATA


def test_a_header_is_checked_before_any_byte_is_kept(
    coordinator: Coordinator, change_watcher: ChangeWatcher, tus: Tus
) -> None:
    weights = save({"projector.weight": np.zeros((1000, 1000), np.float32)})
    with change_watcher.nothing_changes() as events:
        location = tus.begin(len(weights), digest(weights))
        answer = tus.send(location, weights[:2000], 0)
        assert answer.status_code == 422
        assert "the file is not a data set" in answer.json()["detail"]
        location = tus.begin(len(DATA) + 1, DIGEST)
        assert "bytes, " in tus.send(location, DATA[:2000], 0).json()["detail"]
        location = tus.begin(len(DATA), DIGEST)
        answer = tus.send(location, build_file(*split_file(DATA), length=2**40), 0)
        assert (answer.status_code, answer.json()["type"]) == (413, "urn:fedssl:problem:artifact-too-large")
        location = tus.begin(len(DATA), DIGEST)
        assert "within the safetensors header" in tus.send(location, DATA[: HEADER - 1], 0).json()["detail"]
    assert {event.kind for event in events} == {"artifact.refused"}


def test_more_bytes_than_allowed_or_announced_are_refused(
    coordinator: Coordinator, change_watcher: ChangeWatcher, tus: Tus
) -> None:
    with change_watcher.nothing_changes() as events:
        answer = tus.announce(21 * 10**9, DIGEST)
        assert (answer.status_code, answer.json()["type"]) == (413, "urn:fedssl:problem:artifact-too-large")
        assert "FEDSSL_MAX_DATASET_BYTES" in answer.json()["detail"]
        location = tus.begin(len(DATA), DIGEST)
        assert tus.send(location, DATA + b"\0", 0).status_code == 413
        location = tus.begin(len(DATA), DIGEST)
        tus.send(location, DATA[:5000], 0)
        assert tus.send(location, iter([DATA[5000:], b"\0"]), 5000).status_code == 413  # without a Content-Length
    assert [event.kind for event in events] == ["artifact.refused"] * 3


def test_only_the_worker_of_an_assignment_can_upload_its_update(
    coordinator: Coordinator, tables: Tables, tmp_path: Path
) -> None:
    wide = {"encoder": {"widths": [64, 256]}, "projector": {"hidden_dims": [512], "out_dim": 256}}
    scenario = Scenario(coordinator, tables, tmp_path, "ab", model=wide)
    item, other = scenario.claim("a"), scenario.claim("b")
    data = safetensors_bytes(tensors_for(item.plan.update, 1.0))
    assert len(data) > WHOLE_BYTES
    name, tokens = digest(data), {who: coordinator.worker_token(who) for who in "ab"}
    with Tus(coordinator, tokens["a"]) as own, Tus(coordinator, tokens["b"]) as foreign, Tus(coordinator) as admin:
        location = own.begin(len(data), name, item.assignment_id)
        assert own.send(location, data[:500_000], 0).status_code == 204
        for stranger in (foreign, admin):
            assert stranger.send(location, data[500_000:], 500_000).status_code == 404
            assert [stranger.request(method, location).status_code for method in ("HEAD", "DELETE")] == [404, 404]
        assert foreign.announce(len(data), name, item.assignment_id).status_code == 404
        assert admin.announce(len(data), name, item.assignment_id).status_code == 403
        assert own.announce(len(data), name).status_code == 422
        assert foreign.announce(len(data), name, other.assignment_id).headers["upload-offset"] == "0"
        assert own.announce(10**9, name, item.assignment_id).status_code == 413
        with Tus(coordinator, coordinator.worker_token("a")) as renewed:  # the client's next token continues
            assert renewed.announce(len(data), name, item.assignment_id).headers["upload-offset"] == "500000"
        # An assignment has one upload: another file replaces it.
        spoilt = safetensors_bytes(tensors_for(item.plan.update, float("inf")))
        second = own.begin(len(data), digest(spoilt), item.assignment_id)
        assert own.request("HEAD", location).status_code == 404
        answer = own.send(second, spoilt, 0)
        assert (answer.status_code, "NaN or infinity" in answer.json()["detail"]) == (422, True)
    assert _partials(coordinator) == []
    scenario.deliver("a")  # as the client itself sends it
    assert [a.state.value for a in scenario.round.assignments if a.client_id == "a"] == ["accepted"]


def test_an_upload_ends_with_its_lease(coordinator: Coordinator, tables: Tables, tmp_path: Path) -> None:
    scenario = Scenario(coordinator, tables, tmp_path, "a")
    item = scenario.claim("a")
    data = serialised(tensors_for(item.plan.update, 1.0))
    with Tus(coordinator, coordinator.worker_token("a")) as own:
        location = own.begin(len(data), digest(data), item.assignment_id)
        coordinator.client.stop(scenario.id)
        answer = own.send(location, data, 0)
    assert answer.status_code in (409, 410), answer.text
    assert _partials(coordinator) == []


def test_an_upload_that_stalls_expires_after_a_day(coordinator: Coordinator, tables: Tables, tus: Tus) -> None:
    from fedssl_coordinator.storage.uploads.expiry import expire_uploads

    def expire(hours: float) -> list[int]:
        return expire_uploads(datetime.now(UTC) + timedelta(hours=hours))

    location = tus.begin(len(DATA), DIGEST)
    answer = tus.send(location, DATA[:5000], 0)
    day = datetime.strptime(answer.headers["upload-expires"], "%a, %d %b %Y %H:%M:%S %Z").replace(tzinfo=UTC)
    assert timedelta(hours=23) < day - datetime.now(UTC) <= timedelta(hours=24)
    (coordinator.store / "partial" / "of-nobody").write_bytes(b"left over")
    tables.execute("UPDATE partial_uploads SET created_at = now() - interval '30 hours'")
    assert expire(0) == [len(b"left over")]  # the other upload received bytes a moment ago
    assert [path.stat().st_size for path in _partials(coordinator)] == [5000]
    assert tus.offset(location) == 5000
    assert expire(25) == [5000]
    assert _partials(coordinator) == []
    assert tus.request("HEAD", location).status_code == 404
    assert tus.begin(len(DATA), DIGEST) != location


def test_an_upload_that_the_store_cannot_remove_does_not_keep_the_others(
    coordinator: Coordinator, tables: Tables, tus: Tus, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedssl_coordinator.storage.uploads.expiry import expire_uploads

    others = public_bytes(num_images=500, size=64)
    first, second = (tus.begin(len(data), digest(data)) for data in (DATA, others))
    tus.send(first, DATA[:5000], 0)
    tus.send(second, others[:5000], 0)
    (coordinator.store / "partial" / "of-nobody").write_bytes(b"left over")
    tables.execute("UPDATE partial_uploads SET created_at = now() - interval '30 hours'")
    stuck, discard = UUID(first.rpartition("/")[2]).hex, PartialFile.discard

    def away(partial: PartialFile) -> None:
        if partial.path.name == stuck:
            raise StoreUnavailable("the object store answered 403")
        discard(partial)

    later = datetime.now(UTC) + timedelta(hours=25)
    with monkeypatch.context() as patch:
        patch.setattr(PartialFile, "discard", away)
        assert sorted(expire_uploads(later)) == [9, 5000]
        assert tus.request("DELETE", first).status_code == 204  # its bytes stay until a later collection
    assert [path.name for path in _partials(coordinator)] == [stuck]
    assert tables.one("SELECT count(*) FROM partial_uploads") == 0
    assert expire_uploads(later) == [5000]
    assert _partials(coordinator) == []


def test_an_owner_can_delete_an_unfinished_upload(
    coordinator: Coordinator, change_watcher: ChangeWatcher, tus: Tus
) -> None:
    with change_watcher.nothing_changes():
        location = tus.begin(len(DATA), DIGEST)
        tus.send(location, DATA[:5000], 0)
        assert tus.request("DELETE", location).status_code == 204
        assert tus.request("DELETE", location).status_code == 404


def test_a_sender_is_notified_if_its_upload_is_deleted_while_it_is_checked(
    tus: Tus, monkeypatch: pytest.MonkeyPatch
) -> None:
    location, check = tus.begin(len(DATA), DIGEST), uploads.service.check_file

    def check_late(*arguments: Any) -> None:
        assert tus.request("DELETE", location).status_code == 204
        check(*arguments)

    monkeypatch.setattr(uploads.service, "check_file", check_late)
    answer = tus.send(location, DATA, 0)
    assert answer.status_code == 423
    assert "another request has just deleted or finished this upload" in answer.text


def test_requests_that_violate_the_tus_protocol_are_refused(
    coordinator: Coordinator, change_watcher: ChangeWatcher, tus: Tus
) -> None:
    with change_watcher.nothing_changes():
        location = tus.begin(len(DATA), DIGEST)
        other = tus.send(location, DATA, 0, Tus_Resumable="0.2.2")
        assert (other.status_code, other.headers["tus-version"]) == (412, "1.0.0")
        announced = {"Upload-Length": "5", "Upload-Metadata": f"digest {base64.b64encode(DIGEST.encode()).decode()}"}
        for method, path, headers in (
            ("POST", "/v1/uploads", announced),
            ("HEAD", location, {}),
            ("DELETE", location, {}),
        ):
            assert tus.request(method, path, **headers, **{"Tus-Resumable": "0.2.2"}).status_code == 412, method
        assert tus.send(location, DATA, 0, Content_Type="application/octet-stream").status_code == 415
        assert tus.send(location, DATA, -1).status_code == 422
        for metadata in ("", "digest", "digest !", "digest AA==,assignment", f"digest {'A' * 2000}", "name eA=="):
            answer = tus.request("POST", "/v1/uploads", **{"Upload-Length": "5", "Upload-Metadata": metadata})
            assert answer.status_code == 422, metadata
        assert tus.request("POST", "/v1/uploads", **{"Upload-Length": "0", "Upload-Metadata": ""}).status_code == 422
        tus.request("DELETE", location)


def test_upload_expires_does_not_depend_on_the_time_zone_of_the_database(servers: Servers, tmp_path: Path) -> None:
    with (
        servers.database() as url,
        Coordinator(url, servers.redis_url, tmp_path / "store", PGTZ="Asia/Tokyo") as running,
        Tus(running) as tus,
    ):
        answer = tus.announce(len(DATA), digest(DATA))
    assert answer.status_code == 201
    end = datetime.strptime(answer.headers["upload-expires"], "%a, %d %b %Y %H:%M:%S GMT").replace(tzinfo=UTC)
    assert abs(end - datetime.now(UTC) - timedelta(days=1)) < timedelta(minutes=5)


@pytest.mark.parametrize("name", ["digest", "assignment", "name"])
def test_upload_metadata_that_names_a_value_twice_is_refused(
    coordinator: Coordinator, change_watcher: ChangeWatcher, name: str
) -> None:
    """It would be unclear which of the two values counts."""
    first, other = (base64.b64encode(value.encode()).decode() for value in (DIGEST, "0" * 64))
    pairs = {"digest": [f"digest {first}"], "assignment": [], "name": []}
    pairs[name] += [f"{name} {other}", f"{name} {other}"][len(pairs[name]) :]
    metadata = ",".join(pair for values in pairs.values() for pair in values)
    with coordinator.http() as http, change_watcher.nothing_changes():
        headers = {"Tus-Resumable": "1.0.0", "Upload-Length": "5", "Upload-Metadata": metadata}
        answer = http.post("/v1/uploads", headers=headers)
    assert answer.status_code == 422
    assert "names a value twice" in answer.text


@pytest.mark.parametrize("name", ["Upload-Length", "Upload-Metadata", "Tus-Resumable"])
def test_a_header_that_is_sent_twice_is_refused(
    coordinator: Coordinator, change_watcher: ChangeWatcher, name: str
) -> None:
    metadata = f"digest {base64.b64encode(DIGEST.encode()).decode()}"
    headers = [("Tus-Resumable", "1.0.0"), ("Upload-Length", "5"), ("Upload-Metadata", metadata)]
    with coordinator.http() as http:
        with change_watcher.nothing_changes():
            answer = http.post("/v1/uploads", headers=[*headers, (name, dict(headers)[name])])
        assert answer.status_code == 422
        assert "was sent twice" in answer.text
        assert http.post("/v1/uploads", headers=headers).status_code == 201


def test_an_offset_that_is_sent_twice_is_refused(tus: Tus) -> None:
    location = tus.begin(len(DATA), DIGEST)
    lines = [("Upload-Offset", "0"), ("Upload-Offset", "9"), ("Content-Type", "application/offset+octet-stream")]
    assert tus._http.patch(location, content=DATA, headers=lines).status_code == 422
    assert tus.offset(location) == 0
    assert tus.send(location, DATA, 0).status_code == 204
