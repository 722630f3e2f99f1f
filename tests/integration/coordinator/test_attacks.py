"""Further attacks: requests that are each well-formed, from unexpected callers or in unexpected orders.

Each test asserts what must hold: no data of another client is seen or changed, nothing counts twice, and nothing that a
revoked client sends counts.
"""

import base64
import hashlib
import json
import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest

from fedssl.artifacts.tensors import serialised
from fedssl.client import ApiError, DuplicateUpdate, NotFound, Retry, WorkerClient
from fedssl.protocol.policy import PolicyNotice
from fedssl.protocol.work import Register, Submit, WorkItem
from fedssl_coordinator.storage.artifacts import streaming
from support.coordinator import Coordinator
from support.federation import tensors_for, tiny_spec, upload
from support.scenario import Scenario
from support.tables import ChangeWatcher, Tables
from support.tus import Tus
from support.waiting import wait_until


@pytest.fixture
def scenario(coordinator: Coordinator, tables: Tables, tmp_path: Path) -> Scenario:
    return Scenario(coordinator, tables, tmp_path, num_rounds=2)


def _update(item: WorkItem, value: float = 1.0) -> tuple[bytes, str]:
    content = serialised(tensors_for(item.plan.update, value))
    return content, hashlib.sha256(content).hexdigest()


# Revoked clients


@pytest.mark.parametrize("by", ["client", "token"])
def test_an_upload_that_is_arriving_when_its_client_is_revoked_is_not_counted(
    by: str, scenario: Scenario, coordinator: Coordinator, tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client is revoked while the body of its upload arrives. Nothing is recorded for the assignment."""
    item = scenario.claim("a")
    content, digest = _update(item)
    half, secret = len(content) // 2, coordinator.worker_token("a")
    checked, revoked = threading.Event(), threading.Event()
    check = streaming.check_announced

    def check_announced(*arguments: Any) -> None:  # runs before the body is read
        check(*arguments)
        checked.set()

    monkeypatch.setattr(streaming, "check_announced", check_announced)

    def body() -> Iterator[bytes]:
        yield content[:half]
        assert checked.wait(10)
        if by == "client":
            coordinator.client.revoke_client("a")
        else:
            for token in coordinator.client.tokens():
                if token.client_id == "a":
                    coordinator.client.revoke_token(token.id)
        revoked.set()
        yield content[half:]

    with coordinator.http(secret) as http:
        answer = http.put(
            f"/v1/artifacts/{digest}",
            params={"assignment": str(item.assignment_id)},
            content=body(),
            headers={"Content-Length": str(len(content))},
        )
        assert revoked.is_set()
        assert answer.status_code in (401, 409, 410), answer.text
        submission = {"assignment_id": str(item.assignment_id), "update": digest, "num_examples": 1}
        assert http.post("/v1/work/submit", json=submission).status_code == 401
    assert tables.query("SELECT * FROM uploads") == []
    assert ("a", 1, "accepted") not in scenario.states()


def test_a_round_opened_while_a_client_is_revoked_does_not_wait_for_it(
    coordinator: Coordinator, tables: Tables
) -> None:
    """The aggregator reads the eligible clients before the revocation commits, and offers work after it."""
    from fedssl_coordinator.identity import clients

    real, gate, opened = clients.eligible, threading.Event(), threading.Event()

    def eligible(*given: Any) -> list[str]:
        found = real(*given)
        if threading.current_thread() is not threading.main_thread() and not opened.is_set():
            opened.set()
            assert gate.wait(30)
        return found

    for name in "ab":
        coordinator.worker(name)
    cohort = {"clients": ["a", "b"], "min_clients": 2}
    run_id = coordinator.client.create_run(tiny_spec(cohort=cohort)).id
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(1) as pool:
        patch.setattr(clients, "eligible", eligible)
        opening = pool.submit(coordinator.advance, run_id)
        assert opened.wait(30)
        coordinator.client.revoke_client("b")
        gate.set()
        opening.result(60)
    assert tables.one("SELECT state FROM assignments WHERE client_id = 'b'") == "offered"
    coordinator.advance(run_id)
    assert tables.one("SELECT state FROM assignments WHERE client_id = 'b'") == "expired"


# Two processes with one token, and replayed submissions


def test_only_one_update_of_two_workers_with_one_token_is_accepted_with_its_own_metrics(
    scenario: Scenario, coordinator: Coordinator, tables: Tables, tmp_path: Path
) -> None:
    secret = coordinator.worker_token("a")
    twins = [WorkerClient(coordinator.url, secret, retry=Retry(seconds=0)) for _ in range(2)]
    items = [twin.claim(0) for twin in twins]
    assert len({item.assignment_id for item in items if item is not None}) == 1
    submissions = []
    for number, (twin, item) in enumerate(zip(twins, items, strict=True)):
        assert item is not None
        folder = tmp_path / str(number)
        folder.mkdir()
        digest = upload(twin, item, tensors_for(item.plan.update, 0.1 * (number + 1)), folder)
        submissions.append(
            Submit(assignment_id=item.assignment_id, update=digest, num_examples=10, metrics={"loss": float(number)})
        )
    barrier = threading.Barrier(2)

    def submit(number: int) -> bool:
        barrier.wait()
        try:
            twins[number].submit(submissions[number])
        except DuplicateUpdate:
            return False
        return True

    with ThreadPoolExecutor(2) as pool:
        accepted = list(pool.map(submit, range(2)))
    assert sorted(accepted) == [False, True]
    winner = accepted.index(True)
    assert tables.query("SELECT update_digest, num_examples FROM assignments WHERE state = 'accepted'") == [
        (submissions[winner].update, 10)
    ]
    assert tables.query("SELECT value FROM metrics WHERE client_id = 'a' AND name = 'loss'") == [(float(winner),)]


def test_a_replayed_submission_changes_nothing(
    scenario: Scenario, coordinator: Coordinator, change_watcher: ChangeWatcher, tmp_path: Path
) -> None:
    """This holds while the run is paused, once it is resumed, after the round closed, and after the run was stopped."""
    item = scenario.claim("a")
    digest = upload(scenario.workers["a"], item, tensors_for(item.plan.update, 1.0), tmp_path)
    submission = Submit(assignment_id=item.assignment_id, update=digest, num_examples=10, metrics={"loss": 1.0})
    scenario.workers["a"].submit(submission)

    def replay() -> None:
        with change_watcher.nothing_changes():
            scenario.workers["a"].submit(submission)
        with change_watcher.nothing_changes(), pytest.raises(ApiError):
            scenario.workers["a"].submit(submission.model_copy(update={"update": "0" * 64}))
        with change_watcher.nothing_changes(), pytest.raises(NotFound):
            scenario.workers["b"].submit(submission)

    replay()
    coordinator.client.pause(scenario.id)
    replay()
    coordinator.client.resume(scenario.id)
    replay()
    scenario.work("b")
    scenario.advance()
    scenario.advance()
    assert scenario.rounds[0].verdict == "aggregated"
    replay()
    coordinator.client.stop(scenario.id)
    replay()


# What belongs to another client


def test_no_other_token_can_access_an_upload(
    scenario: Scenario, coordinator: Coordinator, change_watcher: ChangeWatcher
) -> None:
    item = scenario.claim("a")
    content, digest = _update(item)
    half = len(content) // 2
    with Tus(coordinator, coordinator.worker_token("a")) as own:
        place = own.begin(len(content), digest, item.assignment_id)
        assert own.send(place, content[:half], 0).status_code == 204
        others = (coordinator.worker_token("b"), coordinator.admin_token, coordinator.operator_token)
        for secret in others:
            with Tus(coordinator, secret) as other, change_watcher.nothing_changes():
                assert other.request("HEAD", place).status_code == 404
                assert other.send(place, content[half:], half).status_code == 404
                assert other.request("POST", f"{place}/parts").status_code == 404
                assert other.request("DELETE", place).status_code == 404
        with Tus(coordinator, others[0]) as other, change_watcher.nothing_changes():
            assert other.announce(len(content), digest, item.assignment_id).status_code == 404
        assert own.offset(place) == half
        assert own.send(place, content[half:], half).status_code == 204


def test_the_digest_of_another_clients_update_is_answered_like_an_unknown_digest(
    scenario: Scenario, coordinator: Coordinator, tables: Tables, tmp_path: Path
) -> None:
    """A client that knows the digest cannot submit or download the update, or find out whether it is stored."""
    a, b = scenario.claim("a"), scenario.claim("b")
    digest = upload(scenario.workers["a"], a, tensors_for(a.plan.update, 1.0), tmp_path)
    unknown = "0" * 64
    with coordinator.http(coordinator.worker_token("b")) as http:

        def answers(asked: str) -> list[tuple[int, str]]:
            submission = {"assignment_id": str(b.assignment_id), "update": asked, "num_examples": 1}
            found = [http.post("/v1/work/submit", json=submission), http.get(f"/v1/artifacts/{asked}")]
            return [(answer.status_code, answer.text.replace(asked, "DIGEST")) for answer in found]

        assert answers(digest) == answers(unknown)
        assert [status for status, _ in answers(digest)] == [409, 404]
    content, _ = _update(a)
    with Tus(coordinator, coordinator.worker_token("b")) as tus:
        assert tus.offset(tus.begin(len(content), digest, b.assignment_id)) == 0
    assert tables.query("SELECT assignment_id FROM uploads") == [(a.assignment_id,)]


def test_reusing_another_operators_idempotency_key_returns_that_run_or_is_refused(coordinator: Coordinator) -> None:
    """This holds for concurrent requests and after the run has ended. Deleting the run frees its key."""
    spec, other = tiny_spec().model_dump(mode="json"), tiny_spec(num_rounds=3).model_dump(mode="json")
    second = coordinator.client.create_token("operator").secret

    def create(secret: str, which: Any) -> httpx.Response:
        with coordinator.http(secret) as http:
            return http.post("/v1/runs", json={"spec": which}, headers={"Idempotency-Key": "theirs"})

    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda n: create([coordinator.operator_token, second][n % 2], spec), range(6)))
    assert {answer.status_code for answer in answers} == {201}
    [run_id] = {answer.json()["id"] for answer in answers}
    assert create(second, other).status_code == 409
    coordinator.client.stop(UUID(run_id))
    again = create(second, spec).json()
    assert (again["id"], again["state"]) == (run_id, "finished")
    coordinator.client.delete_run(UUID(run_id))
    assert create(second, other).json()["id"] != run_id


# Forged cursors, event ids and paths


def _cursors(coordinator: Coordinator, run_id: UUID) -> dict[str, str]:
    paths = ["/v1/runs", "/v1/clients", "/v1/tokens", f"/v1/runs/{run_id}/events", f"/v1/runs/{run_id}/metrics"]
    with coordinator.http() as http:
        answers = {path: http.get(path, params={"limit": 1}).json()["next_cursor"] for path in paths}
    return {path: cursor for path, cursor in answers.items() if cursor is not None}


def test_a_cursor_from_another_list_is_refused_or_shows_nothing_of_that_list(
    scenario: Scenario, coordinator: Coordinator, tables: Tables, tmp_path: Path
) -> None:
    scenario.work("a", "b")
    other = Scenario(coordinator, tables, tmp_path, "cd")
    other.work("c", "d")
    cursors = _cursors(coordinator, other.id)
    assert len(cursors) == 5
    keys: list[Any] = [
        [2**63], [-1], [1.5], [True], [None], [[1]], [{"a": 1}], [float("nan")], [1, 2], [], "x", 5,
        ["\x00"], ["\ud800"],
        ["0001-01-01T00:00:00+23:59", str(uuid4())], ["9999-12-31T23:59:59-23:59", str(uuid4())],
        ["2026-01-01T00:00:00", "x"], ["2026-W01-1", str(uuid4())],
    ]  # fmt: skip
    made = [base64.urlsafe_b64encode(json.dumps(key).encode()).decode() for key in keys]
    with coordinator.http() as http:
        for path in (*cursors, f"/v1/runs/{scenario.id}/events", f"/v1/runs/{scenario.id}/rounds"):
            for cursor in (*cursors.values(), *made):
                answer = http.get(path, params={"cursor": cursor})
                assert answer.status_code in (200, 422), (path, cursor, answer.text)
                if answer.status_code == 200 and str(scenario.id) in path:
                    assert str(other.id) not in answer.text


def test_a_forged_last_event_id_shows_no_event_of_another_run(
    scenario: Scenario, coordinator: Coordinator, tables: Tables, tmp_path: Path
) -> None:
    other = Scenario(coordinator, tables, tmp_path, "cd")
    coordinator.client.stop(other.id)
    coordinator.client.stop(scenario.id)
    last_of_other = tables.one("SELECT max(id) FROM events WHERE run_id = %s", other.id)
    with coordinator.http() as http:
        for last in ("0", "1", str(last_of_other), str(last_of_other - 1), "9" * 18):
            answer = http.get(f"/v1/runs/{scenario.id}/events/stream", headers={"Last-Event-ID": last})
            assert answer.status_code == 200
            events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
            assert {event["run_id"] for event in events} <= {str(scenario.id)}
            assert all(event["id"] > int(last) for event in events)
        for last in ("-1", "1e3", "٣", "9" * 19, "0x10", "1 OR 1=1", ""):
            headers = httpx.Headers([(b"Last-Event-ID", last.encode())])
            assert http.get(f"/v1/runs/{scenario.id}/events/stream", headers=headers).status_code in (200, 422)


def test_aborted_streams_free_their_places(scenario: Scenario, coordinator: Coordinator, change_settings: Any) -> None:
    """The connections are reset instead of closed, in the middle of a response."""
    change_settings(MAX_WAITING_PER_TOKEN="3")
    secret, address = coordinator.client.create_token("viewer").secret, httpx.URL(coordinator.url)
    request = f"GET /v1/runs/{scenario.id}/events/stream HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {secret}\r\n\r\n"
    held: list[socket.socket] = []

    def has_opened() -> bool:
        connection = socket.create_connection((address.host, address.port or 80), timeout=10)
        connection.sendall(request.encode())
        if not (is_open := connection.recv(12).endswith(b"200")):
            connection.close()
        else:
            held.append(connection)
        return is_open

    for _ in range(2):
        for _ in range(3):
            wait_until(has_opened)
        assert not has_opened()
        for connection in held:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()
        held.clear()


PATHS = [
    "/v1/artifacts/../runs", "/v1/artifacts/%2e%2e/runs", "/v1/artifacts/..%2fruns", "/v1//runs", "//v1/runs",
    "/v1/runs/", "/v1/runs;a=b", "/v1/runs%00", "/v1/runs%0d%0aX-Evil:%20yes", "/V1/runs", "/v1/./runs",
    "/static/../../../../etc/passwd", "/static/%2e%2e/%2e%2e/etc/passwd", "/static/..%5c..%5cetc", "/static//etc",
    "/v1/clients/..", "/v1/clients/%2e%2e", "/v1/clients/a%2f..%2fb", "/v1/runs/%ff%fe", "/v1/runs/\u0661", "/%",
    "/v1/artifacts/" + "A" * 64, "/v1/artifacts/" + "a" * 63 + "%0a", "/v1/artifacts/" + "0" * 64 + "/", "/*", "/.",
]  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
def test_no_spelling_of_a_path_bypasses_authorisation(path: str, shared_coordinator: Coordinator) -> None:
    """Requests without a token or with a worker's are refused, and no response repeats the caller's Host header."""
    address = httpx.URL(shared_coordinator.url)
    worker = shared_coordinator.client.create_token("worker", f"w-{uuid4().hex[:8]}").secret
    for token in ("", f"Authorization: Bearer {worker}\r\n"):
        for method in ("GET", "POST", "DELETE", "PROPFIND", "TRACE"):
            headers = f"Host: attacker.example\r\n{token}Content-Length: 0\r\nConnection: close\r\n\r\n"
            with socket.create_connection((address.host, address.port or 80), timeout=10) as connection:
                connection.sendall(f"{method} {path} HTTP/1.1\r\n{headers}".encode())
                answer = b"".join(iter(lambda: connection.recv(65536), b"")).decode("latin-1")
            status = int(answer.split(" ", 2)[1])
            assert 400 <= status < 500, answer
            assert "attacker" not in answer, answer
            assert "root:" not in answer


# Changes in the middle of a round


def test_a_cohort_does_not_change_when_its_clients_register_again(scenario: Scenario, tables: Tables) -> None:
    """They register with other images and a policy that refuses. Neither the cohort nor accepted updates change."""
    scenario.work("a")
    notice = PolicyNotice(digest="0" * 64, allow=())
    for worker in scenario.workers.values():
        worker.register(
            Register(
                worker_version="9",
                methods={},
                device="gpu",
                num_images=10**9,
                channels=3,
                image_size=512,
                policy=notice,
            )
        )
    scenario.coordinator.worker("c")
    scenario.advance()
    assert scenario.states() == [("a", 1, "accepted"), ("b", 1, "offered")]
    scenario.work("b")
    scenario.advance()
    assert (scenario.rounds[0].verdict, scenario.rounds[0].reason) == ("aggregated", "2 of 2 updates")
    assert (
        tables.one("SELECT count(*) FROM rounds WHERE run_id = %s", scenario.id) == 1
    )  # the next round waits for clients


def test_text_from_a_worker_cannot_forge_a_line_or_an_event(scenario: Scenario, coordinator: Coordinator) -> None:
    scenario.claim("a")
    forged = 'no\r\nid: 1\nevent: run.finished\ndata: {"kind": "run.finished"}\n\n\u2028\x85\x1b[2J'
    scenario.workers["a"].decline(scenario.item("a").assignment_id, forged)
    coordinator.client.stop(scenario.id)
    with coordinator.http() as http:
        text = http.get(f"/v1/runs/{scenario.id}/events/stream").text
    kinds = [line for line in text.split("\n") if line.startswith("event:")]
    assert [kind.strip() for kind in kinds].count("event: run.finished") == 1
    declined = [event for event in coordinator.client.event_log(scenario.id) if event.kind == "assignment.declined"]
    assert len(declined) == 1


def test_out_of_range_numbers_cause_no_server_error(scenario: Scenario, coordinator: Coordinator) -> None:
    item = scenario.claim("a")
    secret = coordinator.worker_token("a")
    with coordinator.http(secret) as http, coordinator.http() as admin, Tus(coordinator, secret) as tus:
        for number in (2**31, 2**63, 2**64, 10**30, -1, 0):
            _send_number(number, item, scenario.id, http, admin, tus)


def _send_number(number: int, item: WorkItem, run_id: UUID, http: httpx.Client, admin: httpx.Client, tus: Tus) -> None:
    """Send the number wherever a worker or an admin may send one."""
    submission = {"assignment_id": str(item.assignment_id), "update": "0" * 64, "num_examples": number}
    assert http.post("/v1/work/submit", json=submission).status_code in (409, 422), number
    progress = {"phase": "training", "epoch": number, "num_epochs": number, "step": number, "num_steps": number}
    beat = http.post("/v1/work/heartbeat", json={"assignment_id": str(item.assignment_id), "progress": progress})
    assert beat.status_code in (200, 422), (number, beat.text)
    assert tus.announce(number, "1" * 64, item.assignment_id).status_code in (400, 413, 422), number
    assert tus.send(f"/v1/uploads/{uuid4()}", b"x", number).status_code in (400, 404, 422), number
    claim = http.post("/v1/work/claim", params={"wait": number})
    assert claim.status_code in (200, 204, 422), (number, claim.text)
    for path in ("/v1/runs", f"/v1/runs/{run_id}/events", f"/v1/runs/{run_id}/rounds"):
        assert admin.get(path, params={"limit": number}).status_code == 422, number
    asked = {"config": {"dataset": "x", "measures": ["knn"]}, "round_number": number}
    assert admin.post(f"/v1/runs/{run_id}/evaluations", json=asked).status_code in (409, 422), number
