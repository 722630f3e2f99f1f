"""`make compose-test`: the federation of docker-compose.yml on a real Docker engine, from first start to removal.

This is not part of the test suite: it builds images and takes minutes. It has its own project name, volumes and
port.
"""

import json
import re
from collections.abc import Iterator

import httpx
import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from fedssl.protocol.views import RunView
from support.compose import ROOT, SERVERS, WORKERS, Federation, docker, eventually, free_port, require_engine


@pytest.fixture(scope="module")
def federation() -> Iterator[Federation]:
    require_engine()
    started = Federation()
    try:
        started.up()
        yield started
    finally:
        started.remove()


@pytest.fixture(scope="module")
def undisturbed(federation: Federation) -> RunView:
    """Return the completed run with which the others are compared."""
    return federation.completed(federation.submit())


def test_a_run_completes(undisturbed: RunView) -> None:
    assert undisturbed.clients == ["client-0", "client-1", "client-2"]
    assert undisturbed.rounds_closed == 3


@pytest.mark.parametrize("service", SERVERS)
def test_containers_are_restricted_and_healthy(federation: Federation, service: str) -> None:
    container = federation.inspect(service)
    settings = container["HostConfig"]
    assert settings["ReadonlyRootfs"]
    assert settings["CapDrop"] == ["ALL"]
    assert "no-new-privileges:true" in settings["SecurityOpt"]
    assert settings["Memory"] > 0
    assert container["State"]["Health"]["Status"] == "healthy"
    addresses = [port["HostIp"] for ports in settings["PortBindings"].values() for port in ports]
    assert addresses == (["127.0.0.1"] if service == "api" else [])
    if service not in ("postgres", "redis"):  # these start as root and change to their own user
        assert container["Config"]["User"] == federation.environment.get("FEDSSL_USER", "10001:10001")


def test_a_second_up_keeps_the_containers(federation: Federation) -> None:
    before = [federation.container(service) for service in SERVERS]
    federation.up()
    assert [federation.container(service) for service in SERVERS] == before


def test_the_api_takes_the_next_free_port(federation: Federation) -> None:
    """Two containers at the same time have the port of the API, which is not set here."""
    run = ["run", "--detach", "--service-ports", "--no-deps", "--entrypoint", "sleep", "api", "600"]
    started: list[str] = []
    try:
        for _ in range(2):
            started.append(federation.compose(*run, FEDSSL_PORT="").split()[-1])
        ports = {docker("port", name, "8000/tcp").strip() for name in started}
    finally:
        docker("rm", "--force", *started)
    assert len(ports) == 2
    assert all(re.fullmatch(r"127\.0\.0\.1:80[01]\d", port) for port in ports)


def test_results_are_written_to_a_folder_of_this_machine(federation: Federation, undisturbed: RunView) -> None:
    federation.compose("run", "--rm", "-T", "cli", "run", "pull", str(undisturbed.id), "--out", "results/encoder")
    assert (federation.results / "encoder").is_dir()


@pytest.mark.parametrize("service", ["api", "aggregator", "worker-0"])
def test_every_line_of_a_log_is_json(federation: Federation, undisturbed: RunView, service: str) -> None:
    logs = federation.compose("logs", "--no-color", "--no-log-prefix", service)
    lines = [line.removeprefix("\x1b[2K") for line in logs.splitlines()]  # compose 2.26 writes this to any output
    assert all(isinstance(json.loads(line), dict) for line in lines if line)


def test_a_first_start_creates_a_password_that_workers_cannot_read(federation: Federation) -> None:
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


def test_a_run_has_the_same_bits_after_crashes(federation: Federation, undisturbed: RunView) -> None:
    run = federation.submit()
    with federation.client() as client:
        eventually(lambda: client.run(run).rounds_closed >= 1)
    for service in ("worker-1", "aggregator", "api"):
        federation.crash(service)
    eventually(lambda: federation.inspect("worker-1")["RestartCount"] == 1)
    eventually(lambda: federation.inspect("api")["State"]["Health"]["Status"] == "healthy")
    assert federation.completed(run).model == undisturbed.model


def test_runs_and_workers_survive_down_and_up(federation: Federation, undisturbed: RunView) -> None:
    federation.compose("down")
    federation.up()
    shown = federation.fedssl("run", "show", str(undisturbed.id))
    assert (shown["state"], shown["model"]) == ("finished", undisturbed.model)
    # The workers and images are the same, and the workers enrolled only once: another run gives the same model.
    assert federation.completed(federation.submit()).model == undisturbed.model


def test_every_panel_of_the_dashboard_shows_data(federation: Federation, undisturbed: RunView) -> None:
    federation.compose("down")
    port = free_port()
    observed = Federation("compose.observability.yml", PROMETHEUS_PORT=port)
    try:
        observed.up("prometheus", *SERVERS)
        observed.completed(observed.submit())

        def number_of_results(query: str) -> int:
            address = f"http://127.0.0.1:{port}/api/v1/query"
            return len(httpx.get(address, params={"query": query}).raise_for_status().json()["data"]["result"])

        for job, processes in {"api": 1, "coordinator": 5, "workers": 3}.items():
            eventually(lambda job=job, processes=processes: number_of_results(f'up{{job="{job}"}} == 1') == processes)
        dashboard = json.loads((ROOT / "deploy/grafana/fedssl.json").read_text())
        for panel in dashboard["panels"]:
            queries = [target["expr"] for target in panel["targets"]]
            eventually(lambda queries=queries: any(number_of_results(query) for query in queries))
    finally:
        observed.remove()


def test_a_run_has_the_same_bits_with_a_bucket_in_place_of_the_volume(
    federation: Federation, undisturbed: RunView
) -> None:
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
