"""If hundreds of connections are opened and kept, callers with a token are served, and runs have the same bits."""

import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import httpx
import pytest

from fault import audit, specs
from fault.federation import FaultFederation
from fault.injected import Injected
from fault.patience import scaled_timeout
from fedssl_local.server import choose_port

FAULT_CLASS = "connection exhaustion"

_MOST, _HELD = 200, 300
_HEAD = b"POST /v1/work/claim HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
KINDS = {
    "silent": b"",
    "half of a head": _HEAD[:40],
    "half of a body": _HEAD + b"Content-Length: 60\r\n\r\n{",
    "bad tokens, kept open": _HEAD + b"Authorization: Bearer fedssl_x\r\nContent-Length: 2\r\n\r\n{}",
}


@pytest.fixture(scope="module")
def health_port() -> int:
    return choose_port()


@pytest.fixture(scope="module")
def federation(
    injected: Injected, health_port: int, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FaultFederation]:
    settings = {
        "FEDSSL_MAX_CONNECTIONS": str(_MOST),
        "FEDSSL_MAX_CONNECTIONS_PER_ADDRESS": "50",
        "FEDSSL_HEALTH_PORT": str(health_port),
        "FEDSSL_FAILED_SIGN_INS_PER_MINUTE": "60",
        "FEDSSL_ADDRESS_REQUESTS_PER_MINUTE": "3000",
    }
    with FaultFederation(tmp_path_factory.mktemp("connections"), injected, **settings) as running:
        yield running


@contextmanager
def held_open(federation: FaultFederation, kind: str) -> Iterator[None]:
    """Keep more connections open than the API has places, from the workers' own address, and replace those it
    closes."""
    address = httpx.URL(federation.url)
    is_over = threading.Event()

    def hold() -> None:
        with ExitStack() as stack:
            held: list[socket.socket] = []
            while not is_over.is_set():
                held = [each for each in held if not _is_closed(each)]
                for _ in range(_HELD - len(held)):
                    with suppress(OSError):
                        connection = socket.create_connection((address.host, address.port or 0), timeout=5)
                        held.append(stack.enter_context(connection))
                        connection.sendall(KINDS[kind])
                        connection.setblocking(False)
                is_over.wait(0.2)

    federation.injected.note(kind, "api", f"{_HELD} at a time")
    thread = threading.Thread(target=hold)
    thread.start()
    try:
        time.sleep(1)
        yield
    finally:
        is_over.set()
        thread.join()


def _is_closed(connection: socket.socket) -> bool:
    try:
        while connection.recv(4096):
            pass
    except BlockingIOError:
        return False
    except OSError:
        pass
    connection.close()
    return True


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_completes_while_other_connections_are_held_open(
    kind: str, federation: FaultFederation, health_port: int, rng: random.Random
) -> None:
    spec = specs.spec(rng.choice(specs.METHODS[:1]), num_rounds=1, seed=rng.randrange(10**6))
    with held_open(federation, kind):
        run_id = federation.begin(spec)
        for _ in range(10):
            began = time.monotonic()
            for path in ("healthz", "readyz"):
                assert httpx.get(f"http://127.0.0.1:{health_port}/{path}", trust_env=False).status_code == 200
            assert time.monotonic() - began < scaled_timeout(5)
            time.sleep(0.1)
        audit.completed(federation, run_id, spec)


def test_probes_and_runs_succeed_while_tokens_are_guessed(federation: FaultFederation) -> None:
    """Tokens are guessed from the address of the probes and the workers, faster than the limits allow."""
    spec = specs.spec("fedbyol", num_rounds=1)
    federation.injected.note("guessed tokens", "api", "100 at once")
    with httpx.Client(base_url=federation.url, trust_env=False) as http:
        for number in range(100):
            guess = {"Authorization": f"Bearer fedssl_{number}"}
            assert http.get("/v1/runs", headers=guess).status_code in (401, 429)
        assert http.get("/readyz").status_code == http.get("/healthz").status_code == 200
    audit.completed(federation, federation.begin(spec), spec)
