"""Measures how fast large files pass the API in both directions, next to nginx and raw TCP.

    PYTHONPATH=tests python tests/bench/measure_transfer.py --megabytes 45 --turns 5 --nginx /usr/sbin/nginx

Each server is a separate process, and one client, which is the same for all, sends and receives without checking
the bytes. The turns alternate. Prints the median speed of each server and direction, and the API's as a share of the
others', the processor time of the server, and its peak memory after the first transfer and after the last one.

- raw TCP: one connection to a process that receives into one buffer and sends from memory.
- nginx: one process, `sendfile`, and PUT into a folder. It neither hashes, nor checks, nor syncs what it stores.
- nginx hashed and synced: the same upload, after which this program hashes the file (SHA-256) and syncs it, as a
  service behind nginx would have to before it accepts the file. The time of both is counted.
- API: `PUT /v1/artifacts`, `/v1/uploads` (tus) and `GET /v1/artifacts`, by an operator who sends images. Digest, header
  and synced files included.

Without `--nginx` only raw TCP is the floor.
"""

import argparse
import base64
import contextlib
import hashlib
import http.client
import json
import multiprocessing
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from fedssl.artifacts.header import header_bytes
from fedssl.client import Client, ClientError, Retry
from fedssl.protocol.plan import TensorSpec
from support.environment import coordinator_environment
from support.processes import free_port
from support.resource_usage import peak_megabytes
from support.servers import Servers, unwind_when_terminated

_IMAGE_BYTES = 3 * 224 * 224
_CHUNK = 1 << 20
_WARM_UP_MEGABYTES = 45.0  # at most, in the turn that is not counted
_NGINX = """
daemon off; master_process off; worker_processes 1; pid {folder}/pid; error_log {folder}/errors;
events {{ worker_connections 64; }}
http {{
  access_log off; sendfile on; tcp_nopush on; client_max_body_size 0; client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  server {{ listen 127.0.0.1:{port}; root {folder}/files; location / {{ dav_methods PUT; }} }}
}}
"""


@dataclass(frozen=True)
class File:
    """Random images. Each turn has different ones, so that no server has stored them already."""

    content: bytes
    digest: str

    @classmethod
    def make(cls, megabytes: float) -> "File":
        num_images = max(1, int(megabytes * 1e6 / _IMAGE_BYTES))
        beginning = header_bytes([TensorSpec(name="images", dtype="U8", shape=(num_images, 3, 224, 224))])
        content = beginning + os.urandom(_IMAGE_BYTES) + bytes((num_images - 1) * _IMAGE_BYTES)
        return cls(content, hashlib.sha256(content).hexdigest())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=45)
    parser.add_argument("--turns", type=int, default=5, help="after one that is not counted")
    parser.add_argument("--nginx", help="the program, 1.22 or newer, with its DAV module")
    options = parser.parse_args()
    unwind_when_terminated()
    speeds: dict[str, list[float]] = {}
    cpu: dict[str, list[float]] = {}
    peaks: dict[str, list[int]] = {}
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as running:
        folder = Path(name)
        servers: dict[str, Exchange] = {"raw TCP": running.enter_context(_raw_tcp())}
        if options.nginx:
            servers["nginx"] = running.enter_context(_nginx(options.nginx, folder / "nginx"))
        servers["API"] = running.enter_context(_api(folder / "api"))
        for turn in range(options.turns + 1):
            for server, exchange in servers.items():
                file = File.make(options.megabytes if turn else min(options.megabytes, _WARM_UP_MEGABYTES))
                for way, cost in exchange(file).items():
                    peaks.setdefault(server, []).append(round(cost.server_peak_mb))
                    if turn:
                        speeds.setdefault(f"{server} {way}", []).append(len(file.content) / cost.seconds / 1e6)
                        cpu.setdefault(f"{server} {way}", []).append(1000 * cost.cpu_seconds)
    medians = {name: round(statistics.median(found)) for name, found in speeds.items()}
    shares = {
        f"{name} / {floor} {name.split()[-1]}": round(speed / medians[f"{floor} {name.split()[-1]}"], 2)
        for name, speed in medians.items()
        for floor in ("raw TCP", "nginx", "nginx hashed and synced")
        if name.startswith("API") and f"{floor} {name.split()[-1]}" in medians
    }
    report = {"megabytes": options.megabytes, "turns": options.turns, "megabytes_per_second": medians,
              "shares": shares,
              "server_cpu_milliseconds": {name: round(statistics.median(found)) for name, found in cpu.items()},
              "server_peak_megabytes": {name: [found[0], found[-1]] for name, found in peaks.items()},
              "load": os.getloadavg()[0]}  # fmt: skip
    sys.stdout.write(json.dumps(report, indent=2) + "\n")
    return 0


@dataclass(frozen=True)
class Cost:
    """The duration of one transfer, the processor time of its server during it, and the server's peak memory so far."""

    seconds: float
    cpu_seconds: float
    server_peak_mb: float


Exchange = Callable[[File], dict[str, Cost]]
"""Sends a file to a server and fetches it. Returns the cost of each way."""


@contextlib.contextmanager
def _raw_tcp() -> Iterator[Exchange]:
    line, other = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=_serve_raw, args=(other,), daemon=True)
    server.start()
    port = line.recv()

    pid = server.pid or 0

    def exchange(file: File) -> dict[str, Cost]:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(len(file.content).to_bytes(8, "little"))
            up = _timed(pid, lambda: (connection.sendall(file.content), connection.recv(1)))
            down = _timed(pid, lambda: _receive(connection, len(file.content)))
        return {"up": up, "down": down}

    try:
        yield exchange
    finally:
        server.terminate()


def _serve_raw(line: "multiprocessing.connection.Connection") -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        line.send(listener.getsockname()[1])
        while True:
            connection, _ = listener.accept()
            with connection:
                size = int.from_bytes(connection.recv(8, socket.MSG_WAITALL), "little")
                _receive(connection, size)
                connection.sendall(b"1")
                part = bytes(_CHUNK)
                for start in range(0, size, _CHUNK):
                    connection.sendall(part[: min(_CHUNK, size - start)])


@contextlib.contextmanager
def _nginx(program: str, folder: Path) -> Iterator[Exchange]:
    (folder / "files").mkdir(parents=True)
    port = free_port()
    configuration = folder / "nginx.conf"
    user = "user root;" if os.getuid() == 0 else ""
    configuration.write_text(user + _NGINX.format(folder=folder, port=port))
    with subprocess.Popen([program, "-p", str(folder), "-c", str(configuration)], stderr=subprocess.DEVNULL) as server:

        def exchange(file: File) -> dict[str, Cost]:
            connection = http.client.HTTPConnection("127.0.0.1", port)
            up = _timed(server.pid, lambda: _ask(connection, "PUT", f"/{file.digest}", [file.content]))
            down = _timed(server.pid, lambda: _get(connection, f"/{file.digest}", len(file.content)))
            connection.close()
            path = folder / "files" / file.digest
            rest = _timed(os.getpid(), lambda: _hash_and_sync(path))
            path.unlink()
            whole = Cost(up.seconds + rest.seconds, up.cpu_seconds + rest.cpu_seconds, up.server_peak_mb)
            return {"up": up, "down": down, "hashed and synced up": whole}

        try:
            _await(lambda: socket.create_connection(("127.0.0.1", port)).close(), OSError)
            yield exchange
        finally:
            server.terminate()


@contextlib.contextmanager
def _api(folder: Path) -> Iterator[Exchange]:
    with Servers(folder / "servers") as servers, servers.database() as url:
        environment = coordinator_environment(url, servers.redis_url, folder / "store")
        created = [sys.executable, "-m", "fedssl_coordinator", "token", "create", "--role", "admin"]
        token = subprocess.run(created, env=environment, check=True, capture_output=True, text=True).stdout.strip()
        port = free_port()
        command = [sys.executable, "-m", "fedssl_coordinator", "api", "--port", str(port)]
        with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as server:
            try:
                with Client(f"http://127.0.0.1:{port}", token, retry=Retry(seconds=60)) as client:
                    _await(client.ready, ClientError)
                yield lambda file: _exchange_with_api(server.pid, port, token, file, folder / "store")
            finally:
                server.terminate()


def _exchange_with_api(pid: int, port: int, token: str, file: File, store: Path) -> dict[str, Cost]:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    own = {"Authorization": f"Bearer {token}"}
    path = f"/v1/artifacts/{file.digest}"
    put = _timed(pid, lambda: _ask(connection, "PUT", path, [file.content], own))
    first = _timed(pid, lambda: _get(connection, path, len(file.content), own))  # only the first is hashed
    down = _timed(pid, lambda: _get(connection, path, len(file.content), own))
    (store / file.digest[:2] / file.digest[2:4] / file.digest).unlink()
    # This uses another file without copying the first: a machine's first use of 2 GB of memory would slow down the
    # rest.
    content = (memoryview(file.content)[:-1], b"\x01")
    whole = hashlib.sha256(content[0])
    whole.update(content[1])
    digest = whole.hexdigest()
    metadata = f"digest {base64.b64encode(digest.encode()).decode()}"
    about = {**own, "Tus-Resumable": "1.0.0", "Upload-Length": str(len(file.content)), "Upload-Metadata": metadata}
    place = urlsplit(_ask(connection, "POST", "/v1/uploads", [], about)["location"]).path
    part = {**own, "Tus-Resumable": "1.0.0", "Upload-Offset": "0", "Content-Type": "application/offset+octet-stream"}
    tus = _timed(pid, lambda: _ask(connection, "PATCH", place, content, part))
    connection.close()
    (store / digest[:2] / digest[2:4] / digest).unlink()
    return {"PUT up": put, "tus up": tus, "first down": first, "down": down}


def _ask(
    connection: http.client.HTTPConnection,
    method: str,
    path: str,
    body: Sequence[bytes | memoryview],
    headers: dict[str, str] | None = None,
) -> dict[str, str]:
    connection.request(method, path, headers={**(headers or {}), "Content-Length": str(sum(map(len, body)))})
    for part in body:
        connection.sock.sendall(part)
    response = connection.getresponse()
    text = response.read()
    assert response.status < 300, (response.status, text)
    return {name.lower(): value for name, value in response.getheaders()}


def _get(
    connection: http.client.HTTPConnection, path: str, num_bytes: int, headers: dict[str, str] | None = None
) -> None:
    connection.request("GET", path, headers=headers or {})
    response = connection.getresponse()
    assert response.status == 200, response.status
    buffer, received = bytearray(_CHUNK), 0
    while count := response.readinto(buffer):
        received += count
    assert received == num_bytes, (received, num_bytes)


def _hash_and_sync(path: Path) -> None:
    with path.open("rb") as file:
        hashlib.file_digest(file, "sha256")
        os.fsync(file.fileno())


def _receive(connection: socket.socket, num_bytes: int) -> None:
    buffer = bytearray(_CHUNK)
    while num_bytes:
        num_bytes -= connection.recv_into(buffer, min(_CHUNK, num_bytes))


def _timed(pid: int, act: Callable[[], object]) -> Cost:
    """Measure the time that `act` takes, and the processor time that process `pid` uses meanwhile."""
    clock = (~pid << 3) | 2  # Linux's clock of another process: see clock_getcpuclockid(3)
    cpu, began = time.clock_gettime(clock), time.perf_counter()
    act()
    return Cost(time.perf_counter() - began, time.clock_gettime(clock) - cpu, peak_megabytes(pid))


def _await(attempt: Callable[[], object], error: type[Exception]) -> None:
    end = time.monotonic() + 60
    while True:
        try:
            attempt()
        except error:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)
        else:
            return


if __name__ == "__main__":
    sys.exit(main())
