"""Hundreds of connections that send nothing do not keep out callers with a valid token."""

import os
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from fedssl.client import Tls
from support.certificates import Authority
from support.coordinator import Coordinator
from support.processes import free_port
from support.servers import Servers
from support.waiting import wait_until

pytestmark = pytest.mark.full


Make = Callable[..., Coordinator]

FEW = {"max_connections": 20, "max_connections_per_address": 5}


@pytest.fixture
def make(servers: Servers, tmp_path: Path) -> Iterator[Make]:
    """Yield a function that starts a coordinator with the given settings."""
    with servers.database() as url, ExitStack() as stack:

        def start(tls: Tls | None = None, listening: dict[str, Any] | None = None, **environment: Any) -> Coordinator:
            values = {f"FEDSSL_{name.upper()}": str(value) for name, value in environment.items()}
            coordinator = Coordinator(
                url, servers.redis_url, tmp_path / "store", tls=tls, listening=listening, **values
            )
            return stack.enter_context(coordinator)

        yield start


@contextmanager
def half_open(coordinator: Coordinator, number: int, said: bytes = b"GET /v1/ru") -> Iterator[list[socket.socket]]:
    """Open `number` connections of a caller without a token, each with the beginning of a request."""
    address = httpx.URL(coordinator.url)
    with ExitStack() as stack:
        opened = []
        for _ in range(number):
            connection = socket.create_connection((address.host, address.port or 0), timeout=10)
            opened.append(stack.enter_context(connection))
            connection.sendall(said)
        yield opened


def num_open(connections: list[socket.socket]) -> int:
    """Return how many of the connections the coordinator has not closed."""
    found = 0
    for connection in connections:
        connection.settimeout(0.01)
        try:
            found += connection.recv(1) != b""
        except TimeoutError:
            found += 1
        except ConnectionError:
            pass
    return found


def test_half_open_connections_keep_no_other_caller_out(make: Make) -> None:
    coordinator = make(**FEW, head_seconds=30)
    late = coordinator.worker_token("late")
    with coordinator.http() as known, coordinator.bare_http() as stranger, half_open(coordinator, 0):
        assert known.get("/v1/runs").status_code == 200
        with half_open(coordinator, 60):
            for _ in range(3):
                assert known.get("/v1/runs").status_code == 200
                assert stranger.get("/healthz").status_code == 200
                with coordinator.http(late) as http:
                    assert http.post("/v1/work/claim", json={"wait_seconds": 0}).status_code == 204


def test_connections_beyond_the_limit_of_their_address_are_soon_closed(make: Make) -> None:
    coordinator = make(max_connections=1000, max_connections_per_address=5, head_seconds=30)
    with half_open(coordinator, 25) as connections:
        wait_until(lambda: num_open(connections) <= 6, 10)
        assert num_open(connections) >= 4  # those within the limit


def test_bodies_that_never_arrive_keep_no_other_caller_out(make: Make) -> None:
    coordinator = make(**FEW)
    head = b"POST /v1/work/claim HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 20\r\n\r\n{"
    with half_open(coordinator, 60, head), coordinator.http() as http:
        assert http.get("/v1/runs").status_code == 200


def test_connections_of_known_callers_are_not_closed_for_strangers(make: Make) -> None:
    """This holds even if they carry no request at the moment."""
    coordinator = make(**FEW)
    with ExitStack() as stack:
        known = [stack.enter_context(coordinator.http()) for _ in range(8)]
        for http in known:
            assert http.get("/v1/runs").status_code == 200
        ports = [_local_port(http) for http in known]
        with half_open(coordinator, 60):
            for http in known:
                assert http.get("/v1/runs").status_code == 200
        assert [_local_port(http) for http in known] == ports  # the same connections


def test_the_connection_of_a_waiting_claim_counts_as_a_known_callers(make: Make) -> None:
    """The response may come only after half a minute. The caller is known as soon as its token is found valid."""
    coordinator = make(**FEW, claim_wait_seconds=4)
    with coordinator.worker("a") as worker, half_open(coordinator, 0):
        answers: list[Any] = []
        thread = threading.Thread(target=lambda: answers.append(worker.claim(4)))
        thread.start()
        time.sleep(0.3)
        with half_open(coordinator, 60):
            thread.join(10)
        assert answers == [None]


def test_more_known_callers_than_connections_get_a_503(make: Make) -> None:
    coordinator = make(max_connections=2, claim_wait_seconds=20)
    workers = [coordinator.worker_token(name) for name in ("a", "b", "c")]
    coordinator.client.close()  # its connection takes a place
    bodies = b'{"wait_seconds": 20}'
    head = "POST /v1/work/claim HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\nContent-Type: application/json\r\n"
    with ExitStack() as stack:
        connections = []
        for token in workers:
            connection = stack.enter_context(next(iter([half_open(coordinator, 1, b"")])))[0]
            connection.sendall((head % token).encode() + b"Content-Length: %d\r\n\r\n%b" % (len(bodies), bodies))
            connections.append(connection)
            time.sleep(0.3)
        answer = connections[2].recv(1000)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"Retry-After: 2" in answer
        assert num_open(connections[:2]) == 2


def test_tls_handshakes_that_never_begin_keep_no_caller_out(make: Make, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair = authority.sign("api", "127.0.0.1")
    listening = {"certificate": pair.certificate, "key": pair.key}
    coordinator = make(Tls(ca_file=authority.file), listening, **FEW, head_seconds=2)
    context = ssl.create_default_context(cafile=authority.file)
    with half_open(coordinator, 60, b"\x16\x03\x01") as connections:
        with coordinator.http(verify=context) as http:
            assert http.get("/v1/runs").status_code == 200
        wait_until(lambda: num_open(connections) == 0, 10)


def test_the_limit_of_an_address_does_not_apply_to_a_trusted_proxy(make: Make) -> None:
    coordinator = make(
        listening={"trusted_proxies": "127.0.0.1"}, max_connections=100, max_connections_per_address=5, head_seconds=30
    )
    with half_open(coordinator, 25) as connections:
        time.sleep(1.5)
        assert num_open(connections) == 25


def test_health_checks_have_their_own_listener(make: Make) -> None:
    port = free_port()
    coordinator = make(**FEW, health_port=port)
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as http, half_open(coordinator, 60):
        assert http.get("/healthz").json() == {"status": "ok", "checks": {}}
        assert http.get("/readyz").json() == {"status": "ok", "checks": {"postgres": "ok"}}
        assert http.get("/metrics").status_code == 401
        authorised = {"Authorization": f"Bearer {coordinator.operator_token}"}
        assert "fedssl_runs" in http.get("/metrics", headers=authorised).text
        refused = http.get("/v1/runs", headers=authorised)
        assert refused.status_code == 404
        assert refused.json()["type"] == "urn:fedssl:problem:not-found"


def test_a_health_port_that_is_in_use_is_reported(make: Make) -> None:
    make()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        environment = {**os.environ, "FEDSSL_HEALTH_PORT": str(port)}
        command = [sys.executable, "-m", "fedssl_coordinator", "api", "--port", "0"]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 3
    assert "health.cannot_listen" in ended.stderr + ended.stdout
    assert str(port) in ended.stderr + ended.stdout


def _local_port(http: httpx.Client) -> int:
    pool = http._transport._pool  # type: ignore[attr-defined]
    (connection,) = pool.connections
    return int(connection._connection._network_stream.get_extra_info("client_addr")[1])
