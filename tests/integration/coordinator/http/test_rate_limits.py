"""Floods and silent connections are answered with 429 or closed, and other callers are not affected."""

import asyncio
import http.client
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import httpx
import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.exc import OperationalError

from fedssl.protocol.views import TokenCreate
from fedssl_coordinator.core.db import UNREACHABLE, transaction
from fedssl_coordinator.http import rate_limits
from fedssl_coordinator.http.rate_limits import Credential, RateLimits, RequestCounts
from fedssl_coordinator.identity.concurrency_limit import _waiting as places
from fedssl_coordinator.identity.tokens import service as tokens
from support.coordinator import UNLIMITED, Coordinator
from support.pages import Browser
from support.scenario import Scenario
from support.servers import Servers
from support.tables import Tables
from support.waiting import wait_until

Make = Callable[..., Coordinator]


@pytest.fixture
def make(servers: Servers, tmp_path: Path) -> Iterator[Make]:
    """Yield a function that starts one coordinator with the given settings.

    Counters depend on the amount of the limit, too: give each test its own amount.
    """
    with servers.database() as url:
        running: list[Coordinator] = []

        def start(redis_url: str = servers.redis_url, **environment: Any) -> Coordinator:
            values = {f"FEDSSL_{name.upper()}": str(value) for name, value in environment.items()}
            running.append(Coordinator(url, redis_url, tmp_path / "store", **values).__enter__())
            return running[0]

        yield start
        running[0].__exit__()


def _assert_refused(answer: httpx.Response) -> None:
    assert answer.status_code == 429, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["type"] == "urn:fedssl:problem:too-many-requests"
    assert 1 <= int(answer.headers["retry-after"]) <= 60


@pytest.mark.parametrize("with_redis", [True, False])
def test_failed_sign_ins_are_limited_without_affecting_valid_tokens(make: Make, with_redis: bool) -> None:  # noqa: FBT001
    limit = 5 if with_redis else 6
    redis = {} if with_redis else {"redis_url": "redis://127.0.0.1:1/0"}
    coordinator = make(**redis, failed_sign_ins_per_minute=limit)
    late = coordinator.worker_token("late")
    with coordinator.http() as known, coordinator.http("fedssl_guess") as guess, coordinator.http(late) as unknown:
        assert known.get("/v1/runs").status_code == 200
        for _ in range(limit):
            assert guess.get("/v1/runs").status_code == 401
        _assert_refused(guess.get("/v1/runs"))
        assert unknown.post("/v1/work/claim", json={"wait_seconds": 0}).status_code == 204  # looked up, not refused
        _assert_refused(guess.get("/v1/runs"))
        assert known.get("/v1/runs").status_code == 200
        assert guess.get("/healthz").status_code == 200  # an orchestrator's probe


def test_only_a_valid_token_becomes_known(make: Make) -> None:
    """A path that is open or does not exist answers every token. The answer does not make the token a known one."""
    coordinator = make(address_requests_per_minute=7)
    with coordinator.http("fedssl_made_up") as http:
        for path, status in (("/sign-in", 200), ("/v1/nothing", 404), ("/openapi.json", 200)):
            assert http.get(path).status_code == status
            assert http.get(path).status_code == status
        assert http.get("/openapi.json").status_code == 200
        _assert_refused(http.get("/openapi.json"))


def test_probes_count_neither_as_requests_nor_as_failed_sign_ins(make: Make) -> None:
    coordinator = make(address_requests_per_minute=9, failed_sign_ins_per_minute=4)
    with coordinator.http("fedssl_guess") as guess, coordinator.bare_http() as probe:
        for _ in range(10):
            assert probe.get("/readyz").status_code == guess.get("/readyz").status_code == 200
        assert [guess.get("/v1/runs").status_code for _ in range(5)] == [401] * 4 + [429]
        for path in ("/readyz", "/healthz"):
            assert probe.get(path).status_code == guess.get(path).status_code == 200


def test_only_a_few_tokens_are_looked_up_at_a_time(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guesses beyond the limit cost the database little, however many arrive at once."""
    # If Redis answers late, a process counts by itself for a while and would allow another guess.
    monkeypatch.setattr("fedssl_coordinator.http.rate_limits._REDIS", {"socket_timeout": 30})
    coordinator = make(failed_sign_ins_per_minute=1)
    with coordinator.http("fedssl_guess") as http:
        assert http.get("/v1/runs").status_code == 401
    most, running, lock = 0, 0, threading.Lock()
    original = tokens.repository.find

    def find(*arguments: Any) -> Any:
        nonlocal most, running
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.1)
        with lock:
            running -= 1
        return original(*arguments)

    monkeypatch.setattr(tokens.repository, "find", find)

    def guess(number: int) -> None:
        with coordinator.http(f"fedssl_guess_{number}") as http:
            _assert_refused(http.get("/v1/runs"))

    threads = [threading.Thread(target=guess, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 1 <= most <= 4


def test_a_token_with_too_many_requests_is_refused(make: Make) -> None:
    coordinator = make(token_requests_per_minute=8)
    other = coordinator.worker_token("other")
    with coordinator.http(coordinator.operator_token) as http, coordinator.http(other) as worker:
        assert {http.get("/v1/runs").status_code for _ in range(9)} == {200}  # the first one counts for the address
        _assert_refused(http.get("/v1/runs"))
        assert worker.post("/v1/work/claim", json={"wait_seconds": 0}).status_code == 204


@pytest.mark.parametrize("with_redis", [True, False])
def test_requests_of_a_token_are_counted_exactly_over_two_processes(
    servers: Servers,
    with_redis: bool,  # noqa: FBT001
) -> None:
    async def allowed(*hits: tuple[int, int]) -> list[int]:
        """Return how many of the hits (process, number) are allowed."""
        url = servers.redis_url if with_redis else "redis://127.0.0.1:1/0"
        processes, who = [RequestCounts(url), RequestCounts(url)], str(uuid4())
        return [
            [await processes[number].hit_soon("token", who, 40) for _ in range(hit)].count(0) for number, hit in hits
        ]

    assert asyncio.run(allowed((0, 50))) == [40]
    assert asyncio.run(allowed((0, 30), (1, 30))) == [30, 10 if with_redis else 30]
    assert asyncio.run(allowed((0, 15), (1, 45))) == [15, 29 if with_redis else 40]  # four are not reported yet


def test_what_is_remembered_of_callers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rate_limits, "_TOKENS_KNOWN", 2)

    async def app(*_: Any) -> None:
        raise AssertionError("no request is made")

    def find_token(secret: str) -> UUID | None:
        if secret == "postgres is away":
            raise OperationalError("SELECT 1", {}, Exception())
        return uuid4() if secret.startswith("valid") else None

    async def ask() -> None:
        limits = RateLimits(app, find_token)
        credentials = {
            each: Credential("valid_token", each.encode(), each)
            for each in ("valid 1", "valid 2", "valid 3", "wrong", "postgres is away")
        }
        found = {name: await limits._look_up(each) for name, each in credentials.items() if name != "valid 3"}
        assert found == {"valid 1": True, "valid 2": True, "wrong": False, "postgres is away": False}
        limits._remember(credentials["valid 1"], "its id")  # it was used again
        assert [await limits._look_up(credentials[f"valid {number}"]) for number in (3, 1, 2)] == [True, False, True]
        counts = RequestCounts("redis://127.0.0.1:1/0")
        for who in "abac":
            await counts.hit_soon("token", who, 40)
        assert list(counts._unreported) == ["a", "c"]

    asyncio.run(ask())


def test_the_spelling_of_the_authorization_header_does_not_change_the_count(make: Make) -> None:
    """Limits read the token as the endpoints do: the first of two headers, in any case, with any spaces around it."""
    coordinator = make(token_requests_per_minute=6)
    secret = coordinator.operator_token
    spellings = [f"{'bearer' if n % 2 else 'BEARER'}{' ' * n}{secret}" for n in range(1, 7)]
    with coordinator.bare_http() as http:
        # The first request counts for the address: the token is not known yet.
        assert http.get("/v1/runs", headers={"Authorization": f"Bearer {secret}"}).status_code == 200
        for spelt in spellings:
            twice = [("Authorization", spelt), ("Authorization", f"Bearer made_up_{len(spelt)}")]
            assert http.get("/v1/runs", headers=twice).status_code == 200
        _assert_refused(http.get("/v1/runs", headers={"Authorization": f"bEARER    {secret}"}))


def test_a_session_counts_with_its_token_and_not_with_its_address(make: Make) -> None:
    coordinator = make(failed_sign_ins_per_minute=3, token_requests_per_minute=6)
    secret = coordinator.operator_token
    with (
        Browser(coordinator, secret) as browser,
        Browser(coordinator, coordinator.admin_token) as late,
        coordinator.http("fedssl_guess") as guess,
        coordinator.http(secret) as http,
    ):
        assert browser.get("/runs").status_code == 200
        assert http.get("/v1/runs").status_code == 200
        assert [guess.get("/v1/runs").status_code for _ in range(4)] == [401, 401, 401, 429]
        assert late.get("/runs").status_code == 429  # this process does not know this session yet
        forged = browser.http.cookies["fedssl_session"] + "0"
        with coordinator.bare_http({"Cookie": f"fedssl_session={forged}"}) as forger:
            assert forger.get("/runs").status_code == 429
        assert [browser.get("/runs").status_code for _ in range(3)] == [200] * 3
        assert [http.get("/v1/runs").status_code for _ in range(3)] == [200] * 3
        assert browser.get("/runs").status_code == 429
        _assert_refused(http.get("/v1/runs"))


def test_a_session_does_not_make_an_invalid_token_known(make: Make) -> None:
    coordinator = make(address_requests_per_minute=6)
    with Browser(coordinator, coordinator.operator_token) as browser:
        headers = {"Authorization": "Bearer made_up"}
        assert [browser.get("/runs", **headers).status_code for _ in range(6)] == [200] * 5 + [429]


def test_a_revoked_token_counts_as_an_unknown_one(make: Make) -> None:
    coordinator = make(failed_sign_ins_per_minute=2)
    made = coordinator.client.create_token("viewer")
    with coordinator.http(made.secret) as http:
        assert http.get("/v1/runs").status_code == 200
        coordinator.client.revoke_token(made.id)
        assert [http.get("/v1/runs").status_code for _ in range(3)] == [401, 401, 429]


def test_too_many_mistyped_tokens_are_answered_with_a_page(make: Make) -> None:
    coordinator = make(failed_sign_ins_per_minute=7)
    with coordinator.bare_http(headers={"Accept": "text/html"}) as browser:
        answers = [browser.post("/sign-in", data={"token": "mistyped"}) for _ in range(8)]
    assert [answer.status_code for answer in answers] == [401] * 7 + [429]
    assert answers[-1].headers["content-type"] == "text/html; charset=utf-8"
    assert 1 <= int(answers[-1].headers["retry-after"]) <= 60


@pytest.mark.full
def test_two_hundred_workers_behind_one_address_are_within_the_default_limits(make: Make) -> None:
    defaults = dict.fromkeys((name.removeprefix("FEDSSL_").lower() for name in UNLIMITED), "")
    from fedssl_coordinator.core.settings import Settings

    values = {name: Settings.model_fields[name].default for name in defaults}
    assert all(values.values())
    coordinator = make(**values)
    with transaction() as session:
        secrets = [
            tokens.create(session, TokenCreate(role="worker", client_id=f"c{number}")).secret for number in range(200)
        ]
    with coordinator.bare_http() as http:
        for secret in secrets:
            answer = http.post("/v1/work/heartbeat", json={}, headers={"Authorization": f"Bearer {secret}"})
            assert answer.status_code == 200, answer.text


def test_the_number_of_waiting_claims_per_token_is_limited(make: Make) -> None:
    coordinator = make(max_waiting_per_token=2, claim_wait_seconds=20)
    worker, other = coordinator.worker("a"), coordinator.worker_token("b")
    secret = worker._connection._http.headers["Authorization"].removeprefix("Bearer ")
    answers: list[int] = []

    def claim() -> None:
        with coordinator.http(secret) as http:
            answers.append(http.post("/v1/work/claim", json={"wait_seconds": 20}).status_code)

    waiting = [threading.Thread(target=claim) for _ in range(2)]
    for thread in waiting:
        thread.start()
    wait_until(lambda: sorted(places.values()) == [2], 15)
    with coordinator.http(secret) as http, coordinator.http(other) as others:
        refused = http.post("/v1/work/claim", json={"wait_seconds": 0})
        _assert_refused(refused)
        assert "2 requests of this token wait already" in refused.json()["detail"]
        assert others.post("/v1/work/claim", json={"wait_seconds": 0}).status_code == 204
        for client in coordinator.client.clients():
            coordinator.client.revoke_client(client.id)
    for thread in waiting:
        thread.join(10)
    assert answers == [401, 401]


def test_a_stream_that_is_closed_frees_its_place(make: Make, tmp_path: Path) -> None:
    coordinator = make(max_waiting_per_token=1)
    with Tables(coordinator.database_url) as tables, coordinator.http() as http:
        path = f"/v1/runs/{Scenario(coordinator, tables, tmp_path).id}/events/stream"
        with http.stream("GET", path) as stream:
            lines = stream.iter_lines()
            next(lines)
            _assert_refused(http.get(path))

        def answers() -> bool:
            with http.stream("GET", path) as again:
                return again.status_code == 200

        wait_until(answers, 15)


def test_streams_of_the_web_page_count_towards_the_limit_of_their_token(make: Make, tmp_path: Path) -> None:
    """Streams of the page and of the API are counted together."""
    coordinator = make(max_waiting_per_token=1)
    with (
        Tables(coordinator.database_url) as tables,
        coordinator.http(coordinator.operator_token) as http,
        Browser(coordinator, coordinator.operator_token) as browser,
    ):
        run = Scenario(coordinator, tables, tmp_path).id
        with http.stream("GET", f"/v1/runs/{run}/events/stream") as stream:
            lines = stream.iter_lines()
            next(lines)
            with browser.http.stream("GET", f"/runs/{run}/stream") as refused:
                assert (refused.status_code, refused.headers.get("retry-after")) == (429, "5")
        wait_until(lambda: not places, 15)
        with browser.http.stream("GET", f"/runs/{run}/stream") as stream:
            lines = stream.iter_lines()
            next(lines)
            _assert_refused(http.get(f"/v1/runs/{run}/events/stream"))


def test_the_number_of_recorded_refusals_per_client_is_limited(make: Make) -> None:
    coordinator = make(recorded_refusals_per_minute=3)
    with Tables(coordinator.database_url) as tables:
        with coordinator.http(coordinator.worker_token("a")) as http, coordinator.http() as admin:
            for _ in range(10):
                assert http.post("/v1/work/claim", json={"x" * 5000: 1}).status_code == 422
            assert admin.post("/v1/runs", json={}).status_code == 422  # those of another caller are recorded
            refused = tables.query("SELECT client_id, message FROM events WHERE kind = 'request.refused'")
            assert [client_id for client_id, _ in refused] == ["a"] * 3 + [None]
            assert max(len(message) for _, message in refused) <= 504
            _end_windows(coordinator)
            assert http.post("/v1/work/claim", json={"x": 1}).status_code == 422
        left_out = tables.query("SELECT client_id, message FROM events WHERE kind = 'refusals.left_out'")
    message = "7 earlier refused requests were too many to record individually"
    assert [tuple(row) for row in left_out] == [("a", message)]


def _end_windows(coordinator: Coordinator) -> None:
    coordinator._server.config.app.state.refusals._windows.clear()


def _connect(coordinator: Coordinator) -> socket.socket:
    address = httpx.URL(coordinator.url)
    connection = socket.create_connection((address.host, address.port or 0), timeout=15)
    connection.settimeout(15)
    return connection


def _is_closed(connection: socket.socket) -> bool:
    """Return whether the peer closes without sending a byte. Raises TimeoutError if it does neither within 15 s."""
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def _send_head(connection: socket.socket, line: bytes, times: int, pause_seconds: float = 0) -> None:
    connection.sendall(b"GET /healthz HTTP/1.1\r\n")
    for _ in range(times):
        connection.sendall(line)
        time.sleep(pause_seconds)


@pytest.mark.full
def test_a_connection_that_sends_no_complete_head_in_time_is_closed(make: Make) -> None:
    coordinator = make(head_seconds=0.3, max_head_bytes=4096)
    head = b"GET /healthz HTTP/1.1\r\nHost: x\r\n"
    for said in (b"", b"GET /hea", head, head + b"X: " + b"y" * 100):
        with _connect(coordinator) as connection:
            connection.sendall(said)
            assert _is_closed(connection)
    with _connect(coordinator) as connection:  # a connection's next request has the same limit
        connection.sendall(head + b"\r\n")
        answer = http.client.HTTPResponse(connection)  # the body may arrive after the head, in a segment of its own
        answer.begin()
        assert (answer.status, answer.read() != b"") == (200, True)
        connection.sendall(b"GET /hea")
        assert _is_closed(connection)


def test_sending_a_head_slowly_does_not_keep_a_connection_open(make: Make) -> None:
    coordinator = make(head_seconds=0.5)
    with _connect(coordinator) as connection, pytest.raises(ConnectionError):
        _send_head(connection, b"X: y\r\n", times=100, pause_seconds=0.05)


def test_an_endless_head_is_not_read_to_its_end(make: Make) -> None:
    coordinator = make(max_head_bytes=8192)
    with _connect(coordinator) as connection, pytest.raises(ConnectionError):
        _send_head(connection, b"X: " + b"y" * 10_000 + b"\r\n", times=2000)


def test_a_head_that_arrives_in_one_piece_has_the_same_limit(make: Make) -> None:
    coordinator = make(max_head_bytes=8192)
    cases = itertools.product((1, 50), ((8000, b"200"), (8400, b"431"), (100_000, b"431")))
    for fields, (total, status) in cases:
        headers = b"".join(b"X: " + b"y" * (total // fields - 5) + b"\r\n" for _ in range(fields))
        with _connect(coordinator) as connection:
            connection.sendall(b"GET /healthz HTTP/1.1\r\n" + headers + b"\r\n")
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 " + status), total


def test_a_path_that_is_too_long_is_refused_like_a_head(make: Make) -> None:
    coordinator = make(max_head_bytes=8192)
    with _connect(coordinator) as connection:
        connection.sendall(b"GET /healthz?" + b"y" * 100_000 + b" HTTP/1.1\r\n\r\n")
        answer = connection.recv(1 << 16)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert b"urn:fedssl:problem:head-too-large" in answer


def test_chunk_extensions_and_trailers_have_the_limit_of_a_head(make: Make) -> None:
    coordinator = make(max_head_bytes=8192)
    for part in (b"0\r\nX: ", b"0\r\n" + b"X: y\r\n" * 2000, b"1;x="):
        with _connect(coordinator) as connection:
            connection.sendall(b"POST /v1/work/claim HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n" + part)
            with pytest.raises(ConnectionError):
                connection.sendall(b"y" * 20_000_000)


def test_bodies_and_consecutive_requests_do_not_count_as_heads(make: Make) -> None:
    coordinator = make(max_head_bytes=8192)
    with coordinator.http() as http:
        for _ in range(5):
            assert http.post("/v1/runs", json={"x": "y" * 100_000}).status_code == 422
            chunks = [b"{" + b" " * 50_000, b" " * 50_000 + b"}"]
            headers = {"Content-Type": "application/json"}
            assert http.post("/v1/runs", content=iter(chunks), headers=headers).status_code == 422


@pytest.mark.full
def test_waiting_claims_and_slow_bodies_may_take_longer_than_a_head(make: Make) -> None:
    coordinator = make(head_seconds=0.2, claim_wait_seconds=1)
    with coordinator.http(coordinator.worker_token("a")) as http:
        assert http.post("/v1/work/claim", json={"wait_seconds": 1}).status_code == 204

    def slowly() -> Iterator[bytes]:
        for part in (b'{"wait_', b"seconds", b'": 0}'):
            time.sleep(0.2)
            yield part

    with coordinator.http(coordinator.worker_token("b")) as http:
        headers = {"Content-Type": "application/json"}
        assert http.post("/v1/work/claim", content=slowly(), headers=headers).status_code == 204


def test_a_request_that_waits_too_long_for_a_lock_gets_a_503_with_retry_after(make: Make, tmp_path: Path) -> None:
    coordinator = make(lock_seconds=0.3)
    with Tables(coordinator.database_url) as tables:
        run = Scenario(coordinator, tables, tmp_path).id
    plain = coordinator.database_url.replace("+psycopg", "")
    with psycopg.connect(plain) as holder, coordinator.http() as http:
        holder.execute("SELECT 1 FROM runs WHERE id = %s FOR UPDATE", (run,))
        answer = http.post(f"/v1/runs/{run}/pause")
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "2"
        holder.rollback()
        assert http.post(f"/v1/runs/{run}/pause").status_code == 200


def _fall_silent(seconds: float) -> None:
    with transaction() as session:
        session.execute(text("SELECT 1"))
        time.sleep(seconds)
        session.execute(text("SELECT 1"))


@pytest.mark.full
def test_a_transaction_that_is_idle_for_too_long_ends_like_an_outage_of_postgres(make: Make) -> None:
    make(idle_transaction_seconds=1)
    with pytest.raises(UNREACHABLE):
        _fall_silent(2)
    with transaction() as session:
        assert session.scalar(text("SELECT 1")) == 1


def test_database_sessions_of_the_api_have_timeouts(make: Make) -> None:
    make(statement_seconds=7, idle_transaction_seconds=90)
    with transaction() as session:
        shown = {name: session.scalar(text(f"SHOW {name}")) for name in
                 ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout")}  # fmt: skip
    assert shown == {
        "statement_timeout": "7s", "lock_timeout": "10s", "idle_in_transaction_session_timeout": "90s"
    }  # fmt: skip
