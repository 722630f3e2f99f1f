"""Two APIs, two aggregators and two beats: it makes no difference which of them answers."""

import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import httpx
import pytest

from fedssl.artifacts.store import digest_of
from fedssl.artifacts.tensors import save_tensors
from fedssl.client import Client, Retry, WorkerClient
from fedssl.protocol.states import AssignmentState
from fedssl.protocol.views import EventView
from fedssl.protocol.work import Register, Submit, WorkItem
from fedssl.simulation import simulate
from support.federation import tensors_for, tiny_spec
from support.methods import method_spec, shards
from support.replicas import Replicas
from support.servers import Servers
from support.tus import PART

pytestmark = pytest.mark.full


CLIENTS = ("client-0", "client-1")
SPEC = method_spec("fedbyol", cohort={"clients": CLIENTS, "min_clients": 2, "lease_seconds": 20})
PROXY = "127.0.0.2"
FAILED = 12


@pytest.fixture(scope="module")
def running(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    num = {"api": 2, "aggregator": 2, "beat": 2}
    options = ("--proxy-headers", "--forwarded-allow-ips", PROXY)
    images = {name: own for name, own in shards(SPEC).items() if name in CLIENTS}
    with (
        servers.database() as url,
        Replicas(url, servers.redis_url, tmp_path_factory.mktemp("replicas"), images, num=num, api_options=options,
                 FEDSSL_FAILED_SIGN_INS_PER_MINUTE=str(FAILED)) as federation,
    ):  # fmt: skip
        for url in federation.urls:
            with Client(url, retry=Retry(seconds=60)) as client:
                federation.wait_for(lambda client=client: client.ready().status == "ok", url)
        yield federation


def _worker(running: Replicas, secret: str, number: int) -> WorkerClient:
    """Return the client of a worker that uses the API with this index."""
    return WorkerClient(running.urls[number], secret, retry=Retry(seconds=20))


def _claimed(running: Replicas, name: str, seconds: float) -> tuple[str, WorkItem]:
    """Return the token and work of a new client, which waits at the second API while a run is created at the first."""
    secret = running.client.create_token("worker", name).secret
    introduction = Register(
        worker_version="test", methods={"fedalignuniform": 1}, device="cpu", num_images=9, channels=1, image_size=8
    )
    found: list[WorkItem | None] = []
    with _worker(running, secret, 1) as worker:
        worker.register(introduction)
        waiting = threading.Thread(target=lambda: found.append(worker.claim(seconds)))
        waiting.start()
        widths = {"encoder": {"widths": [64, 128]}, "projector": {"hidden_dims": [512], "out_dim": 512}}
        running.client.create_run(tiny_spec(num_rounds=1, model=widths, cohort={"clients": [name]}))
        waiting.join()
    [item] = found
    assert item is not None
    return secret, item


def test_an_upload_that_began_at_one_api_continues_at_the_other(running: Replicas, tmp_path: Path) -> None:
    """The claim waits at one API while another process creates the work, and each API receives half of the update."""
    secret, item = _claimed(running, "by-hand", 25)
    path = tmp_path / "update"
    save_tensors(tensors_for(item.plan.update, 1.0), path)
    data, digest = path.read_bytes(), digest_of(path)
    with _worker(running, secret, 0) as first, _worker(running, secret, 1) as second:
        assert first.heartbeat(item.assignment_id).carry_on
        _send_half(running.urls[1], secret, item.assignment_id, digest, data)
        assert first.upload(digest, path, item.assignment_id) == len(data) - len(data) // 2
        submission = Submit(assignment_id=item.assignment_id, update=digest, num_examples=9)
        assert second.submit(submission) == first.submit(submission)
        assert second.submit(submission).state == AssignmentState.ACCEPTED
    run = running.client.run(item.run_id)
    running.wait_for(lambda: running.client.run(run.id).outcome is not None, "the run's end")


def _send_half(url: str, secret: str, assignment: UUID, digest: str, data: bytes) -> None:
    import base64

    pairs = (f"{key} {base64.b64encode(str(value).encode()).decode()}"
             for key, value in (("digest", digest), ("assignment", assignment)))  # fmt: skip
    headers = {"Authorization": f"Bearer {secret}", "Tus-Resumable": "1.0.0"}
    about = {"Upload-Length": str(len(data)), "Upload-Metadata": ",".join(pairs)}
    with httpx.Client(base_url=url, headers=headers, trust_env=False, timeout=30) as http:
        begun = http.post("/v1/uploads", headers=about)
        sent = http.patch(
            begun.headers["location"], content=data[: len(data) // 2],
            headers={"Upload-Offset": "0", "Content-Type": PART},
        )  # fmt: skip
        assert sent.status_code == 204, sent.text


@pytest.mark.full
def test_a_run_is_completed_by_all_replicas_while_one_api_is_restarted(running: Replicas) -> None:
    """Each worker knows one API, and the events are read from the API that did not create the run."""
    events: list[EventView] = []
    for name in CLIENTS:
        running.start(name)
    run = running.client.create_run(SPEC)
    token = running.client.create_token("viewer").secret
    with Client(running.urls[1], token, retry=Retry(seconds=60)) as other:
        watching = threading.Thread(target=lambda: events.extend(other.events(run.id)))
        watching.start()
        running.wait_for(lambda: running.client.run(run.id).rounds_closed >= 1, "the first round's end")
        running.kill("api-2", signal.SIGTERM)
        running.start("api-2")
        running.assert_ends_with(run.id, simulate(SPEC, running.clients).model)
        watching.join(60)
    for name in CLIENTS:
        running.kill(name, signal.SIGTERM)
    assert [event.id for event in events] == [event.id for event in running.client.event_log(run.id)]
    assert {event.client_id for event in events if event.kind == "assignment.accepted"} == set(CLIENTS)


def test_sigterm_lets_requests_in_progress_finish(running: Replicas, tmp_path: Path) -> None:
    """A file in transfer arrives, new connections are refused, and the other API answers the next requests."""
    secret, item = _claimed(running, "on-its-way", 25)
    path = tmp_path / "update"
    save_tensors(tensors_for(item.plan.update, 2.0), path)
    data, digest, headers = path.read_bytes(), digest_of(path), {"Authorization": f"Bearer {secret}"}
    answers: list[int] = []
    is_begun, may_end = threading.Event(), threading.Event()

    def body() -> Iterator[bytes]:
        yield data[: len(data) // 2]
        is_begun.set()
        assert may_end.wait(20)
        yield data[len(data) // 2 :]

    def send() -> None:
        with httpx.Client(base_url=running.urls[1], headers=headers, trust_env=False, timeout=30) as http:
            size = {"Content-Length": str(len(data))}
            path = f"/v1/artifacts/{digest}?assignment={item.assignment_id}"
            answers.append(http.put(path, content=body(), headers=size).status_code)

    sending = threading.Thread(target=send)
    sending.start()
    assert is_begun.wait(20)
    time.sleep(0.3)  # its first half has been read
    ending = threading.Thread(target=lambda: running.kill("api-2", signal.SIGTERM))
    ending.start()
    time.sleep(0.5)
    may_end.set()
    sending.join()
    ending.join()
    assert answers == [201]
    with httpx.Client(base_url=running.urls[1], trust_env=False) as http, pytest.raises(httpx.ConnectError):
        http.get("/healthz")
    with _worker(running, secret, 0) as worker:
        submission = Submit(assignment_id=item.assignment_id, update=digest, num_examples=9)
        assert worker.submit(submission).state == AssignmentState.ACCEPTED
    running.start("api-2")
    with Client(running.urls[1], retry=Retry(seconds=60)) as client:
        running.wait_for(lambda: client.ready().status == "ok", "the second API")


def _guess(url: str, source: str, forwarded_for: str) -> int:
    """Return the status of a request with an invalid token, sent from one of this machine's addresses."""
    transport = httpx.HTTPTransport(local_address=source, verify=False)  # reading certificates takes longest
    with httpx.Client(base_url=url, transport=transport) as http:
        headers = {"Authorization": "Bearer fedssl_guess", "X-Forwarded-For": forwarded_for}
        return http.get("/v1/runs", headers=headers).status_code


def _answers(running: Replicas, network: str, stranger: str) -> dict[str, list[int]]:
    """Return the statuses of guesses that the proxy or a stranger sends on behalf of addresses of this network."""
    both = running.urls
    return {
        "the first few": [_guess(both[n % 2], PROXY, f"{network}.1") for n in range(FAILED)],
        "one more, at either": [_guess(url, PROXY, f"{network}.1") for url in both],
        "another address": [_guess(both[0], PROXY, f"{network}.2")],
        # An address that the sender itself claims is to the left of the one that the proxy has seen.
        "a claim of one's own": [_guess(both[1], PROXY, f"{network}.3, {network}.1")],
        # From any other address the header is ignored: it neither affects the named address nor hides the sender's.
        "the stranger's first": [_guess(both[n % 2], stranger, f"{network}.{9 + n}") for n in range(FAILED)],
        "the stranger's next": [_guess(both[0], stranger, f"{network}.99")],
        "whom it has named": [_guess(both[0], PROXY, f"{network}.9")],
    }


def test_limits_are_counted_over_all_replicas_by_the_address_that_the_proxy_saw(running: Replicas) -> None:
    expected = {
        "the first few": [401] * FAILED,
        "one more, at either": [429, 429],
        "another address": [401],
        "a claim of one's own": [429],
        "the stranger's first": [401] * FAILED,
        "the stranger's next": [429],
        "whom it has named": [401],
    }
    # If Redis is slow for a moment, each process counts by itself. Then try again with other addresses.
    for n in range(3):
        found = _answers(running, f"203.0.{113 + n}", f"127.0.0.{3 + n}")
        if found == expected:
            break
    assert found == expected
