"""Compose projects on a real Docker engine, for `make compose-test`."""

import hashlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from fedssl.cache import cache_folder
from fedssl.client import Client, Retry
from fedssl.data.datasets import find_fashion_mnist
from fedssl.protocol.states import Outcome, RunState
from fedssl.protocol.views import RunView

ROOT = Path(__file__).parents[2]
WORKERS = ("worker-0", "worker-1", "worker-2")
SERVERS = (*WORKERS, "postgres", "redis", "api", "beat", "aggregator", "distiller", "evaluator", "notifier")
PATIENCE_SECONDS = 900
# The tests of another checkout on the same engine must use other images.
VERSION = f"test-{hashlib.sha256(bytes(ROOT)).hexdigest()[:8]}"


def require_engine() -> None:
    """End the test run unless there is a running Docker engine."""
    ask = ["docker", "info"]
    if shutil.which("docker") is None or subprocess.run(ask, capture_output=True, check=False).returncode:
        pytest.exit("make compose-test needs a running Docker engine, with compose 2.24 or newer, for `docker`", 2)


class Federation:
    """A compose project of docker-compose.yml and `overlays`, on the engine that `docker` finds."""

    def __init__(self, *overlays: str, **environment: str) -> None:
        self._files = [argument for name in ("docker-compose.yml", *overlays) for argument in ("--file", name)]
        self._name = f"fedssl-test-{secrets.token_hex(4)}"
        port = free_port()
        self._url = f"http://127.0.0.1:{port}"
        self._results = tempfile.TemporaryDirectory(prefix="fedssl-results-")
        self.results = Path(self._results.name)
        self.environment = os.environ | {
            "FEDSSL_PORT": port,
            "FEDSSL_VERSION": VERSION,
            "FEDSSL_RESULTS": str(self.results),
        }
        if os.getuid():
            self.environment["FEDSSL_USER"] = f"{os.getuid()}:{os.getgid()}"
        self.environment |= environment
        # Fashion-MNIST, if it is in the local cache; otherwise the federation downloads it.
        if found := find_fashion_mnist(cache_folder()):
            self.environment["FEDSSL_DATASETS"] = str(found)

    def compose(self, *arguments: str, **environment: str) -> str:
        project = ("compose", *self._files, "--project-name", self._name)
        return docker(*project, *arguments, environment=self.environment | environment)

    def up(self, *services: str) -> None:
        self.compose("up", "--detach", "--build", "--wait", "--wait-timeout", str(PATIENCE_SECONDS), *services)

    def remove(self) -> None:
        self.compose("--profile", "cli", "down", "--volumes", "--remove-orphans")
        self._results.cleanup()

    def fedssl(self, *arguments: str) -> Any:
        """Run a command as the documents describe, and return the JSON that it prints."""
        return json.loads(self.compose("run", "--rm", "-T", "cli", *arguments, "--format", "json"))

    def fedssl_done(self, *arguments: str) -> None:
        """Run a command that prints no JSON."""
        self.compose("run", "--rm", "-T", "cli", *arguments)

    def container(self, service: str) -> str:
        return self.compose("ps", "--all", "--quiet", service).strip()

    def inspect(self, service: str) -> Any:
        return json.loads(docker("inspect", self.container(service)))[0]

    def crash(self, service: str) -> None:
        """Send SIGKILL from outside the container, which the engine treats as a crash, so that it restarts the
        container.

        After `docker kill`, an operator's command, it would not. The engine may run on another machine, so a
        container sends the signal there.
        """
        process = self.inspect(service)["State"]["Pid"]
        docker("run", "--rm", "--pid", "host", "--entrypoint", "sh", "postgres:16", "-c", f"kill -9 {process}")

    def client(self) -> Client:
        """Return an operator's client, which connects to the port that the API has on this machine."""
        token = self.compose("run", "--rm", "-T", "--entrypoint", "cat", "cli", "/run/operator/token")
        return Client(self._url, token.strip(), retry=Retry(seconds=PATIENCE_SECONDS))

    def submit(self) -> UUID:
        return UUID(self.fedssl("run", "submit", "examples/ssd.toml", "--set", "num_rounds=3")["id"])

    def completed(self, run: UUID) -> RunView:
        with self.client() as client:
            eventually(lambda: client.run(run).state is RunState.FINISHED)
            view = client.run(run)
        assert view.outcome is Outcome.COMPLETED, view.reason
        return view


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def docker(*arguments: str, environment: dict[str, str] | None = None, folder: Path = ROOT) -> str:
    done = subprocess.run(
        ["docker", *arguments], cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=PATIENCE_SECONDS + 60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"docker {' '.join(arguments)}:\n{done.stderr[-4000:]}"
    return done.stdout


def eventually(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(1)
    return value
