"""`POST /v1/work/deliver`: one request gives the answers, rows and events of an upload and a submission."""

import functools
import json
import random
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
import torch

from fedssl.artifacts.tensors import serialised
from fedssl.protocol.states import AssignmentState
from fedssl.protocol.work import DELIVERY_BYTES, DELIVERY_HEADER, OFFER_HEADER, Submit, WorkItem
from support.coordinator import Coordinator
from support.data_sets import public_bytes
from support.federation import tensors_for, tiny_spec
from support.tables import ChangeWatcher, Tables
from support.uploads import digest, raw_request

COHORT = {"lease_seconds": 86_400, "deadline_seconds": 86_400}
OTHER = "0" * 64


@dataclass
class LeasedClient:
    """A client with a lease, whose updates are either uploaded and then submitted, or delivered."""

    coordinator: Coordinator
    name: str
    token: str = ""
    items: list[WorkItem] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.worker = self.coordinator.worker(self.name)
        self.token = self.coordinator.worker_token(self.name)
        self.run = self.coordinator.client.create_run(tiny_spec(cohort={**COHORT, "clients": [self.name]})).id
        self.coordinator.advance(self.run)
        self.claim()

    def claim(self) -> None:
        item = self.worker.claim(0)
        assert item is not None
        self.items.append(item)

    @property
    def item(self) -> WorkItem:
        return self.items[-1]

    def update(self, value: float = 1.0) -> bytes:
        return serialised(tensors_for(self.item.plan.update, value))

    def submission(self, content: bytes, **changes: Any) -> dict[str, Any]:
        about = {"assignment_id": str(self.item.assignment_id), "update": digest(content), "num_examples": 10}
        return {**about, "metrics": {"loss": 1.0}, **changes}

    def deliver(self, content: bytes, **changes: Any) -> httpx.Response:
        """Send the update and the submission in one request."""
        about = json.dumps(self.submission(content, **changes))
        with self.coordinator.http(self.token) as http:
            return http.post("/v1/work/deliver", content=content, headers={DELIVERY_HEADER: about})

    def upload_and_submit(self, content: bytes, **changes: Any) -> httpx.Response:
        """Send them in two requests. The second is sent only if the first succeeds."""
        about = self.submission(content, **changes)
        with self.coordinator.http(self.token) as http:
            params = {"assignment": about["assignment_id"]}
            answer = http.put(f"/v1/artifacts/{about['update']}", params=params, content=content)
            return http.post("/v1/work/submit", json=about) if answer.is_success else answer


@pytest.fixture
def leased_client(coordinator: Coordinator) -> LeasedClient:
    return LeasedClient(coordinator, "a")


@pytest.fixture
def change_watcher(coordinator: Coordinator, tables: Tables) -> ChangeWatcher:
    return ChangeWatcher(tables, coordinator.store)


def _at_once(*calls: Callable[[], httpx.Response]) -> list[httpx.Response]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def test_an_update_is_accepted_and_repeating_it_gets_the_same_answer(
    leased_client: LeasedClient, change_watcher: ChangeWatcher
) -> None:
    update = leased_client.update()
    first = leased_client.deliver(update)
    assert first.json() == {
        "assignment_id": str(leased_client.item.assignment_id),
        "state": "accepted",
        "receipt": None,
    }
    assert (
        leased_client.coordinator.store / digest(update)[:2] / digest(update)[2:4] / digest(update)
    ).read_bytes() == update
    with change_watcher.nothing_changes() as events:
        assert leased_client.deliver(update).json() == first.json()
        assert leased_client.upload_and_submit(update).json() == first.json()
        assert leased_client.worker.submit(Submit(**leased_client.submission(update))).state is AssignmentState.ACCEPTED
    assert events == []
    leased_client.coordinator.advance(leased_client.run)  # this also holds after the round has closed
    with change_watcher.nothing_changes() as events:
        assert leased_client.deliver(update).json() == first.json()
    assert events == []


def test_a_claim_announces_the_size_up_to_which_deliveries_are_taken(leased_client: LeasedClient) -> None:
    with leased_client.coordinator.http(leased_client.token) as http:
        assert http.post("/v1/work/claim", json={"wait_seconds": 0}).headers[OFFER_HEADER] == str(DELIVERY_BYTES)
    assert leased_client.worker.delivery_bytes == DELIVERY_BYTES


def test_an_update_that_was_already_uploaded_is_delivered_without_its_bytes(leased_client: LeasedClient) -> None:
    update = leased_client.update()
    with leased_client.coordinator.http(leased_client.token) as http:
        params = {"assignment": str(leased_client.item.assignment_id)}
        assert http.put(f"/v1/artifacts/{digest(update)}", params=params, content=update).status_code == 201
        headers = {DELIVERY_HEADER: json.dumps(leased_client.submission(update)), "Content-Length": "0"}
        assert http.post("/v1/work/deliver", headers=headers).json()["state"] == "accepted"


def test_a_delivery_reports_how_many_bytes_were_sent(leased_client: LeasedClient, tmp_path: Path) -> None:
    path, update = tmp_path / "update", leased_client.update()
    path.write_bytes(update)
    reached: list[int] = []
    delivery = leased_client.worker.deliver(Submit(**leased_client.submission(update)), path, reached.append)
    assert delivery.submitted is not None
    assert delivery.submitted.state is AssignmentState.ACCEPTED
    assert (delivery.num_sent, reached) == (len(update), [len(update)])


def test_concurrent_repetitions_of_a_delivery_count_once(leased_client: LeasedClient, tables: Tables) -> None:
    update = leased_client.update()
    answers = _at_once(*[lambda: leased_client.deliver(update)] * 6)
    assert {answer.text for answer in answers} == {answers[0].text}
    assert answers[0].json()["state"] == "accepted"
    assert tables.query("SELECT name, value FROM metrics") == [("loss", 1.0)]
    assert tables.one("SELECT count(*) FROM uploads") == 1
    assert tables.one("SELECT count(*) FROM events WHERE kind = 'assignment.accepted'") == 1


def test_only_one_of_several_concurrent_updates_of_a_client_counts(leased_client: LeasedClient, tables: Tables) -> None:
    ways = [leased_client.deliver, leased_client.upload_and_submit, leased_client.deliver]
    updates = [leased_client.update(value) for value in (1.0, 2.0, 3.0)]
    answers = _at_once(*[functools.partial(way, update) for way, update in zip(ways, updates, strict=True)])
    accepted = [digest(update) for update, answer in zip(updates, answers, strict=True) if answer.is_success]
    assert [answer.json()["type"] for answer in answers if not answer.is_success] == [
        "urn:fedssl:problem:duplicate-update"
    ] * 2
    assert accepted == [tables.one("SELECT update_digest FROM assignments")]


REFUSED: dict[str, tuple[Callable[[LeasedClient], httpx.Response], int, str, str]] = {
    "another digest": (lambda it: it.deliver(it.update(), update=OTHER), 422, "artifact-rejected", "have sha256"),
    "no tensors": (lambda it: it.deliver(b"\x08\0\0\0\0\0\0\0{}      "), 422, "artifact-rejected", "missing"),
    "no body": (lambda it: it.deliver(b""), 422, "artifact-rejected", "ended within its safetensors header"),
    "NaN": (lambda it: it.deliver(it.update(float("nan"))), 422, "artifact-rejected", "NaN or infinity"),
    "bytes that follow": (lambda it: it.deliver(it.update() + b"x"), 422, "artifact-rejected", "were announced"),
    "bytes that are missing": (lambda it: it.deliver(it.update()[:-1]), 422, "artifact-rejected", "were announced"),
    "too many bytes for a delivery": (
        lambda it: it.deliver(bytes(DELIVERY_BYTES + 1)), 413, "artifact-too-large", "send it with PUT"),
    "more images than registered": (
        lambda it: it.deliver(it.update(), num_examples=1001), 422, "invalid-request", "a registered 1000 images"),
    "a metric of the coordinator": (
        lambda it: it.deliver(it.update(), metrics={"update_norm": 0.1}), 422, "invalid-request", "itself measures"),
    "a metric out of bounds": (
        lambda it: it.deliver(it.update(), metrics={"loss": 1e31}), 422, "invalid-request", "metrics.loss"),
    "an unknown key": (lambda it: it.deliver(it.update(), weight=2), 422, "invalid-request", "weight"),
    "a header that is too long": (
        lambda it: it.deliver(it.update(), metrics={f"m{i}": 0.0 for i in range(1000)}), 422, "invalid-request",
        DELIVERY_HEADER),
    "an assignment that does not exist": (
        lambda it: it.deliver(it.update(), assignment_id=str(uuid4())), 404, "not-found", "a has no assignment"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_delivery_adds_one_event_and_changes_nothing_else(
    leased_client: LeasedClient, change_watcher: ChangeWatcher, case: str
) -> None:
    send, status, slug, words = REFUSED[case]
    with change_watcher.nothing_changes() as events:
        answer = send(leased_client)
    assert (answer.status_code, answer.json()["type"]) == (status, f"urn:fedssl:problem:{slug}")
    assert words in answer.json()["detail"]
    assert [event.client_id for event in events] == ["a"]
    assert leased_client.deliver(leased_client.update()).json()["state"] == "accepted"


def test_the_assignment_of_another_client_is_answered_like_an_unknown_one(
    leased_client: LeasedClient, change_watcher: ChangeWatcher
) -> None:
    stranger = LeasedClient(leased_client.coordinator, "stranger")
    update = leased_client.update()
    with change_watcher.nothing_changes() as events:
        answer = stranger.deliver(update, assignment_id=str(leased_client.item.assignment_id))
    assert answer.status_code == 404
    assert [(event.kind, event.client_id) for event in events] == [("assignment.foreign", "stranger")]


def test_the_submission_header_is_required_exactly_once_and_as_json(
    leased_client: LeasedClient, change_watcher: ChangeWatcher
) -> None:
    update = leased_client.update()
    about = json.dumps(leased_client.submission(update))
    for headers in ([], [about, about], ["{"], ["[" * 4000], ["null"]):
        with change_watcher.nothing_changes() as events, leased_client.coordinator.http(leased_client.token) as http:
            sent = [(DELIVERY_HEADER, each) for each in headers]
            answer = http.post("/v1/work/deliver", content=update, headers=sent)
        assert (answer.status_code, answer.json()["type"]) == (422, "urn:fedssl:problem:invalid-request")
        assert len(events) == 1


@pytest.mark.parametrize(
    ("lengths", "status"),
    [([], 411), (["chunked"], 400), (["7", "8"], 400), (["-1"], 400), (["1e3"], 400)],
    ids=["none", "chunked", "two", "negative", "not a number"],
)
def test_a_delivery_without_exactly_one_valid_length_is_refused(
    leased_client: LeasedClient, change_watcher: ChangeWatcher, lengths: list[str], status: int
) -> None:
    lines = [f"Content-Length: {each}" if each != "chunked" else "Transfer-Encoding: chunked" for each in lengths]
    about = json.dumps(leased_client.submission(leased_client.update()))
    head = "\n".join(["POST /v1/work/deliver HTTP/1.1", "Host: x", f"Authorization: Bearer {leased_client.token}",
                      f"{DELIVERY_HEADER}: {about}", *lines]) + "\n"  # fmt: skip
    with change_watcher.nothing_changes():
        answer = raw_request(leased_client.coordinator.url, head, b"", then_close=False)
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())


@pytest.mark.parametrize("share", [0.0, 0.5, 0.999])
def test_a_connection_that_breaks_within_the_body_changes_nothing(
    leased_client: LeasedClient, change_watcher: ChangeWatcher, share: float
) -> None:
    update = leased_client.update()
    about = json.dumps(leased_client.submission(update))
    head = (f"POST /v1/work/deliver HTTP/1.1\nHost: x\nAuthorization: Bearer {leased_client.token}\n"
            f"{DELIVERY_HEADER}: {about}\nContent-Length: {len(update)}\n")  # fmt: skip
    with change_watcher.nothing_changes():
        raw_request(leased_client.coordinator.url, head, update[: int(share * len(update))], then_close=True)
        with socket.socket() as connection:  # the server has noticed the end once it accepts a connection again
            host, port = leased_client.coordinator.url.removeprefix("http://").split(":")
            connection.connect((host, int(port)))
    assert leased_client.deliver(update).json()["state"] == "accepted"


def test_a_delivery_counts_once_if_its_connection_breaks_after_the_body(
    leased_client: LeasedClient, tables: Tables
) -> None:
    update = leased_client.update()
    about = json.dumps(leased_client.submission(update))
    head = (f"POST /v1/work/deliver HTTP/1.1\nHost: x\nAuthorization: Bearer {leased_client.token}\n"
            f"{DELIVERY_HEADER}: {about}\nContent-Length: {len(update)}\n")  # fmt: skip
    raw_request(leased_client.coordinator.url, head, update, then_close=True)
    assert leased_client.deliver(update).json()["state"] == "accepted"
    assert tables.one("SELECT count(*) FROM uploads") == 1
    assert tables.one("SELECT count(*) FROM events WHERE kind = 'assignment.accepted'") == 1


def test_a_delivery_is_refused_after_its_lease_was_lost(
    leased_client: LeasedClient, change_watcher: ChangeWatcher
) -> None:
    _lapse(leased_client, None)
    leased_client.coordinator.advance(leased_client.run)
    with change_watcher.nothing_changes() as events:
        answer = leased_client.deliver(leased_client.update())
    assert (answer.status_code, answer.json()["type"]) == (409, "urn:fedssl:problem:lease-lost")
    assert [(event.kind, event.client_id) for event in events] == [("artifact.refused", "a")]
    leased_client.claim()
    assert leased_client.deliver(leased_client.update()).json()["state"] == "accepted"


def test_a_delivery_to_a_full_disk_changes_nothing_and_can_be_repeated(
    leased_client: LeasedClient, change_watcher: ChangeWatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    for name in (
        "tempfile.mkstemp",
        "fedssl.artifacts.store.FileWriter.write",
        "fedssl.artifacts.store.FileWriter.commit",
    ):
        with monkeypatch.context() as patch, change_watcher.nothing_changes():
            patch.setattr(name, full)
            answer = leased_client.deliver(leased_client.update())
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "10")
    assert leased_client.deliver(leased_client.update()).json()["state"] == "accepted"


def test_a_delivery_is_refused_if_its_token_is_revoked_while_the_bytes_arrive(
    leased_client: LeasedClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedssl_coordinator.storage.artifacts import streaming

    store, client = streaming._store, leased_client.coordinator.client
    token = client.create_token("operator")
    revocations = [functools.partial(client.revoke_token, token.id), functools.partial(client.revoke_client, "a")]

    def revoke(*arguments: Any) -> None:
        store(*arguments)
        revocations.pop()()

    monkeypatch.setattr(streaming, "_store", revoke)
    assert leased_client.deliver(leased_client.update()).status_code == 401
    content = public_bytes()
    with leased_client.coordinator.http(token.secret) as http:
        assert http.put(f"/v1/artifacts/{digest(content)}", content=content).status_code == 401
    assert revocations == []


Step = Callable[[LeasedClient, Callable[..., httpx.Response]], httpx.Response | None]


def _advance(leased_client: LeasedClient, send: object) -> None:
    leased_client.coordinator.advance(leased_client.run)


def _claim(leased_client: LeasedClient, send: object) -> None:
    if (item := leased_client.worker.claim(0)) is not None:
        leased_client.items.append(item)


def _lapse(leased_client: LeasedClient, send: object) -> None:
    from sqlalchemy import text

    from fedssl_coordinator.core.db import transaction

    with transaction() as session:
        session.execute(
            text("UPDATE assignments SET lease_expires_at = now() - interval '1 second' "
                 "WHERE client_id = :name AND state = 'leased'"), {"name": leased_client.name})  # fmt: skip


STEPS: tuple[Step, ...] = (
    _advance,
    _claim,
    _claim,
    _lapse,
    lambda leased_client, send: send(leased_client.update()),
    lambda leased_client, send: send(leased_client.update(2.0)),
    lambda leased_client, send: send(leased_client.update(), num_examples=1001),
    lambda leased_client, send: send(leased_client.update(), metrics={}),
    lambda leased_client, send: send(leased_client.update(), metrics={"update_norm": 1.0}),
    lambda leased_client, send: send(leased_client.update(float("inf"))),
    lambda leased_client, send: send(leased_client.update()[:-1]),
    lambda leased_client, send: send(leased_client.update(), update=OTHER),
    lambda leased_client, send: send(leased_client.update(), assignment_id=str(uuid4())),
    lambda leased_client, send: send(serialised({"encoder.other": torch.zeros(3)})),
)


def _comparable(text: str, leased_client: LeasedClient) -> str:
    """Replace the names and ids, which differ between the two clients."""
    for number, item in enumerate(leased_client.items):
        text = text.replace(str(item.assignment_id), f"assignment {number}")
    return text.replace(str(leased_client.run), "run").replace(leased_client.name, "client")


@pytest.mark.full(but=2)
@pytest.mark.parametrize("seed", range(6))
def test_deliveries_get_the_answers_rows_and_events_of_uploads_and_submissions(
    coordinator: Coordinator, tables: Tables, seed: int
) -> None:
    clients = [LeasedClient(coordinator, "client-old"), LeasedClient(coordinator, "client-new")]
    draw = random.Random(seed)
    for step in draw.choices(STEPS, k=25):
        answers = []
        for client, send in zip(clients, (clients[0].upload_and_submit, clients[1].deliver), strict=True):
            answer = step(client, send)
            found = None if answer is None else (answer.status_code, answer.json().get("type"), answer.json())
            unique = json.dumps(found)
            answers.append(_comparable(unique if "has no assignment" not in unique else "foreign", client))
        assert answers[0] == answers[1]
    states = [
        tables.query(
            "SELECT attempt, state, update_digest, num_examples, reason, cause FROM assignments WHERE run_id = %s "
            "ORDER BY round_number, attempt", client.run)
        for client in clients
    ]  # fmt: skip
    assert states[0] == states[1]
    metrics = [tables.query("SELECT round_number, name, value FROM metrics WHERE run_id = %s ORDER BY 1, 2", client.run)
               for client in clients]  # fmt: skip
    assert metrics[0] == metrics[1]
    events = [
        [(kind, number, _comparable(message, client)) for kind, number, message in tables.query(
            "SELECT kind, round_number, message FROM events WHERE run_id = %s ORDER BY id", client.run)]
        for client in clients
    ]  # fmt: skip
    assert events[0] == events[1]
