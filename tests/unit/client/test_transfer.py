"""Downloads that break and resume, and uploads from disk."""

import base64
import errno
import fcntl
import hashlib
import random
import resource
import time
from pathlib import Path
from types import SimpleNamespace
from uuid import uuid4

import pytest

from fedssl.client import (
    BadAnswer,
    Client,
    ClientError,
    LeaseLost,
    NotFound,
    Rejected,
    Retry,
    TryAgain,
    Unreachable,
    WorkerClient,
)
from fedssl.client.uploads import WHOLE_BYTES
from fedssl.errors import ArtifactTooLarge, Cancelled, DigestMismatch

from .conftest import Answer, Received, Script, ScriptedServer, json_answer, problem
from .test_connection import run_view

QUICK = Retry(seconds=20, first_delay=0.01, max_delay=0.05)
BODY = random.Random(1).randbytes(300_000)
DIGEST = hashlib.sha256(BODY).hexdigest()
ETAG = f'"{DIGEST}"'


def breaking(cut_after: int | None, body: bytes = BODY, etag: str | None = ETAG, *, ranges: bool = True) -> Script:
    """Return a script that serves `body`, and breaks every answer after `cut_after` bytes."""

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
def test_a_broken_download_resumes_where_it_broke(server: ScriptedServer, tmp_path: Path, etag: str | None) -> None:
    server.script = breaking(100_001, etag=etag)
    with WorkerClient(server.url, "t", retry=QUICK) as client:
        client.download(DIGEST, tmp_path / "broadcast")
    assert (tmp_path / "broadcast").read_bytes() == BODY
    ranges = [request.headers.get("Range") for request in server.requests]
    assert ranges == [None, "bytes=100001-", "bytes=200002-"]
    assert [path.name for path in tmp_path.iterdir()] == ["broadcast"]


def test_without_ranges_a_download_restarts_from_the_beginning(server: ScriptedServer, tmp_path: Path) -> None:
    scripts = [breaking(1000, ranges=False), breaking(None, ranges=False)]
    server.script = lambda request: scripts[len(server.requests) - 1](request)
    with WorkerClient(server.url, "t", retry=QUICK) as client:
        client.download(DIGEST, tmp_path / "broadcast")
    assert (tmp_path / "broadcast").read_bytes() == BODY


def test_a_model_that_changed_meanwhile_is_read_from_the_beginning(server: ScriptedServer, tmp_path: Path) -> None:
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
def test_more_bytes_than_expected_are_refused(server: ScriptedServer, tmp_path: Path, *, with_length: bool) -> None:
    server.script = lambda request: Answer(200, BODY, with_length=with_length)
    with WorkerClient(server.url, "t") as client, pytest.raises(ArtifactTooLarge):
        client.download(DIGEST, tmp_path / "broadcast", max_bytes=len(BODY) - 1)
    assert list(tmp_path.iterdir()) == []


def test_a_file_larger_than_the_free_disk_space_is_not_started(
    server: ScriptedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=len(BODY) - 1))
    server.script = breaking(None)
    with Client(server.url, "t") as client, pytest.raises(OSError, match="300,000 bytes will arrive") as caught:
        client.download_model(uuid4(), tmp_path / "model")
    assert caught.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []


def test_an_endless_file_does_not_leave_the_disk_full(server: ScriptedServer, tmp_path: Path) -> None:
    server.script = lambda request: Answer(200, BODY * 10, with_length=False)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Client(server.url, "t") as client:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(BODY), before[1]))  # stands for the size of the disk
        try:
            with pytest.raises(OSError, match="too large"):
                client.download_artifact(DIGEST, tmp_path / "artifact")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


def test_a_download_without_progress_is_given_up(server: ScriptedServer, tmp_path: Path) -> None:
    server.script = lambda request: Answer(200, BODY, cut_after=0)
    with (
        WorkerClient(server.url, "t", retry=Retry(seconds=0.2, first_delay=0.02)) as client,
        pytest.raises(Unreachable),
    ):
        client.download(DIGEST, tmp_path / "broadcast")
    assert list(tmp_path.iterdir()) == []


def test_an_upload_sends_its_length_and_its_assignment(server: ScriptedServer, tmp_path: Path) -> None:
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


def test_a_download_reports_its_progress_and_can_be_cancelled(server: ScriptedServer, tmp_path: Path) -> None:
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
    assert [path.name for path in tmp_path.iterdir()] == [f".public.{DIGEST}.part"]  # it may be resumed later


def test_a_data_set_is_uploaded_only_if_the_coordinator_lacks_it(server: ScriptedServer, tmp_path: Path) -> None:
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


def _left(folder: Path, name: str, content: bytes, digest: str = DIGEST) -> Path:
    """Write the partial file that an earlier process left."""
    path = folder / f".{name}.{digest}.part"
    path.write_bytes(content)
    return path


def test_a_download_started_by_an_earlier_process_is_resumed(server: ScriptedServer, tmp_path: Path) -> None:
    server.script = breaking(None)
    _left(tmp_path, "broadcast", BODY[:123_456])
    with WorkerClient(server.url, "t", retry=QUICK) as client:
        client.download(DIGEST, tmp_path / "broadcast")
    assert (tmp_path / "broadcast").read_bytes() == BODY
    [request] = server.requests
    assert (request.headers["Range"], request.headers["If-Range"]) == ("bytes=123456-", ETAG)
    assert [path.name for path in tmp_path.iterdir()] == ["broadcast"]


def test_a_file_that_was_complete_when_its_process_was_killed_is_used(server: ScriptedServer, tmp_path: Path) -> None:
    _left(tmp_path, "broadcast", BODY)
    with WorkerClient(server.url, "t", retry=QUICK) as client:
        client.download(DIGEST, tmp_path / "broadcast")
    assert (tmp_path / "broadcast").read_bytes() == BODY
    assert server.requests == []


@pytest.mark.parametrize("left", [b"x" * 1000, BODY[:-1] + b"y" * 9])
def test_a_damaged_partial_file_costs_a_second_request(server: ScriptedServer, tmp_path: Path, left: bytes) -> None:
    def script(request: Received) -> Answer:
        start = request.headers.get("Range", "bytes=0-").removeprefix("bytes=").removesuffix("-")
        too_far = int(start) >= len(BODY)
        return problem("range-not-satisfiable", 416) if too_far else breaking(None)(request)

    server.script = script
    _left(tmp_path, "broadcast", left)
    with WorkerClient(server.url, "t", retry=QUICK) as client:
        client.download(DIGEST, tmp_path / "broadcast")
    assert (tmp_path / "broadcast").read_bytes() == BODY
    assert len(server.requests) == 2


def test_the_partial_file_of_an_older_model_is_discarded(server: ScriptedServer, tmp_path: Path) -> None:
    newer = random.Random(2).randbytes(200_000)
    digest = hashlib.sha256(newer).hexdigest()
    server.script = breaking(None, newer, f'"{digest}"')
    _left(tmp_path, "encoder.safetensors", BODY[:1000])
    sizes: list[int] = []
    with Client(server.url, "t", retry=QUICK) as client:
        assert client.download_model(uuid4(), tmp_path / "encoder.safetensors", on_size=sizes.append) == digest
    assert (tmp_path / "encoder.safetensors").read_bytes() == newer
    assert sizes == [len(newer)]
    assert [path.name for path in tmp_path.iterdir()] == ["encoder.safetensors"]


def test_only_one_process_at_a_time_fetches_a_file(server: ScriptedServer, tmp_path: Path) -> None:
    server.script = breaking(None)
    with (
        WorkerClient(server.url, "t", retry=QUICK) as client,
        _left(tmp_path, "broadcast", BODY[:10]).open("rb") as held,
    ):
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ClientError, match="another process is fetching"):
            client.download(DIGEST, tmp_path / "broadcast")
    assert server.requests == []


def test_a_pull_ends_if_the_weights_stay_older_than_the_run(server: ScriptedServer, tmp_path: Path) -> None:
    """A proxy may answer with an older copy. Without the check, `pull` fetched it again and again."""
    view = run_view(uuid4()) | {"model": "0" * 64}
    server.script = lambda request: breaking(None)(request) if request.path.endswith("/model") else json_answer(view)
    with Client(server.url, "t") as client, pytest.raises(BadAnswer, match="answer with older weights"):
        client.pull(uuid4(), tmp_path)
    assert sum(request.path.endswith("/model") for request in server.requests) == 2


def test_a_missing_file_leaves_no_partial_file(server: ScriptedServer, tmp_path: Path) -> None:
    server.script = lambda request: problem("not-found", 404)
    _left(tmp_path, "broadcast", BODY[:10])
    with WorkerClient(server.url, "t", retry=QUICK) as client, pytest.raises(NotFound):
        client.download(DIGEST, tmp_path / "broadcast")
    assert list(tmp_path.iterdir()) == []


LARGE = random.Random(3).randbytes(WHOLE_BYTES + 500_000)
LARGE_DIGEST = hashlib.sha256(LARGE).hexdigest()
LOCATION = f"/v1/uploads/{uuid4()}"


def test_a_large_upload_resumes_at_the_byte_that_the_coordinator_names(server: ScriptedServer, tmp_path: Path) -> None:
    offsets = [0, 400_000, 400_000, len(LARGE)]
    parts = [problem("too-slow", 408), problem("offset-mismatch", 409), problem("upload-busy", 423)]

    def script(request: Received) -> Answer:
        sent = sum(earlier.method == "PATCH" for earlier in server.requests)
        if request.method == "PATCH":
            return parts[sent - 1]
        return Answer(201, headers={"Location": LOCATION, "Upload-Offset": str(offsets[sent])})

    server.script = script
    (tmp_path / "update").write_bytes(LARGE)
    assignment_id = uuid4()
    with WorkerClient(server.url, "t", retry=QUICK) as client:
        num_sent = client.upload(LARGE_DIGEST, tmp_path / "update", assignment_id)
    announced, *others = [request for request in server.requests if request.method == "POST"]
    assert len(others) == 3
    assert announced.headers["Upload-Length"] == str(len(LARGE))
    metadata = dict(pair.split(" ") for pair in announced.headers["Upload-Metadata"].split(","))
    assert {name: base64.b64decode(value).decode() for name, value in metadata.items()} == {
        "digest": LARGE_DIGEST,
        "assignment": str(assignment_id),
    }
    sent = [request for request in server.requests if request.method == "PATCH"]
    assert [(request.headers["Upload-Offset"], request.body) for request in sent] == [
        (str(offset), LARGE[offset:]) for offset in offsets[:3]
    ]
    assert all(request.headers["Tus-Resumable"] == "1.0.0" for request in server.requests)
    assert num_sent == sum(len(request.body) for request in sent)  # bytes that were sent again count again


def test_an_upload_can_be_cancelled(server: ScriptedServer, tmp_path: Path) -> None:
    server.script = lambda request: Answer(201, headers={"Location": LOCATION, "Upload-Offset": "0"})
    (tmp_path / "update").write_bytes(LARGE)

    def enough(count: int) -> None:
        if count:
            raise Cancelled("called off")

    with WorkerClient(server.url, "t", retry=QUICK) as client, pytest.raises(Cancelled):
        client.upload(LARGE_DIGEST, tmp_path / "update", uuid4(), enough)


def test_nothing_is_sent_if_the_coordinator_already_has_all_bytes(server: ScriptedServer, tmp_path: Path) -> None:
    server.script = lambda request: Answer(201, headers={"Location": LOCATION, "Upload-Offset": str(len(LARGE))})
    (tmp_path / "update").write_bytes(LARGE)
    with WorkerClient(server.url, "t", retry=QUICK) as client:
        assert client.upload(LARGE_DIGEST, tmp_path / "update", uuid4()) == 0
    assert [request.method for request in server.requests] == ["POST"]


@pytest.mark.parametrize("location", ["http://elsewhere.example/v1/uploads/x", "//elsewhere/v1/uploads/x", "/v1/runs"])
def test_an_upload_is_not_sent_to_another_address(server: ScriptedServer, tmp_path: Path, location: str) -> None:
    server.script = lambda request: Answer(201, headers={"Location": location, "Upload-Offset": "0"})
    (tmp_path / "update").write_bytes(LARGE)
    with WorkerClient(server.url, "t", retry=QUICK) as client, pytest.raises(BadAnswer):
        client.upload(LARGE_DIGEST, tmp_path / "update", uuid4())
    assert [request.method for request in server.requests] == ["POST"]


@pytest.mark.parametrize("method", ["POST", "PATCH"])
def test_a_large_upload_that_is_refused_is_not_sent_again(server: ScriptedServer, tmp_path: Path, method: str) -> None:
    def script(request: Received) -> Answer:
        begun = Answer(201, headers={"Location": LOCATION, "Upload-Offset": "0"})
        return problem("lease-lost", 409) if request.method == method else begun

    server.script = script
    (tmp_path / "update").write_bytes(LARGE)
    with WorkerClient(server.url, "t", retry=QUICK) as client, pytest.raises(LeaseLost):
        client.upload(LARGE_DIGEST, tmp_path / "update", uuid4())
    assert server.requests[-1].method == method


SHORT = Retry(seconds=0.3, first_delay=0.01, max_delay=0.02)


def slow_and_broken(server: ScriptedServer, breaking_off: Answer, kept: int, *, num_broken: int = 1) -> Script:
    """Return a script whose first PATCHs last longer than SHORT, end in `breaking_off`, and keep `kept` bytes."""

    def script(request: Received) -> Answer:
        sent = sum(earlier.method == "PATCH" for earlier in server.requests)
        if request.method == "PATCH" and sent <= num_broken:
            time.sleep(1.5 * SHORT.seconds)
            return breaking_off
        offset = str(kept if sent else 0)
        return Answer(204) if request.method == "PATCH" else Answer(201, headers=begun(offset))

    return script


def begun(offset: str) -> dict[str, str]:
    return {"Location": LOCATION, "Upload-Offset": offset}


BROKEN = Answer(200, b"broken", cut_after=0)


@pytest.mark.parametrize("breaking_off", [BROKEN, problem("too-slow", 408), problem("offset-mismatch", 409)])
def test_a_slow_upload_that_breaks_is_resumed(server: ScriptedServer, tmp_path: Path, breaking_off: Answer) -> None:
    server.script = slow_and_broken(server, breaking_off, 700_000)
    (tmp_path / "update").write_bytes(LARGE)
    with WorkerClient(server.url, "t", retry=SHORT) as client:
        client.upload(LARGE_DIGEST, tmp_path / "update", uuid4())
    assert [request.method for request in server.requests] == ["POST", "PATCH", "POST", "PATCH"]
    assert server.requests[-1].body == LARGE[700_000:]


def test_a_slow_upload_that_breaks_waits_for_an_unavailable_coordinator(server: ScriptedServer, tmp_path: Path) -> None:
    back = slow_and_broken(server, BROKEN, 700_000)

    def script(request: Received) -> Answer:
        return problem("unavailable", 503) if len(server.requests) in (3, 4) else back(request)

    server.script = script
    (tmp_path / "update").write_bytes(LARGE)
    with WorkerClient(server.url, "t", retry=SHORT) as client:
        client.upload(LARGE_DIGEST, tmp_path / "update", uuid4())
    assert [request.method for request in server.requests] == ["POST", "PATCH", "POST", "POST", "POST", "PATCH"]


@pytest.mark.full(but=2)
@pytest.mark.parametrize(
    ("breaking_off", "kind"),
    [
        (BROKEN, Unreachable),
        (problem("too-slow", 408), TryAgain),
        (problem("offset-mismatch", 409), TryAgain),
        (problem("not-found", 404), TryAgain),
    ],
)
def test_an_upload_without_progress_is_given_up_for_now(
    server: ScriptedServer, tmp_path: Path, breaking_off: Answer, kind: type[Exception]
) -> None:
    server.script = slow_and_broken(server, breaking_off, 0, num_broken=10)
    (tmp_path / "update").write_bytes(LARGE)
    with WorkerClient(server.url, "t", retry=SHORT) as client, pytest.raises(kind):
        client.upload(LARGE_DIGEST, tmp_path / "update", uuid4())
    assert [request.method for request in server.requests] == ["POST", "PATCH", "POST"]
