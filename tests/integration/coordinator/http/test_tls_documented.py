"""Each command of docs/operations/access.md that serves the API runs as a process."""

import os
import re
import shlex
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from support.certificates import Authority
from support.environment import coordinator_environment
from support.processes import free_port
from support.servers import Servers

pytestmark = [pytest.mark.full, pytest.mark.integration]

PAGE = Path(__file__).parents[4] / "docs" / "operations" / "access.md"


def printed() -> list[list[str]]:
    """Return the commands of the section on TLS that start the API."""
    section = PAGE.read_text().split("\n## TLS\n")[1].split("\n## ")[0]
    return [shlex.split(line) for line in re.findall(r"^\$ (fedssl-coordinator api .*)$", section, re.MULTILINE)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with the files that the commands name: the API's certificate and key, the clients' authority."""
    Authority(tmp_path, "clients").sign("hospital", "127.0.0.1")
    Authority(tmp_path, "ours").sign("api", "127.0.0.1")
    return tmp_path


@pytest.fixture
def started(servers: Servers, folder: Path) -> Iterator[list[tuple[list[str], int]]]:
    """Start all commands, and yield each with its port. Only their host and port are changed: each uses loopback."""
    with ExitStack() as stack:
        environment = coordinator_environment(
            stack.enter_context(servers.database()), servers.redis_url, folder / "store"
        )
        found = []
        for words in printed():
            here = ["127.0.0.1" if word == "0.0.0.0" else word for word in words]
            port = free_port()
            process = subprocess.Popen(
                [sys.executable, "-m", "fedssl_coordinator", *here[1:], "--port", str(port)],
                cwd=folder, env={**os.environ, **environment}, stderr=subprocess.DEVNULL,
            )  # fmt: skip
            stack.callback(process.wait, 30)
            stack.callback(process.terminate)
            found.append((words, port))
        yield found


def test_every_documented_command_serves(started: list[tuple[list[str], int]], folder: Path) -> None:
    assert len(started) == 4
    for words, port in started:
        is_encrypted, is_mutual = "--tls-cert" in words, "--tls-client-ca" in words
        context = ssl.create_default_context(cafile=folder / "ours.pem")
        if is_mutual:
            context.load_cert_chain(folder / "hospital.pem", folder / "hospital.key")
        assert _status(port, context, is_encrypted=is_encrypted) == 200, words
        if is_mutual:
            bare = ssl.create_default_context(cafile=folder / "ours.pem")
            assert _status(port, bare, is_encrypted=True, seconds=0) is None, "it lets in whoever shows no certificate"


def _status(port: int, context: ssl.SSLContext, *, is_encrypted: bool, seconds: float = 60) -> int | None:
    """Return the status of /healthz as soon as it answers, or None if it does not within `seconds`."""
    end = time.monotonic() + seconds
    while True:
        try:
            scheme = "https" if is_encrypted else "http"
            return httpx.get(f"{scheme}://127.0.0.1:{port}/healthz", verify=context, timeout=5).status_code
        except httpx.TransportError:
            if time.monotonic() >= end:
                return None
            time.sleep(0.2)
