"""Retries, the mapping of errors, paging, and that the token is never shown."""

import gzip
import json
import logging
import socket
import time
from datetime import UTC, datetime
from types import SimpleNamespace
from uuid import uuid4

import httpx
import pytest

from fedssl.client import (
    ApiError,
    BadAnswer,
    Client,
    ClientError,
    Conflict,
    DuplicateUpdate,
    Gone,
    LeaseLost,
    NotAllowed,
    NotAuthenticated,
    NotFound,
    Rejected,
    Retry,
    ServerError,
    TooManyRequests,
    Unavailable,
    UnknownWork,
    Unreachable,
    WorkerClient,
)
from fedssl.client.connection import retry_after
from fedssl.client.retry import is_temporary
from fedssl.errors import FedSSLError
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.views import Health
from support.answers import answering
from support.listening import Listener

from .conftest import Answer, Received, ScriptedServer, json_answer, problem

TOKEN = "very-secret-token"
QUICK = Retry(seconds=3, first_delay=0.01, max_delay=0.05)
ONCE = Retry(seconds=0)


def run_view(run_id: object, state: str = "running") -> dict[str, object]:
    now = datetime.now(UTC).isoformat()
    return {
        "id": str(run_id),
        "name": "a",
        "method": "fedalignuniform",
        "state": state,
        "outcome": None,
        "reason": None,
        "rounds_closed": 0,
        "num_rounds": 10,
        "created_at": now,
        "started_at": now,
        "finished_at": None,
        "spec": RunSpec().model_dump(mode="json"),
        "initial_model": None,
        "model": None,
        "current_round": None,
        "clients": ["a"],
    }


@pytest.mark.parametrize(
    ("slug", "status", "kind"),
    [
        ("unauthenticated", 401, NotAuthenticated),
        ("forbidden", 403, NotAllowed),
        ("not-found", 404, NotFound),
        ("lease-lost", 409, LeaseLost),
        ("duplicate-update", 409, DuplicateUpdate),
        ("something-newer", 409, Conflict),
        ("round-closed", 410, Gone),
        ("artifact-too-large", 413, Rejected),
        ("artifact-rejected", 422, Rejected),
        ("invalid-request", 422, Rejected),
        ("too-many-requests", 429, TooManyRequests),
        ("unavailable", 503, Unavailable),
        ("broken", 500, ServerError),
        ("odd", 418, ApiError),
    ],
)
def test_each_problem_raises_its_own_class(
    server: ScriptedServer, slug: str, status: int, kind: type[ApiError]
) -> None:
    server.script = lambda request: problem(slug, status, "Claim again.")
    with Client(server.url, TOKEN, retry=ONCE) as client, pytest.raises(ApiError) as caught:
        client.run(uuid4())
    assert type(caught.value) is kind
    assert caught.value.slug == slug
    assert str(caught.value) == "Claim again."


def test_a_coordinators_message_cannot_control_the_terminal(server: ScriptedServer) -> None:
    server.script = lambda request: problem("lease-lost", 409, "Claim\x1b[2J \x9b2J\u202e again.")
    with Client(server.url, TOKEN) as client, pytest.raises(LeaseLost) as caught:
        client.run(uuid4())
    assert str(caught.value) == "Claim?[2J ?2J? again."


def test_validation_errors_are_listed(server: ScriptedServer) -> None:
    body = {
        "type": "urn:fedssl:problem:invalid-request",
        "title": "Invalid",
        "status": 422,
        "detail": "The request has mistakes:",
        "errors": [{"loc": ["body", "spec", "seed"], "msg": "must be positive"}],
    }
    server.script = lambda request: json_answer(body, 422)
    with Client(server.url, TOKEN) as client, pytest.raises(Rejected, match=r"body\.spec\.seed: must be positive"):
        client.create_run(RunSpec())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ALL_PROXY", "socks5://127.0.0.1:1080"),
        ("HTTPS_PROXY", "ftp://127.0.0.1:21"),
        ("HTTPS_PROXY", "http://127.0.0.1:port"),
        ("NO_PROXY", "localhost,[::1]"),
        ("NO_PROXY", "localhost,fe80::/10"),
    ],
)
def test_proxies_that_cannot_be_used_are_an_error_that_names_the_variables(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    for each in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(each, raising=False)
        monkeypatch.delenv(each.lower(), raising=False)
    monkeypatch.setenv(name, value)
    with pytest.raises(ClientError, match="check HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and NO_PROXY"):
        Client("https://fed.example.org", "token")


@pytest.mark.parametrize("name", ["HTTP_PROXY", "http_proxy", "ALL_PROXY"])
def test_no_proxy_is_used_for_this_machine(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "http://127.0.0.1:9")
    server.script = lambda request: json_answer({"status": "ok", "checks": {}}, 200)
    with Client(server.url, TOKEN, retry=ONCE) as client:
        assert client.health().status == "ok"


def test_an_error_page_from_another_server_is_still_explained(server: ScriptedServer) -> None:
    server.script = lambda request: Answer(404, b"<html>nginx</html>")
    with Client(server.url, TOKEN) as client, pytest.raises(NotFound, match="is the address that of a fedssl"):
        client.run(uuid4())


def test_an_answer_of_another_program_is_a_bad_answer(server: ScriptedServer) -> None:
    server.script = lambda request: Answer(200, b"<html>hello</html>")
    with Client(server.url, TOKEN) as client, pytest.raises(BadAnswer, match="a fedssl coordinator"):
        client.run(uuid4())


def test_an_answer_with_many_errors_is_summarised(server: ScriptedServer) -> None:
    answers = [{"items": [0] * 50_000}, {"status": "ok", **{str(number): 0 for number in range(50_000)}}]
    server.script = lambda request: json_answer(answers[request.path == "/v1/work/claim"])
    with (
        Client(server.url, TOKEN, retry=ONCE) as client,
        pytest.raises(BadAnswer, match=r"^GET /v1/runs gave an answer .*\(items\.0: "),
    ):
        list(client.runs())
    with WorkerClient(server.url, TOKEN, retry=ONCE) as worker, pytest.raises(ClientError, match=r"\(?50\d\d\d values"):
        worker.claim(0)


def test_an_endless_answer_is_not_read_to_its_end(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedssl.client.connection._ANSWER_BYTES", 1000)
    server.script = lambda request: Answer(200, b" " * 5_000_000, with_length=False)
    with Client(server.url, TOKEN) as client, pytest.raises(BadAnswer, match="an answer of more than 1000 bytes"):
        client.run(uuid4())


def test_an_answer_with_too_many_values_is_not_parsed(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the limit, 16 MiB of empty objects took 11 GB of a worker's memory and a minute of processor time."""
    monkeypatch.setattr("fedssl.client.connection._MOST_VALUES", 1000)
    server.script = lambda request: json_answer({"secure_cohort": [{}] * 501})
    with WorkerClient(server.url, TOKEN, retry=ONCE) as worker:
        for ask in (lambda: worker.claim(0), lambda: worker.secure_status(uuid4())):
            with pytest.raises(BadAnswer, match="an answer of more than 1000 values"):
                ask()


def test_cookies_are_not_kept(server: ScriptedServer) -> None:
    """If a proxy set many cookies, every later request would be too large for the coordinator."""
    server.script = lambda request: json_answer(Health(status="ok"), **{"Set-Cookie": "place=1; Path=/"})
    with Client(server.url, TOKEN) as client:
        client.health()
        client.health()
    assert ["Cookie" in request.headers for request in server.requests] == [False, False]


class _Heads(Listener):
    """Sends 8 MiB of interim responses, as fast as they are read."""

    num_sent = 0

    def _serve(self, client: socket.socket) -> None:
        with client:
            client.recv(1 << 16)
            head = b"HTTP/1.1 102 Processing\r\nX: " + b"x" * 60_000 + b"\r\n\r\n"
            for _ in range(140):
                client.sendall(head)
                self.num_sent += len(head)


def test_endless_interim_responses_are_not_read_to_their_end() -> None:
    """The client never waited for bytes, so its deadline never expired: it read them for as long as they arrived."""
    with (
        _Heads() as server,
        Client(server.url, TOKEN, retry=ONCE) as client,
        pytest.raises(Unreachable, match="the exchange took too long"),
    ):
        client.health()
    assert server.num_sent < 8 << 20


@pytest.mark.parametrize("status", [200, 409])
def test_compressed_answers_are_not_unpacked(server: ScriptedServer, status: int) -> None:
    """A kilobyte could expand to a gigabyte."""
    packed = gzip.compress(json.dumps(run_view(uuid4())).encode())
    server.script = lambda request: Answer(status, packed, {"Content-Encoding": "gzip"})
    with Client(server.url, TOKEN) as client, pytest.raises(ClientError, match=r"compresses its answers|409 Conflict"):
        client.run(uuid4())
    assert server.requests[0].headers["Accept-Encoding"] == "identity"


def test_redirects_are_not_followed(server: ScriptedServer) -> None:
    server.script = lambda request: Answer(307, headers={"Location": server.url + "/elsewhere"})
    with Client(server.url, TOKEN) as client, pytest.raises(BadAnswer, match="redirects"):
        client.run(uuid4())
    assert len(server.requests) == 1


def test_temporary_failures_are_retried(server: ScriptedServer) -> None:
    run_id = uuid4()
    answers = [
        problem("unavailable", 503),
        Answer(502, b"bad gateway"),
        Answer(200, b"x" * 50, cut_after=10),
        json_answer(run_view(run_id)),
    ]
    server.script = lambda request: answers[len(server.requests) - 1]
    with Client(server.url, TOKEN, retry=QUICK) as client:
        assert client.run(run_id).id == run_id
    assert len(server.requests) == 4


def test_retries_end_when_their_time_is_over(server: ScriptedServer) -> None:
    server.script = lambda request: problem("unavailable", 503)
    start = time.monotonic()
    with (
        Client(server.url, TOKEN, retry=Retry(seconds=0.3, first_delay=0.02)) as client,
        pytest.raises(Unavailable),
    ):
        client.run(uuid4())
    assert time.monotonic() - start < 1.5
    assert len(server.requests) > 2


def test_retry_after_is_honoured(server: ScriptedServer) -> None:
    run_id = uuid4()
    answers = [problem("too-many-requests", 429, **{"Retry-After": "1"}), json_answer(run_view(run_id))]
    server.script = lambda request: answers[len(server.requests) - 1]
    start = time.monotonic()
    with Client(server.url, TOKEN, retry=QUICK) as client:
        client.run(run_id)
    assert time.monotonic() - start >= 1


def test_a_retry_after_longer_than_the_retry_time_is_not_waited_for(server: ScriptedServer) -> None:
    server.script = lambda request: problem("too-many-requests", 429, **{"Retry-After": "3600"})
    with Client(server.url, TOKEN, retry=QUICK) as client, pytest.raises(TooManyRequests) as caught:
        client.run(uuid4())
    assert caught.value.retry_after == 3600
    assert len(server.requests) == 1


def test_a_date_in_retry_after_is_compared_with_the_senders_clock() -> None:
    """The sender's clock may be years behind this machine's."""
    headers = {"Date": "Sat, 01 Jan 2000 12:00:00 GMT", "Retry-After": "Sat, 01 Jan 2000 12:00:07 GMT"}
    assert retry_after(headers) == 7
    assert retry_after({**headers, "Date": "yesterday"}) is None


def test_a_client_closes_its_connections() -> None:
    with Client("http://127.0.0.1:1") as client:
        assert not client._connection._http.is_closed
    assert client._connection._http.is_closed


def test_a_slow_answer_does_not_count_as_a_difference_of_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    def difference(asked: float, answered: float) -> float:
        moments = [asked, answered]
        monkeypatch.setattr("fedssl.client.base.time", SimpleNamespace(time=lambda: moments.pop(0)))
        with Client(server.url) as client:
            return client.clock_difference_seconds()

    with answering({("GET", "/healthz"): {}}) as server:
        server.date = "Sat, 01 Jan 2000 12:00:00 GMT"
        noon = 946728000.0
        assert difference(noon - 20, noon + 20) == 0
        assert difference(noon - 30, noon - 10) == 10.5, "the coordinator's clock is ahead"
        assert difference(noon + 10, noon + 30) == -9.5, "it is behind"


def test_an_unreachable_address_is_reported() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with Client(url, TOKEN, retry=ONCE) as client, pytest.raises(Unreachable, match="check that the coordinator"):
            client.run(uuid4())


def test_a_retried_run_creation_uses_the_same_idempotency_key(server: ScriptedServer) -> None:
    run_id = uuid4()
    answers = [Answer(201, b"x" * 50, cut_after=3), json_answer(run_view(run_id), 201)]
    server.script = lambda request: answers[len(server.requests) - 1]
    with Client(server.url, TOKEN, retry=QUICK) as client:
        client.create_run(RunSpec())
    first, second = (request.headers["Idempotency-Key"] for request in server.requests)
    assert first == second


def test_a_request_that_was_not_sent_may_be_repeated_whatever_it_does() -> None:
    unsent, perhaps = (Unreachable("no answer", maybe_sent=each) for each in (False, True))
    assert [is_temporary(error, idempotent=False) for error in (unsent, perhaps)] == [True, False]
    assert is_temporary(perhaps)


def test_creating_a_token_is_not_retried(server: ScriptedServer) -> None:
    server.script = lambda request: Answer(201, b"x" * 50, cut_after=3)
    with Client(server.url, TOKEN, retry=QUICK) as client, pytest.raises(Unreachable):
        client.create_token("operator")
    assert len(server.requests) == 1


def test_pages_are_followed(server: ScriptedServer) -> None:
    def script(request: Received) -> Answer:
        cursor = int(request.query.get("cursor", "0"))
        item = {"round_number": cursor, "client_id": None, "name": "loss", "value": 1.0}
        return json_answer({"items": [item], "next_cursor": str(cursor + 1) if cursor < 2 else None})

    server.script = script
    with Client(server.url, TOKEN) as client:
        assert [metric.round_number for metric in client.metrics(uuid4(), "loss")] == [0, 1, 2]
    assert all(request.query["name"] == "loss" for request in server.requests)


def test_a_page_that_repeats_itself_ends_the_list(server: ScriptedServer) -> None:
    """A proxy that drops the query would otherwise cause an endless list."""
    server.script = lambda request: json_answer({"items": [], "next_cursor": "b"})
    with Client(server.url, TOKEN) as client, pytest.raises(BadAnswer, match="returned one page twice"):
        list(client.runs())
    assert len(server.requests) == 2


def test_names_are_escaped_in_paths(server: ScriptedServer) -> None:
    server.script = lambda request: problem("not-found", 404)
    with Client(server.url, TOKEN) as client, pytest.raises(NotFound):
        client.client("../tokens")
    assert server.requests[0].path == "/v1/clients/..%2Ftokens"


def test_ready_returns_unavailable_as_an_answer(server: ScriptedServer) -> None:
    health = Health(status="unavailable", checks={"database": "no answer"})
    answers = [json_answer(health, 503), json_answer(Health(status="ok"))]
    server.script = lambda request: answers[len(server.requests) - 1]
    with Client(server.url) as client:
        assert client.ready() == health
        assert client.ready().status == "ok"
    assert "Authorization" not in server.requests[0].headers


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://host", "http://user:pw@host", "http://"])
def test_an_impossible_address_is_refused(url: str) -> None:
    with pytest.raises(ClientError, match="http://HOST:PORT"):
        Client(url, TOKEN)


def test_the_token_is_sent_and_never_shown(server: ScriptedServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    server.script = lambda request: problem("unauthenticated", 401, "Log in.")
    with Client(server.url, TOKEN) as client, pytest.raises(NotAuthenticated) as caught:
        client.run(uuid4())
    assert server.requests[0].headers["Authorization"] == f"Bearer {TOKEN}"
    seen = caplog.text + repr(client) + repr(vars(client)) + repr(caught.value) + str(caught.value)
    assert TOKEN not in seen
    with pytest.raises(ClientError) as broken:
        Client(server.url, "secret\nX-Other: 1")
    assert "secret" not in str(broken.value)


def test_work_that_is_not_understood_can_be_declined(server: ScriptedServer) -> None:
    assignment_id = uuid4()
    server.script = lambda request: json_answer(
        {"assignment_id": str(assignment_id), "spec": {"method": {"name": "x"}}}
    )
    with WorkerClient(server.url, TOKEN) as client, pytest.raises(UnknownWork) as caught:
        client.claim(0)
    assert caught.value.assignment_id == assignment_id


def test_claim_returns_none_if_there_is_no_work(server: ScriptedServer) -> None:
    server.script = lambda request: Answer(204)
    with WorkerClient(server.url, TOKEN) as client:
        assert client.claim(0) is None


def test_another_transport_can_replace_the_network() -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(200, json={"status": "ok"}))
    with Client("http://coordinator", transport=transport) as client:
        assert client.health().status == "ok"


def test_all_errors_belong_to_one_tree() -> None:
    assert issubclass(ClientError, FedSSLError)
    assert issubclass(UnknownWork, ClientError)
