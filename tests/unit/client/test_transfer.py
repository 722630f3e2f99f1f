"""Downloads that break and go on, uploads from disk."""

import hashlib
import random
from pathlib import Path
from uuid import uuid4

import pytest

from fedssl.client import Client, LeaseLost, Rejected, Retry, Unreachable, WorkerClient
from fedssl.errors import ArtifactTooLarge, Cancelled, DigestMismatch

from .conftest import Answer, Received, Script, ScriptedServer, json_answer, problem

QUICK = Retry(seconds=2, first_delay=0.01, max_delay=0.05)
BODY = random.Random(1).randbytes(300_000)
DIGEST = hashlib.sha256(BODY).hexdigest()
ETAG = f'"{DIGEST}"'


def breaking(cut_after: int | None, body: bytes = BODY, etag: str | None = ETAG, *, ranges: bool = True) -> Script:
    """Serves `body`, breaking off every answer after `cut_after` bytes."""

    def script(request: Received) -> Answer:
        headers = {} if etag is None else {"ETag": etag}
        wanted = request.headers.get("Range")
        if wanted is None or not ranges or request.headers.get("If-Range", etag) != etag:
            return Answer(200, body, headers, cut_after=cut_after)
        start = int(wanted.removeprefix("bytes=").removesuffix("-"))
        headers["Content-Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
        rest = body[start:]
        cut = cut_after if cut_after is not None and cut_after < len(rest) else None
        return Answer(206, rest, headers, cut_after=cut)

    return script


@pytest.mark.parametrize("etag", [ETAG, None])
def test_a_broken_download_goes_on_where_it_broke(server: ScriptedServer, tmp_path: Path, etag: str | None) -> None:
    server.script = breaking(100_001, etag=etag)
    with WorkerClient(server.url, "t", retry=QUICK) as client:
        client.download(DIGEST, tmp_path / "broadcast")
    assert (tmp_path / "broadcast").read_bytes() == BODY
    ranges = [request.headers.get("Range") for request in server.requests]
    assert ranges == [None, "bytes=100001-", "bytes=200002-"]
    assert [path.name for path in tmp_path.iterdir()] == ["broadcast"]


def test_a_server_without_ranges_is_read_from_the_start(server: ScriptedServer, tmp_path: Path) -> None:
    scripts = [breaking(1000, ranges=False), breaking(None, ranges=False)]
    server.script = lambda request: scripts[len(server.requests) - 1](request)
    with WorkerClient(server.url, "t", retry=QUICK) as client:
        client.download(DIGEST, tmp_path / "broadcast")
    assert (tmp_path / "broadcast").read_bytes() == BODY


def test_a_model_that_changed_meanwhile_is_read_from_the_start(server: ScriptedServer, tmp_path: Path) -> None:
    newer = random.Random(2).randbytes(200_000)
    digest = hashlib.sha256(newer).hexdigest()
    scripts = [breaking(1000), breaking(None, newer, f'"{digest}"')]
    server.script = lambda request: scripts[min(len(server.requests), 2) - 1](request)
    with Client(server.url, "t", retry=QUICK) as client:
        assert client.download_model(uuid4(), tmp_path / "encoder.safetensors") == digest
    assert (tmp_path / "encoder.safetensors").read_bytes() == newer


def test_wrong_bytes_leave_no_file_and_keep_the_old_one(server: ScriptedServer, tmp_path: Path) -> None:
    server.script = breaking(None, b"other bytes")
    (tmp_path / "broadcast").write_bytes(b"old")
    with WorkerClient(server.url, "t") as client, pytest.raises(DigestMismatch):
        client.download(DIGEST, tmp_path / "broadcast")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"broadcast": b"old"}


@pytest.mark.parametrize("with_length", [True, False])
def test_more_bytes_than_expected_are_not_taken(server: ScriptedServer, tmp_path: Path, *, with_length: bool) -> None:
    server.script = lambda request: Answer(200, BODY, with_length=with_length)
    with WorkerClient(server.url, "t") as client, pytest.raises(ArtifactTooLarge):
        client.download(DIGEST, tmp_path / "broadcast", max_bytes=len(BODY) - 1)
    assert list(tmp_path.iterdir()) == []


def test_a_download_that_never_moves_is_given_up(server: ScriptedServer, tmp_path: Path) -> None:
    server.script = lambda request: Answer(200, BODY, cut_after=0)
    with (
        WorkerClient(server.url, "t", retry=Retry(seconds=0.2, first_delay=0.02)) as client,
        pytest.raises(Unreachable),
    ):
        client.download(DIGEST, tmp_path / "broadcast")
    assert list(tmp_path.iterdir()) == []


def test_an_upload_says_its_length_and_its_assignment(server: ScriptedServer, tmp_path: Path) -> None:
    server.script = lambda request: Answer(201) if len(server.requests) > 1 else problem("unavailable", 503)
    (tmp_path / "update").write_bytes(BODY)
    assignment_id = uuid4()
    with WorkerClient(server.url, "t", retry=QUICK) as client:
        client.upload(DIGEST, tmp_path / "update", assignment_id)
    for request in server.requests:
        assert request.method == "PUT"
        assert request.path == f"/v1/artifacts/{DIGEST}"
        assert request.query == {"assignment": str(assignment_id)}
        assert request.headers["Content-Length"] == str(len(BODY))
        assert "Transfer-Encoding" not in request.headers
        assert request.body == BODY


@pytest.mark.parametrize(
    ("slug", "status", "kind"), [("lease-lost", 409, LeaseLost), ("artifact-rejected", 422, Rejected)]
)
def test_a_refused_upload_is_not_sent_again(
    server: ScriptedServer, tmp_path: Path, slug: str, status: int, kind: type[Exception]
) -> None:
    server.script = lambda request: problem(slug, status)
    (tmp_path / "update").write_bytes(BODY)
    with WorkerClient(server.url, "t", retry=QUICK) as client, pytest.raises(kind):
        client.upload(DIGEST, tmp_path / "update", uuid4())
    assert len(server.requests) == 1


def test_a_download_tells_how_far_it_is_and_can_be_called_off(server: ScriptedServer, tmp_path: Path) -> None:
    server.script = breaking(100_001)
    told: list[int] = []

    def enough(count: int) -> None:
        told.append(count)
        if count > 150_000:
            raise Cancelled("called off")

    with WorkerClient(server.url, "t", retry=QUICK) as client, pytest.raises(Cancelled):
        client.download(DIGEST, tmp_path / "public", on_bytes=enough)
    assert told == sorted(told)
    assert told[-1] > 150_000
    assert list(tmp_path.iterdir()) == []


def test_a_data_set_is_sent_where_the_coordinator_lacks_it(server: ScriptedServer, tmp_path: Path) -> None:
    view = {
        "name": "scans", "digest": DIGEST, "split": "train", "num_images": 2, "channels": 1, "image_size": 8,
        "created_at": "2026-01-01T00:00:00Z",
    }  # fmt: skip

    def script(request: Received) -> Answer:
        if request.method == "PUT":
            return Answer(201)
        sent = any(earlier.method == "PUT" for earlier in server.requests)
        return json_answer(view, 201) if sent else problem("not-found", 404)

    server.script = script
    (tmp_path / "scans").write_bytes(BODY)
    told: list[int] = []
    with Client(server.url, "t", retry=QUICK) as client:
        assert client.add_public_dataset("scans", tmp_path / "scans", on_bytes=told.append).digest == DIGEST
        client.add_public_dataset("scans", tmp_path / "scans", on_bytes=told.append)
    assert told == [len(BODY)]
    assert [(request.method, request.path) for request in server.requests] == [
        ("POST", "/v1/public-datasets"),
        ("PUT", f"/v1/artifacts/{DIGEST}"),
        ("POST", "/v1/public-datasets"),
        ("POST", "/v1/public-datasets"),
    ]
    assert (server.requests[1].query, server.requests[1].body) == ({}, BODY)
