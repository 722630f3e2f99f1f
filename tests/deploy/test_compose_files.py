"""The rules for every compose file, read without an engine. `make compose-test` runs the files on one."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
OVERLAYS = sorted(ROOT.glob("compose.*.yml"))
FILES = [ROOT / "docker-compose.yml", *OVERLAYS, *sorted((ROOT / "deploy" / "join").glob("*.yml"))]


class _Loader(yaml.SafeLoader):
    """A loader that knows compose's own tags."""


_Loader.add_constructor("!reset", lambda loader, node: [])


def _read(path: Path) -> dict[str, Any]:
    read: dict[str, Any] = yaml.load(path.read_text(), _Loader)  # noqa: S506 - a SafeLoader
    return read


def _new_services() -> list[Any]:
    """Return the services that a file adds, without those that an overlay changes."""
    base = _read(FILES[0])["services"]
    found = []
    for path in FILES:
        for name, service in _read(path)["services"].items():
            if path == FILES[0] or (name not in base and "image" in service):
                found.append(pytest.param(name, service, id=f"{path.parent.name}-{path.name}-{name}"))
    return found


@pytest.mark.parametrize(("name", "service"), _new_services())
def test_services_are_restricted_and_have_resource_limits(name: str, service: dict[str, Any]) -> None:
    assert service["read_only"]
    assert service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]
    runs_on = service["restart"] != "no"
    assert runs_on == ("deploy" in service)
    if runs_on:
        assert {"memory", "pids"} <= set(service["deploy"]["resources"]["limits"])
    assert "privileged" not in service
    assert not re.search(r":latest$|^[^:]+$", service["image"])


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_compose_file_contains_a_secret(path: Path) -> None:
    for service in _read(path)["services"].values():
        for variable, value in service.get("environment", {}).items():
            if re.search("PASSWORD|TOKEN|SECRET", variable):
                assert re.fullmatch(r"(/[\w/.-]+)|(\$\{\w+:-\})", value), variable


def test_only_the_proxy_listens_beyond_this_machine() -> None:
    for path in FILES:
        for name, service in _read(path)["services"].items():
            for port in service.get("ports", []):
                assert str(port).startswith("127.0.0.1:") or name == "proxy", f"{path.name}: {name} {port}"


def test_overlays_change_only_existing_services() -> None:
    base = set(_read(FILES[0])["services"])
    for path in OVERLAYS:
        for name, service in _read(path)["services"].items():
            assert name in base or "image" in service or "extends" in service, f"{path.name}: {name}"


def test_one_service_builds_each_image() -> None:
    for path in (FILES[0], *OVERLAYS):
        services = _read(path)["services"].values()
        named = {service["image"] for service in services if service.get("image", "").startswith("fedssl-")}
        built = [service["image"] for service in services if "build" in service]
        assert sorted(built) == sorted(named), path.name
    # An image that another service of the file builds is never pulled from a registry.
    services = _read(FILES[0])["services"].values()
    assert all(each["pull_policy"] == "never" for each in services if each["image"].startswith("fedssl-"))


def test_every_setting_is_in_the_example() -> None:
    example = set(re.findall(r"^#(\w+)=", (ROOT / "env.example").read_text(), re.MULTILINE))
    used = {name for path in (FILES[0], *OVERLAYS) for name in re.findall(r"\$\{(\w+)", path.read_text())}
    assert used == example - {"COMPOSE_FILE"}


def test_settings_and_results_are_not_committed() -> None:
    private = [".env", "docker-compose.override.yml", "images.env", "results/hospital-a.zip"]
    done = subprocess.run(["git", "check-ignore", *private], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == private


def test_every_process_with_a_gpu_has_a_setting_for_it() -> None:
    services = _read(ROOT / "compose.gpu.yml")["services"]
    for name, service in services.items():
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert device["device_ids"] == [f"${{FEDSSL_GPU_{name.upper().replace('-', '_')}:-0}}"]
    assert set(services) == {"distiller", "evaluator", "worker-0", "worker-1", "worker-2"}


def test_mounted_files_exist() -> None:
    for path in FILES:
        for service in _read(path)["services"].values():
            for volume in service.get("volumes", []):
                if volume.startswith("./"):
                    assert (path.parent / volume.split(":")[0]).exists(), f"{path.name}: {volume}"


def test_every_worker_has_a_shard_of_the_example() -> None:
    spec = (ROOT / "examples" / "ssd.toml").read_text()
    services = _read(FILES[0])["services"]
    workers = [name for name in services if name.startswith("worker-")]
    assert f"num_clients = {len(workers)}" in spec
    clients = [name.replace("worker", "client") for name in workers]
    assert services["data"]["command"][1:] == clients
    assert services["enrol"]["command"] == clients


def test_every_process_of_the_coordinator_uses_the_bucket() -> None:
    base, overlay = _read(FILES[0]), _read(ROOT / "compose.s3.yml")["services"]
    keeping = {
        name for name, service in base["services"].items() if "store:/var/lib/fedssl" in service.get("volumes", [])
    }
    assert keeping == {"migrate", "api", "beat", "aggregator", "distiller", "evaluator"}
    for name in keeping:
        assert overlay[name]["environment"]["FEDSSL_STORE_URL"].startswith("${FEDSSL_STORE_URL:-s3://artifacts/")
        cache = overlay[name]["environment"]["FEDSSL_STORE_CACHE_PATH"]
        assert f"store-cache:{cache}" in overlay[name]["volumes"]
        assert "objects" in overlay[name]["networks"]
        if name != "migrate":
            assert overlay[name]["depends_on"] == {"objects": {"condition": "service_healthy"}}
    assert "ports" not in overlay["objects"]


def test_the_bundled_object_store_has_its_own_keys() -> None:
    overlay = _read(ROOT / "compose.s3.yml")["services"]
    making, serving = overlay["secrets"]["volumes"], overlay["objects"]["volumes"]
    assert "objects-secrets:/secrets/objects" in making
    assert "objects-secrets:/run/secrets/objects:ro" in serving
    read = (ROOT / "deploy" / "s3" / "serve.sh").read_text()
    for name in ("fedssl_s3_access_key_id", "fedssl_s3_secret_access_key"):
        assert f"$keys/{name}" in read
    # An operator's folder is mounted only where the coordinator's keys are copied from, read-only.
    mounted = [volume for service in overlay.values() for volume in service.get("volumes", []) if "S3_KEYS" in volume]
    assert mounted == ["${FEDSSL_S3_KEYS:-objects-secrets}:/keys:ro"]
    assert mounted[0] in making


def test_every_process_sends_its_traces_to_the_collector() -> None:
    base = _read(FILES[0])["services"]
    overlay = _read(ROOT / "compose.observability.yml")["services"]
    traced = {
        name for name in base if name in ("api", "beat", "aggregator", "distiller", "evaluator") or "worker-" in name
    }
    for name in traced:
        assert overlay[name]["environment"]["OTEL_EXPORTER_OTLP_ENDPOINT"] == "http://jaeger:4318"
        assert set(base[name]["networks"]) & set(overlay["jaeger"]["networks"])
    for path in ROOT.glob("services/*/Dockerfile"):
        stages = path.read_text().split("\nFROM ")
        images = [stage for stage in stages if "ENTRYPOINT" in stage and "AS cli" not in stage]
        assert all("ARG OTEL=yes\n" in stage and "${OTEL:+--requirement /src/otel.txt}" in stage for stage in images)
