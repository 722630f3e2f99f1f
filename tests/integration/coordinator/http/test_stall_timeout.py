"""A transfer that stalls is cut off, whichever side stalls. A transfer that moves is not."""

import contextlib
import socket
import time
from collections.abc import Iterator

import pytest

from support.coordinator import Coordinator
from support.data_sets import public_bytes
from support.servers import Servers
from support.tables import Tables
from support.tus import Tus
from support.uploads import digest

pytestmark = pytest.mark.full


DATA = public_bytes(num_images=500, size=64)
STALL = 0.5


@pytest.fixture(scope="module")
def quick(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    """Yield a coordinator that cuts off a transfer of less than 100 bytes within STALL seconds."""
    settings = {"FEDSSL_STALL_SECONDS": str(STALL), "FEDSSL_STALL_BYTES": "100"}
    store = tmp_path_factory.mktemp("quick") / "store"
    with servers.database() as url, Coordinator(url, servers.redis_url, store, **settings) as running:
        yield running


def _connect(coordinator: Coordinator) -> socket.socket:
    host, port = coordinator.url.removeprefix("http://").split(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
    connection.settimeout(20)
    connection.connect((host, int(port)))
    return connection


def _head(coordinator: Coordinator, request: str, length: int, *more: str) -> bytes:
    lines = [f"{request} HTTP/1.1", "Host: here", f"Authorization: Bearer {coordinator.admin_token}",
             f"Content-Length: {length}", "Content-Type: application/offset+octet-stream", *more]  # fmt: skip
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def _rest(connection: socket.socket) -> bytes:
    """Return everything that the peer sends until it closes the connection."""
    found = b""
    with contextlib.suppress(ConnectionResetError):  # the peer has not read everything
        while chunk := connection.recv(1 << 16):
            found += chunk
    return found


@pytest.mark.parametrize("request_line", [f"PUT /v1/artifacts/{digest(DATA)}", "POST /v1/runs"])
@pytest.mark.parametrize("drip", [b"", b"x"])
def test_a_body_that_stalls_is_cut_off(quick: Coordinator, request_line: str, drip: bytes) -> None:
    """The sender is silent, or sends one byte at a time."""
    with _connect(quick) as connection:
        connection.sendall(_head(quick, request_line, 5000) + DATA[:10])
        connection.settimeout(0.05)
        answer = b""
        for _ in range(100):
            try:
                answer = connection.recv(1 << 16)
                break
            except TimeoutError:
                connection.sendall(drip)
        connection.settimeout(20)
        answer += _rest(connection)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"urn:fedssl:problem:too-slow" in answer
    assert b"connection: close" in answer.lower()


def test_bytes_of_an_upload_that_arrived_before_a_stall_are_kept(quick: Coordinator) -> None:
    with Tus(quick) as tus:
        location = tus.begin(len(DATA), digest(DATA))
        with _connect(quick) as connection:
            more = ("Tus-Resumable: 1.0.0", "Upload-Offset: 0")
            connection.sendall(_head(quick, f"PATCH {location}", len(DATA), *more) + DATA[:70_000])
            assert b"HTTP/1.1 408 " in _rest(connection)
        assert tus.offset(location) == 70_000
        assert tus.send(location, DATA[70_000:], 70_000).status_code == 204


def test_a_body_that_arrives_slowly_but_steadily_is_not_cut_off(quick: Coordinator) -> None:
    with Tus(quick) as tus:
        location = tus.begin(len(DATA), digest(DATA))

        def slowly() -> Iterator[bytes]:
            for start in range(0, len(DATA), len(DATA) // 8 + 1):
                yield DATA[start : start + len(DATA) // 8 + 1]
                time.sleep(STALL / 4)

        if (offset := tus.offset(location)) == 0:
            assert tus.send(location, slowly(), 0).status_code == 204
        assert tus.offset(location) == len(DATA), offset


def test_a_download_whose_reader_stalls_is_cut_off(quick: Coordinator) -> None:
    name, size = "ab" * 32, 1 << 30
    path = quick.store / name[:2] / name[2:4] / name
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.truncate(size)
    with Tables(quick.database_url) as tables:
        tables.execute("INSERT INTO artifacts (digest, num_bytes) VALUES (%s, %s)", name, size)
    with _connect(quick) as connection:
        connection.sendall(_head(quick, f"GET /v1/artifacts/{name}", 0))
        assert connection.recv(12) == b"HTTP/1.1 200"
        time.sleep(4 * STALL)
        received = 0
        try:
            while chunk := connection.recv(1 << 20):
                received += len(chunk)
        except ConnectionResetError:
            pass
    assert received < size // 4
