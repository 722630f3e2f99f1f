"""Permissions: every operation is called without a token, with an invalid one, and with one of another role."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping

import httpx
import pytest

from fedssl.client import Client, Conflict, NotAllowed, NotAuthenticated, NotFound, Retry, WorkerClient
from fedssl_coordinator.identity.authentication import hash_secret, new_secret
from support.coordinator import Coordinator
from support.openapi import OPEN, WORKERS_ONLY, Operation, api_document, operations
from support.tables import ChangeWatcher

DOCUMENT = api_document()
GUARDED = [operation for operation in operations(DOCUMENT) if operation.template not in OPEN]
# For artifacts and uploads, the digest decides what a caller may fetch, and the role what it may send.
WORKERS = [o for o in GUARDED if o.template.startswith(WORKERS_ONLY)]
ANYBODYS = [o for o in GUARDED if o.template.startswith(("/v1/artifacts/", "/v1/uploads"))]
OPERATORS = [o for o in GUARDED if o not in WORKERS and o not in ANYBODYS]


@pytest.fixture(scope="module")
def http(shared_coordinator: Coordinator) -> Iterator[httpx.Client]:
    """Yield a client without a token, with one connection for all calls of a test."""
    with shared_coordinator.bare_http() as client:
        yield client


def _call(http: httpx.Client, operation: Operation, headers: Mapping[str, str | bytes]) -> httpx.Response:
    content = b"{}" if operation.method == "POST" else b""
    return http.request(
        operation.method,
        operation.path,
        params=operation.query,
        content=content,
        headers={"Content-Type": "application/json", **headers},  # type: ignore[dict-item]
    )


def _assert_problem(answer: httpx.Response, status: int, slug: str, detail: str) -> None:
    assert answer.status_code == status, (answer.request, answer.text)
    assert answer.headers["content-type"] == "application/problem+json", answer.request
    if answer.request.method == "HEAD":  # answers to HEAD have no body
        return
    assert answer.json()["type"] == f"urn:fedssl:problem:{slug}"
    assert detail in answer.json()["detail"]


def test_every_guarded_operation_is_in_one_group() -> None:
    assert len(GUARDED) >= 25
    assert len(OPERATORS) + len(WORKERS) + len(ANYBODYS) == len(GUARDED)
    assert {o.template for o in operations(DOCUMENT)} >= OPEN


INVALID: dict[str, dict[str, str]] = {
    "garbage": {"Authorization": "Bearer fedssl_garbage"},
    "empty": {"Authorization": ""},
    "no secret": {"Authorization": "Bearer"},
    "long": {"Authorization": "Bearer " + "x" * 10_000},
    "not ascii": {"Authorization": b"Bearer \xff\xfe".decode("latin-1")},
    "basic": {"Authorization": "Basic b3BlcmF0b3I6"},
    "cookie": {"Cookie": "token=fedssl_garbage"},
}


def _assert_unauthenticated(http: httpx.Client, operations: Iterable[Operation], headers: dict[str, str]) -> None:
    encoded = {name: value.encode("latin-1") for name, value in headers.items()}
    for operation in operations:
        answer = _call(http, operation, encoded)
        _assert_problem(answer, 401, "unauthenticated", "send a valid token as `Authorization: Bearer ...`")
        assert answer.headers["www-authenticate"] == "Bearer", operation


@pytest.mark.full(but=1)
@pytest.mark.parametrize("kind", INVALID)
def test_every_operation_requires_a_valid_token(http: httpx.Client, kind: str) -> None:
    _assert_unauthenticated(http, GUARDED, INVALID[kind])


@pytest.mark.parametrize("kind", INVALID)
def test_operations_of_each_group_require_a_valid_token(http: httpx.Client, kind: str) -> None:
    """One function reads the token for all operations."""
    _assert_unauthenticated(http, (OPERATORS[0], WORKERS[0], *ANYBODYS[:2]), INVALID[kind])


def test_requests_without_a_token_are_refused_and_leave_no_trace(
    http: httpx.Client, change_watcher: ChangeWatcher
) -> None:
    with change_watcher.nothing_changes() as events:
        _assert_unauthenticated(http, GUARDED, {})
    assert events == []  # a caller without a token cannot fill the audit log


def test_a_token_in_the_query_is_not_accepted(shared_coordinator: Coordinator) -> None:
    with shared_coordinator.bare_http() as http:
        for name in ("token", "access_token", "authorization"):
            assert http.get("/v1/runs", params={name: shared_coordinator.operator_token}).status_code == 401


def test_workers_and_operators_are_refused_each_others_operations(
    shared_coordinator: Coordinator, http: httpx.Client, change_watcher: ChangeWatcher
) -> None:
    worker = {"Authorization": f"Bearer {shared_coordinator.worker_token('a')}"}
    operator = {"Authorization": f"Bearer {shared_coordinator.operator_token}"}
    with change_watcher.nothing_changes():
        for operation in OPERATORS:
            _assert_problem(_call(http, operation, worker), 403, "forbidden", "yours is a worker's")
        for operation in WORKERS:
            _assert_problem(_call(http, operation, operator), 403, "forbidden", "yours is an operator's")


def test_a_revoked_token_is_refused_everywhere(
    shared_coordinator: Coordinator, http: httpx.Client, change_watcher: ChangeWatcher
) -> None:
    cases = (("admin", None, OPERATORS, GUARDED), ("worker", "revoked-token", WORKERS, [*WORKERS, *ANYBODYS]))
    for role, client_id, its, called in cases:
        token = shared_coordinator.client.create_token(role, client_id)  # type: ignore[arg-type]
        headers = {"Authorization": f"Bearer {token.secret}"}
        permitted = next(each for each in its if not each.path.endswith("/claim"))  # a claim would wait for work
        assert _call(http, permitted, headers).status_code not in (401, 403)
        shared_coordinator.client.revoke_token(token.id)
        shared_coordinator.client.revoke_token(token.id)  # a repeated revocation is not an error
        with change_watcher.nothing_changes() as events:
            for operation in called:
                _assert_problem(_call(http, operation, headers), 401, "unauthenticated", "expired or revoked")
        assert events == []


def test_all_tokens_of_a_revoked_client_are_refused_everywhere(
    shared_coordinator: Coordinator, http: httpx.Client, change_watcher: ChangeWatcher
) -> None:
    headers = {"Authorization": f"Bearer {shared_coordinator.worker_token('leaver')}"}
    other = {"Authorization": f"Bearer {shared_coordinator.worker_token('leaver')}"}
    last = change_watcher.tables.last_event()
    assert shared_coordinator.client.revoke_client("leaver").revoked_at is not None
    first = shared_coordinator.client.client("leaver").revoked_at
    assert (
        shared_coordinator.client.revoke_client("leaver").revoked_at == first
    )  # a repeated revocation changes nothing
    assert [event.kind for event in change_watcher.tables.events_after(last)] == ["client.revoked"]
    for mine, called in ((headers, GUARDED), (other, [*WORKERS, *ANYBODYS])):
        for operation in called:
            _assert_problem(_call(http, operation, mine), 401, "unauthenticated", "expired or revoked")
    with pytest.raises(Conflict, match="is revoked; enrol the data owner under a new name"):
        shared_coordinator.client.create_token("worker", "leaver")


def test_secrets_are_shown_once_and_are_not_stored(
    shared_coordinator: Coordinator, change_watcher: ChangeWatcher
) -> None:
    token = shared_coordinator.client.create_token("worker", "a", "for the test")
    assert token.secret.startswith("fedssl_")
    assert len(token.secret) >= 40
    everything = str(change_watcher.tables.dump())
    assert token.secret not in everything
    assert str(token.id) in everything
    with shared_coordinator.http() as http:
        listed = http.get("/v1/tokens").text
    assert str(token.id) in listed
    assert "secret" not in listed
    assert "hash" not in listed
    assert len({shared_coordinator.client.create_token("operator").secret for _ in range(5)}) == 5


def test_no_secret_is_logged_repeated_or_stored(
    shared_coordinator: Coordinator,
    change_watcher: ChangeWatcher,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The output of all actions with tokens is searched, including refusals and errors."""
    caplog.set_level(logging.DEBUG)
    said: list[str] = []

    def expect(error: type[Exception], act: Callable[[], object]) -> None:
        with pytest.raises(error) as caught:
            act()
        said.append(f"{caught.value!r} {caught.value}")

    def worker(secret: str) -> WorkerClient:
        return WorkerClient(shared_coordinator.url, secret, retry=Retry(seconds=0))

    made = [shared_coordinator.client.create_token(role, label="logged") for role in ("admin", "operator", "viewer")]
    made += [
        shared_coordinator.client.create_token("worker", "logged"),
        shared_coordinator.client.create_enrolment_token("logged"),
    ]
    own = new_secret()
    secrets = [token.secret for token in made] + [own]
    said += [repr(made), str(made[0]), repr(worker(own)), repr(Client(shared_coordinator.url, secrets[0]))]
    worker(secrets[4]).enrol(hash_secret(own))
    expect(Conflict, lambda: worker(secrets[4]).enrol(hash_secret("another's")))
    for secret in secrets[:3]:
        expect(NotAllowed, worker(secret).heartbeat)
    with shared_coordinator.http(secrets[1]) as http:
        said += [http.post("/v1/runs", content=b"{").text, http.get("/v1/runs/x").text, http.get("/v1/nothing").text]
    for token in made:
        shared_coordinator.client.revoke_token(token.id)
        expect(NotAuthenticated, worker(token.secret).heartbeat)
    output = capfd.readouterr()
    everything = "".join([*said, caplog.text, output.out, output.err, str(change_watcher.tables.dump())])
    assert "enrolment.refused" in everything
    assert not [secret for secret in secrets if secret.removeprefix("fedssl_") in everything]


@pytest.mark.parametrize(
    ("body", "where"),
    [
        ({"role": "root"}, "role"),
        ({"role": "enrolment", "client_id": "a"}, "role"),
        ({"role": "viewer", "client_id": "a"}, "client_id"),
        ({"role": "worker"}, "client_id"),
        ({"role": "operator", "client_id": "a"}, "client_id"),
        ({"role": "worker", "client_id": "A"}, "client_id"),
        ({"role": "worker", "client_id": "a" * 64}, "client_id"),
        ({"role": "operator", "label": "x" * 101}, "label"),
        ({"role": "operator", "label": "\x00"}, "body"),
        ({"role": "operator", "expires": 1}, "expires"),
        ({"role": "operator", "lifetime_seconds": 0}, "lifetime_seconds"),
        ({"role": "operator", "lifetime_seconds": 10**12}, "lifetime_seconds"),
        ({"role": "operator", "lifetime_seconds": 1.5}, "lifetime_seconds"),
        ({}, "role"),
    ],
)
def test_an_invalid_request_for_a_token_is_refused_with_the_field(
    shared_coordinator: Coordinator, change_watcher: ChangeWatcher, body: dict[str, object], where: str
) -> None:
    with change_watcher.nothing_changes(), shared_coordinator.http() as http:
        answer = http.post("/v1/tokens", json=body)
    _assert_problem(answer, 422, "invalid-request", where)


def test_unknown_tokens_and_clients_are_not_found(
    shared_coordinator: Coordinator, change_watcher: ChangeWatcher
) -> None:
    with change_watcher.nothing_changes() as events:
        with shared_coordinator.http() as http:
            _assert_problem(http.delete(f"/v1/tokens/{'0' * 32}"), 404, "not-found", "no token")
        with pytest.raises(NotFound, match="no client nobody"):
            shared_coordinator.client.client("nobody")
        with pytest.raises(NotFound, match="no client nobody"):
            shared_coordinator.client.revoke_client("nobody")
    assert events == []


def test_addresses_that_need_no_token_show_no_secret(
    shared_coordinator: Coordinator, change_watcher: ChangeWatcher
) -> None:
    shared_coordinator.worker("hospital-a").close()
    secrets = [
        shared_coordinator.operator_token,
        shared_coordinator.database_url,
        "hospital-a",
        str(shared_coordinator.store),
    ]
    secrets += [hashed for (hashed,) in change_watcher.tables.query("SELECT secret_hash FROM tokens")]
    with shared_coordinator.bare_http() as http:
        for path in (*sorted(OPEN), "/openapi.json", "/sign-in"):
            answer = http.get(path)
            assert answer.status_code == 200, path
            assert not [secret for secret in secrets if secret in answer.text], path
        assert http.get("/healthz").json() == {"status": "ok", "checks": {}}
        assert http.get("/readyz").json() == {"status": "ok", "checks": {"postgres": "ok"}}
        for path in ("/docs", "/redoc", "/v1", "/v1/work"):
            _assert_problem(http.get(path), 404, "not-found", path)
        _assert_problem(http.put("/v1/runs"), 405, "method-not-allowed", "PUT /v1/runs")
