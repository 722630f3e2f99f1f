"""Sends a large artifact to a coordinator and fetches it again, over a connection that breaks every few seconds.

    make transfer ARGS="--gigabytes 2 --seconds 3 --megabytes-per-second 60"

The processes are real. Prints for each direction the time, how often the connection broke, how many bytes were sent
more than once, and the peak memory of both sides. Exits with 1 if the bytes that arrived differ from those that were
sent.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from fedssl.artifacts.header import header_bytes
from fedssl.artifacts.store import digest_of
from fedssl.client import Client, ClientError, Retry
from fedssl.protocol.plan import TensorSpec
from support.environment import coordinator_environment
from support.processes import free_port
from support.proxy import BreakingProxy
from support.servers import Servers, unwind_when_terminated

_IMAGE_BYTES = 3 * 224 * 224
_PEAK = "import re; print(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1], flush=True)"
_SEND = f"""
import sys, pathlib
from fedssl.client import Client, Retry
{_PEAK}
with Client(sys.argv[1], sys.argv[2], retry=Retry(seconds=60)) as client:
    client.add_public_dataset("large", pathlib.Path(sys.argv[3]))
{_PEAK}
"""
_FETCH = f"""
import sys, pathlib
from fedssl.client import WorkerClient, Retry
{_PEAK}
with WorkerClient(sys.argv[1], sys.argv[2], retry=Retry(seconds=60)) as client:
    client.download(sys.argv[4], pathlib.Path(sys.argv[3]))
{_PEAK}
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--seconds", type=float, default=3.0, help="after which each connection breaks")
    parser.add_argument("--megabytes-per-second", type=float, default=60.0)
    options = parser.parse_args()
    unwind_when_terminated()
    with tempfile.TemporaryDirectory() as name, Servers(Path(name) / "servers") as servers, servers.database() as url:
        folder = Path(name)
        environment = coordinator_environment(url, servers.redis_url, folder / "store")
        source = _write(folder / "source", options.gigabytes)
        token = _run("token", "create", "--role", "admin", environment=environment)
        port = free_port()
        command = [sys.executable, "-m", "fedssl_coordinator", "api", "--port", str(port)]
        with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as api:
            try:
                return _there_and_back(api.pid, f"http://127.0.0.1:{port}", token, source, options)
            finally:
                api.terminate()


def _there_and_back(pid: int, url: str, token: str, source: Path, options: argparse.Namespace) -> int:
    with Client(url, token, retry=Retry(seconds=60)) as client:
        _wait_for(client)
    rate, digest, fetched = options.megabytes_per_second * 1e6, digest_of(source), source.with_name("fetched")
    _say(f"{source.stat().st_size / 1e9:.2f} GB; the line carries {rate / 1e6:.0f} MB/s at most")
    with BreakingProxy(url, after_seconds=options.seconds, bytes_per_second=rate) as proxy:
        _measure("up", _SEND, proxy, pid, token, source, source.stat().st_size)
        _measure("down", _FETCH, proxy, pid, token, fetched, source.stat().st_size, digest)
    is_whole = digest_of(fetched) == digest
    _say("the bytes that came back are those that were sent" if is_whole else "OTHER BYTES CAME BACK")
    return 0 if is_whole else 1


def _measure(
    way: str, code: str, proxy: BreakingProxy, pid: int, token: str, path: Path, size: int, *more: str
) -> None:
    cuts, passed, server, began = proxy.num_cuts, proxy.num_bytes, _peak(pid), time.monotonic()
    command = [sys.executable, "-c", code, proxy.url, token, str(path), *more]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    seconds, (before, after) = time.monotonic() - began, map(int, done.stdout.split())
    repeated = 100 * ((proxy.num_bytes - passed) / size - 1)
    _say(
        f"{way:>4}: {seconds:.0f} s, {size / seconds / 1e6:.0f} MB/s, {proxy.num_cuts - cuts} breaks, "
        f"{repeated:.1f}% sent again; peak memory: client {before / 1000:.0f} -> {after / 1000:.0f} MB, "
        f"API {server / 1000:.0f} -> {_peak(pid) / 1000:.0f} MB"
    )


def _write(path: Path, gigabytes: float) -> Path:
    """Write random images, in blocks that differ."""
    num_images = int(gigabytes * 1e9 / _IMAGE_BYTES)
    spec = TensorSpec(name="images", dtype="U8", shape=(num_images, 3, 224, 224))
    block = os.urandom(_IMAGE_BYTES - 8)
    with path.open("wb") as file:
        file.write(header_bytes([spec]))
        for number in range(num_images):
            file.write(number.to_bytes(8, "little") + block)
    return path


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _peak(pid: int) -> int:
    """Return the peak memory of a process in kB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def _run(*arguments: str, environment: dict[str, str]) -> str:
    command = [sys.executable, "-m", "fedssl_coordinator", *arguments]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.strip()


def _wait_for(client: Client) -> None:
    end = time.monotonic() + 60
    while True:
        try:
            if client.ready().status == "ok":
                return
        except ClientError:
            if time.monotonic() > end:
                raise
        time.sleep(0.1)


if __name__ == "__main__":
    sys.exit(main())
