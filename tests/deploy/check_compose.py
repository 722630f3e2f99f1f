"""`make compose-test`: the federation of docker-compose.yml on a real Docker engine, from nothing to nothing.

Not part of the suite: it builds images and takes minutes. It has a project name, volumes and a port of its own.
"""

import json
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from fedssl.cache import cache_folder
from fedssl.client import Client, Retry
from fedssl.data.datasets import find_fashion_mnist
from fedssl.protocol.states import Outcome, RunState
from fedssl.protocol.views import RunView

ROOT = Path(__file__).parents[2]
WORKERS = ("worker-0", "worker-1", "worker-2")
SERVERS = (*WORKERS, "postgres", "redis", "api", "beat", "aggregator", "distiller", "evaluator")
PATIENCE_SECONDS = 900


class Federation:
    """One compose project, of docker-compose.yml and `overlays`. `docker`: whatever the command of that name finds."""

    def __init__(self, *overlays: str) -> None:
        self._files = [argument for name in ("docker-compose.yml", *overlays) for argument in ("--file", name)]
        self._name = f"fedssl-test-{secrets.token_hex(4)}"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        self._url = f"http://127.0.0.1:{port}"
        self._environment = os.environ | {"FEDSSL_PORT": port, "FEDSSL_VERSION": "test"}
        # Fashion-MNIST, where this machine has it; else the federation fetches it.
        if found := find_fashion_mnist(cache_folder()):
            self._environment["FEDSSL_DATASETS"] = str(found)

    def compose(self, *arguments: str) -> str:
        project = ("compose", *self._files, "--project-name", self._name)
        return docker(*project, *arguments, environment=self._environment)

    def up(self) -> None:
        self.compose("up", "--detach", "--build", "--wait", "--wait-timeout", str(PATIENCE_SECONDS))

    def remove(self) -> None:
        self.compose("--profile", "cli", "down", "--volumes", "--remove-orphans")

    def fedssl(self, *arguments: str) -> Any:
        """What the command says in JSON, run as the documents say."""
        return json.loads(self.compose("run", "--rm", "-T", "cli", *arguments, "--format", "json"))

    def inspect(self, service: str) -> Any:
        container = self.compose("ps", "--all", "--quiet", service).strip()
        return json.loads(docker("inspect", container))[0]

    def crash(self, service: str) -> None:
        """SIGKILL from outside of the container: to the engine a crash, which it starts the container again after.

        `docker kill` would not do, since that is an operator's word. And the engine's processes may be those of another
        machine, so the signal is sent there.
        """
        process = self.inspect(service)["State"]["Pid"]
        docker("run", "--rm", "--pid", "host", "--entrypoint", "sh", "postgres:16", "-c", f"kill -9 {process}")

    def client(self) -> Client:
        """An operator's client, by the port on this machine."""
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


def docker(*arguments: str, environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        ["docker", *arguments], cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
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


@pytest.fixture(scope="module")
def federation() -> Iterator[Federation]:
    ask = ["docker", "info"]
    if shutil.which("docker") is None or subprocess.run(ask, capture_output=True, check=False).returncode:
        pytest.exit("make compose-test needs a running Docker engine, with compose 2.24 or newer, for `docker`", 2)
    started = Federation()
    try:
        started.up()
        yield started
    finally:
        started.remove()


@pytest.fixture(scope="module")
def undisturbed(federation: Federation) -> RunView:
    """The completed run to which the others are compared."""
    return federation.completed(federation.submit())


def test_a_run_completes(undisturbed: RunView) -> None:
    assert undisturbed.clients == ["client-0", "client-1", "client-2"]
    assert undisturbed.rounds_closed == 3


@pytest.mark.parametrize("service", SERVERS)
def test_containers_can_do_little(federation: Federation, service: str) -> None:
    container = federation.inspect(service)
    settings = container["HostConfig"]
    assert settings["ReadonlyRootfs"]
    assert settings["CapDrop"] == ["ALL"]
    assert "no-new-privileges:true" in settings["SecurityOpt"]
    assert settings["Memory"] > 0
    assert container["State"]["Health"]["Status"] == "healthy"
    addresses = [port["HostIp"] for ports in settings["PortBindings"].values() for port in ports]
    assert addresses == (["127.0.0.1"] if service == "api" else [])
    if service not in ("postgres", "redis"):  # these begin as root and change to a user of their own
        assert container["Config"]["User"] == "10001:10001"


def test_every_first_start_has_a_password_of_its_own_and_workers_see_none(federation: Federation) -> None:
    password = federation.compose("exec", "-T", "postgres", "cat", "/run/secrets/postgres/password")
    assert len(password) >= 40
    for worker in WORKERS:
        targets = {mount["Destination"] for mount in federation.inspect(worker)["Mounts"]}
        assert targets == {"/state", "/data"}


def test_the_api_has_no_torch(federation: Federation) -> None:
    look = "import importlib.util; print(importlib.util.find_spec('torch'))"
    assert federation.compose("exec", "-T", "api", "python", "-c", look).strip() == "None"


@pytest.mark.parametrize("service", ["api", "aggregator", "worker-0"])
def test_an_image_lists_its_components(federation: Federation, service: str) -> None:
    text = federation.compose("exec", "-T", service, "cat", "/opt/fedssl/sbom.cdx.json")
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    names = {component["name"] for component in json.loads(text)["components"]}
    assert {"fedssl", "python", "pydantic"} <= names
    assert ("torch" in names) == (service != "api")


def test_whatever_crashes_the_run_has_the_same_bits(federation: Federation, undisturbed: RunView) -> None:
    run = federation.submit()
    with federation.client() as client:
        eventually(lambda: client.run(run).rounds_closed >= 1)
    for service in ("worker-1", "aggregator", "api"):
        federation.crash(service)
    eventually(lambda: federation.inspect("worker-1")["RestartCount"] == 1)
    eventually(lambda: federation.inspect("api")["State"]["Health"]["Status"] == "healthy")
    assert federation.completed(run).model == undisturbed.model


def test_down_and_up_forgets_nothing(federation: Federation, undisturbed: RunView) -> None:
    federation.compose("down")
    federation.up()
    shown = federation.fedssl("run", "show", str(undisturbed.id))
    assert (shown["state"], shown["model"]) == ("finished", undisturbed.model)
    # The same workers, who enrolled once, and the same images: another run gives the same model.
    assert federation.completed(federation.submit()).model == undisturbed.model


def test_a_bucket_in_place_of_the_volume(federation: Federation, undisturbed: RunView) -> None:
    federation.compose("down")
    with_bucket = Federation("compose.s3.yml")
    try:
        with_bucket.up()
        completed = with_bucket.completed(with_bucket.submit())
        assert completed.model == undisturbed.model
        kept = with_bucket.compose("exec", "-T", "objects", "find", "/data/artifacts", "-type", "f")
        assert str(completed.model) in kept
        assert with_bucket.inspect("objects")["HostConfig"]["ReadonlyRootfs"]
        assert with_bucket.inspect("objects")["Config"]["User"] == "10001:10001"
    finally:
        with_bucket.remove()
