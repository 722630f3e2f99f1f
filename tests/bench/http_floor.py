"""The floor of a round: broadcast, upload and mean by plain HTTP, without accounts, checks, a database or a disk.

    python tests/bench/http_floor.py --clients 10 --megabytes 45 --rounds 6 [--kept]

A server in a separate process sends the weights from memory, reads each update into memory and adds it to a sum in
float64. The clients are threads of this process and train nothing. Prints one JSON object: seconds per round, and the
server's peak memory and processor time without the first round. The weights are checked at the end. Needs only numpy.

With `--kept` the server answers an update with its SHA-256, and only when its file is synced. The clients do no more
than without.
"""

import argparse
import hashlib
import http.client
import http.server
import json
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np


class _Server(http.server.ThreadingHTTPServer):
    """Waits for the updates of all clients, and replaces the weights with their mean."""

    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, num_clients: int, num_floats: int, folder: Path | None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.num_clients = num_clients
        self.weights = np.zeros(num_floats, dtype=np.float32)
        self.sum = np.zeros(num_floats, dtype=np.float64)
        self.num_added = 0
        self.lock = threading.Lock()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # otherwise the end of an answer waits 40 ms
    server: _Server

    def do_GET(self) -> None:
        self._answer(memoryview(self.server.weights).cast("B"))

    def do_PUT(self) -> None:
        update = bytearray(int(self.headers["Content-Length"]))
        view, size = memoryview(update), 0
        while size < len(update):
            size += self.rfile.readinto(view[size:])  # type: ignore[attr-defined]
        server = self.server
        digest = "" if server.folder is None else _keep(update, server.folder)
        with server.lock:
            server.sum += np.frombuffer(update, dtype=np.float32)
            server.num_added += 1
            if server.num_added == server.num_clients:
                server.weights = (server.sum / server.num_clients).astype(np.float32)
                server.sum[:] = 0
                server.num_added = 0
        self._answer(digest.encode())

    def _answer(self, body: bytes | memoryview) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def _keep(update: bytearray, folder: Path) -> str:
    """Return an update's digest after it was written to a synced file with this name in a synced folder."""
    digest = hashlib.sha256(update).hexdigest()
    with (folder / digest).open("wb") as file:
        file.write(update)
        file.flush()
        os.fsync(file.fileno())
    opened = os.open(folder, os.O_RDONLY)
    os.fsync(opened)
    os.close(opened)
    return digest


def _serve(num_clients: int, num_floats: int, folder: Path | None, line: Connection) -> None:
    server = _Server(num_clients, num_floats, folder)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    line.send(server.server_address[1])
    while line.recv() == "time":
        line.send(time.process_time())
    with open("/proc/self/status") as status:
        peak = next(int(text.split()[1]) for text in status if text.startswith("VmHWM")) / 1000
    line.send(round(peak))


def _cpu_seconds(line: Connection) -> float:
    line.send("time")
    seconds: float = line.recv()
    return seconds


def _take_part(connection: http.client.HTTPConnection, step: int) -> None:
    connection.request("GET", "/")
    weights = np.frombuffer(connection.getresponse().read(), dtype=np.float32)
    update = weights + np.float32(step)
    connection.request("PUT", "/", memoryview(update).cast("B"))
    connection.getresponse().read()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--megabytes", type=float, default=45)
    parser.add_argument("--rounds", type=int, default=6, help="the first is not counted")
    parser.add_argument("--kept", action="store_true", help="updates are hashed and synced")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return _measure(options, Path(folder) if options.kept else None)


def _measure(options: argparse.Namespace, folder: Path | None) -> int:
    num_floats = int(options.megabytes * 1e6 / 4)
    line, other = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    server = context.Process(target=_serve, args=(options.clients, num_floats, folder, other))
    server.start()
    port = line.recv()
    connections = [http.client.HTTPConnection("127.0.0.1", port) for _ in range(options.clients)]
    seconds, cpu_seconds = [], []
    with ThreadPoolExecutor(options.clients) as pool:
        for _ in range(options.rounds):
            began = time.perf_counter()
            list(pool.map(_take_part, connections, range(1, options.clients + 1)))
            seconds.append(round(time.perf_counter() - began, 4))
            cpu_seconds.append(_cpu_seconds(line))
            for path in folder.iterdir() if folder is not None else ():
                path.unlink()
    connections[0].request("GET", "/")
    final = np.frombuffer(connections[0].getresponse().read(), dtype=np.float32)
    expected = options.rounds * (options.clients + 1) / 2
    assert np.allclose(final, expected), f"the weights are {final[0]} in place of {expected}"
    line.send("end")
    report = {
        "seconds": seconds[1:],
        "server_peak_mb": line.recv(),
        "server_cpu_seconds": round(cpu_seconds[-1] - cpu_seconds[0], 4),
        "load": os.getloadavg()[0],
    }
    server.join()
    sys.stdout.write(json.dumps(report) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
