"""`fedssl up` and `fedssl demo` as real processes: everything starts, Ctrl-C ends all processes, and up resumes."""

import hashlib
import json
import os
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from fedssl import tracing
from fedssl.client import Client
from fedssl_coordinator.core.celery_app import QUEUES
from fedssl_local.federation import AGGREGATORS
from support.otlp import Received, Receiver
from support.running_command import FEDSSL, RunningCommand

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

SPEC = """
name = "tiny"
num_rounds = 2
[model.encoder]
widths = [4, 8]
[model.projector]
hidden_dims = [8]
out_dim = 4
[data]
channels = 1
image_size = 16
[training]
batch_size = 64
[cohort]
min_clients = 2
lease_seconds = 10
[partition]
dataset = "digits"
num_clients = 2
scheme = "iid"
max_images = 300
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a user's working folder with a spec in it. No environment variable of fedssl is set."""
    for name in [name for name in os.environ if name.startswith("FEDSSL_")]:
        monkeypatch.delenv(name)
    (tmp_path / "tiny.toml").write_text(SPEC)
    return tmp_path


@pytest.fixture
def receiver(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    """Yield a receiver of spans. The environment makes every process send its spans to it."""
    with Receiver().running() as running:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", running.url)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "300")  # milliseconds
        yield running


@pytest.fixture
def started(folder: Path) -> Iterator[list[RunningCommand]]:
    """Yield a list for the processes that a test starts. Those still running at the end are killed."""
    processes: list[RunningCommand] = []
    yield processes
    for each in processes:
        each.process.kill()  # the subreapers end the others
        each.process.wait()
        each.errors.close()


def fedssl(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*FEDSSL, *arguments], cwd=folder, capture_output=True, text=True, check=False, timeout=240)


def document(folder: Path, *arguments: str) -> Any:
    done = fedssl(folder, *arguments, "--format", "json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def alive(pids: set[int]) -> set[int]:
    return {pid for pid in pids if Path(f"/proc/{pid}").exists()}


def shards(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (folder / ".fedssl/shards").iterdir()}


def assert_one_trace(spans: list[Received], run: str) -> None:
    """Check that round 1 is one trace with the spans of the worker, the API, the Celery task and the aggregation."""
    expected = tracing.round_trace(UUID(run), 1)[tracing.TRACEPARENT].split("-")[1]
    of_round = [span for span in spans if span.trace == expected]
    found = {(span.service, span.name, span.kind) for span in of_round}
    assert found >= {
        ("fedssl-worker", "work", "internal"),
        ("fedssl-coordinator", "POST /v1/work/deliver", "server"),
        ("fedssl-coordinator", "fedssl.advance_run", "consumer"),
        ("fedssl-coordinator", "aggregate", "internal"),
    }
    of_id = {span.id: span for span in of_round}
    deliveries = [span for span in of_round if span.name == "POST /v1/work/deliver"]
    assert {of_id[span.parent].service for span in deliveries} == {"fedssl-worker"}
    assert len(deliveries) == 2


def test_each_queue_has_its_own_process() -> None:
    """In an earlier version evaluations waited for notifications, which waited for unresolvable host names."""
    assert sorted(AGGREGATORS.values()) == sorted(QUEUES)


@pytest.mark.full
def test_up_trains_stops_all_processes_and_resumes(
    folder: Path, started: list[RunningCommand], receiver: Receiver
) -> None:
    started.append(up := RunningCommand(folder, "up", "--spec", "tiny.toml", "--port", "0", "--format", "json"))
    first = up.ready_document()
    assert sum(first["clients"].values()) == 300
    root = folder / ".fedssl"
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    private = [*root.glob("tokens/*"), *root.glob("shards/*"), *root.glob("*/password"), *root.glob("logs/*")]
    assert {stat.S_IMODE(path.stat().st_mode) for path in private} == {0o600}
    secrets = [path.read_text().strip() for path in [*root.glob("tokens/*"), *root.glob("*/password")]]
    below = up.descendants()
    commands = [Path(f"/proc/{pid}/cmdline").read_bytes().decode() for pid in below]
    assert len(secrets) == 5
    assert not [command for command in commands if any(secret in command for secret in secrets)]

    finished = document(folder, "run", "submit", "tiny.toml", "--watch")
    assert finished["outcome"] == "completed"
    pulled = document(folder, "run", "pull", finished["id"][:8])
    assert (folder / pulled["files"]["encoder"]).exists()
    second = fedssl(folder, "up")
    assert second.returncode == 5
    assert f"in use by process {up.process.pid}" in second.stderr

    long_run = document(folder, "run", "submit", "tiny.toml", "--set", "num_rounds=12")["id"]
    with Client(first["url"], Path(first["token_file"]).read_text().strip()) as client:
        while (rounds_before := client.run(long_run).rounds_closed) < 2:
            time.sleep(0.05)
    below |= up.descendants()
    assert up.interrupt() == 0
    assert alive(below) == set()
    assert not any(secret in up.output() for secret in secrets)
    assert fedssl(folder, "run", "ls").returncode == 3

    assert_one_trace(receiver.spans, finished["id"])

    before = shards(folder)
    other = fedssl(folder, "up", "--spec", "tiny.toml", "--set", "partition.seed=1")
    assert other.returncode == 2
    assert "seed is 0, not 1" in other.stderr
    started.append(up := RunningCommand(folder, "up", "--spec", "tiny.toml", "--format", "json"))
    again = up.ready_document()
    assert again["unfinished_runs"] == [long_run]
    assert {key: again[key] for key in ("url", "token_file", "clients")} == {
        key: first[key] for key in ("url", "token_file", "clients")
    }
    assert shards(folder) == before
    assert secrets == [path.read_text().strip() for path in [*root.glob("tokens/*"), *root.glob("*/password")]]
    resumed = document(folder, "run", "wait", long_run)
    assert resumed["outcome"] == "completed"
    assert resumed["rounds_closed"] == 12 > rounds_before
    below = up.descendants()
    assert up.interrupt() == 0
    assert alive(below) == set()


@pytest.mark.full
def test_the_demo_can_be_interrupted_and_resumed(folder: Path, started: list[RunningCommand]) -> None:
    arguments = ("demo", "--spec", "tiny.toml", "--set", "num_rounds=8", "--format", "json")
    started.append(demo := RunningCommand(folder, *arguments))
    while "round 2 of 8" not in demo.output():
        assert demo.process.poll() is None, demo.output()
        time.sleep(0.1)
    below = demo.descendants()
    assert demo.interrupt() == 130
    assert alive(below) == set()

    done = fedssl(folder, *arguments)

    assert done.returncode == 0, done.stderr
    assert "resuming run" in done.stderr
    result = json.loads(done.stdout)
    assert 0 < result["before"]["linear_probe"] < 1
    assert 0 < result["after"]["knn"] < 1
    for name in ("encoder", "curves", "neighbours", "model", "spec"):
        assert (folder / result["files"][name]).stat().st_size > 0
    for name in ("curves", "neighbours"):
        assert (folder / result["files"][name]).read_bytes().startswith(b"\x89PNG")
    assert result["baselines"]["chance"]["accuracy"] == 37 / 360
    assert result["neighbours_of_same_class"].keys() == {"before training", "after training"}
