"""Fixtures with a worker's parts around a small coordinator, random images and a tiny BYOL, which has client state."""

import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import numpy as np
import pytest
import torch

from fedssl.artifacts.tensors import Tensors, load_tensors, save_tensors, serialised
from fedssl.backoff import Backoff
from fedssl.client import Retry, WorkerClient
from fedssl.data import save_npz
from fedssl.data.images import ImageData
from fedssl.engine import local, run_local_round, start_run
from fedssl.methods import METHODS
from fedssl.methods.api import Context
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.work import Progress, Register, WorkItem
from fedssl_worker import lease
from fedssl_worker.agent import Agent
from fedssl_worker.data import OwnImages
from fedssl_worker.disclosure.egress import Egress
from fedssl_worker.disclosure.ledger import Ledger
from fedssl_worker.disclosure.ledger.verification import read_entries, verify
from fedssl_worker.disclosure.policy import PolicyEnforcer
from fedssl_worker.executor import Executor
from fedssl_worker.labels import OwnLabels, load_own_labels
from fedssl_worker.state import ClientStates
from support.waiting import wait_until

from .coordinator import TOKEN, FakeCoordinator

CLIENT = "hospital-a"
RUN = uuid4()
CPU = torch.device("cpu")
INTRODUCTION = Register(
    worker_version="0", methods={"fedbyol": 1}, device="cpu", num_images=32, channels=1, image_size=16
)
QUICK = Retry(seconds=0.3, first_delay=0.01, max_delay=0.05)


def make_spec(method: dict[str, Any] | None = None, **changes: Any) -> RunSpec:
    return RunSpec.model_validate(
        {
            "method": method or {"name": "fedbyol"},
            "num_rounds": 3,
            "model": {
                "encoder": {"name": "convnet", "widths": [4, 8]},
                "projector": {"hidden_dims": [8], "out_dim": 4},
                "predictor": {"hidden_dims": [8], "out_dim": 4},
            },
            "data": {"channels": 1, "image_size": 16},
            "training": {"batch_size": 8},
            **changes,
        }
    )


def make_item(spec: RunSpec, round_number: int, **changes: Any) -> WorkItem:
    method = METHODS[spec.method.name]
    values: dict[str, Any] = {
        "assignment_id": uuid4(),
        "run_id": RUN,
        "round_number": round_number,
        "client_id": CLIENT,
        "spec": spec,
        "method_version": method.version,
        "plan": method.bind(spec).plan,
        "broadcast": "0" * 64,
        "last_accepted": None,
        "lease_seconds": 60,
        "round_deadline": datetime.now(UTC) + timedelta(hours=1),
    }
    return WorkItem(**values | changes)


@dataclass
class WorkerHarness:
    """A worker whose state is in `folder`; `restart` makes a new one on the same folder, as a new process would."""

    coordinator: FakeCoordinator
    folder: Path
    images: OwnImages
    client: WorkerClient
    device: torch.device = CPU

    def item(self, spec: RunSpec, round_number: int, broadcast: Tensors | None = None, **changes: Any) -> WorkItem:
        method = METHODS[spec.method.name]
        if broadcast is None or method.bind(spec).plan.frozen:
            first = start_run(method, Context(spec=spec, round_number=0))
            broadcast = broadcast or first.broadcast
            if first.frozen:
                changes = {"frozen": self.coordinator.put(serialised(first.frozen)), **changes}
        path = self.folder / "made.safetensors"
        save_tensors(broadcast, path)
        return make_item(spec, round_number, broadcast=self.coordinator.put(path.read_bytes()), **changes)

    def offer(self, spec: RunSpec, round_number: int, broadcast: Tensors | None = None, **changes: Any) -> UUID:
        item = self.item(spec, round_number, broadcast, **changes)
        self.coordinator.offer(item)
        return item.assignment_id

    def states(self) -> ClientStates:
        return ClientStates(self.folder / "runs")

    def executor(self, labels: OwnLabels | None = None) -> Executor:
        broadcasts = self.folder / "broadcasts"
        return Executor(
            self.client, self.images, self.states(), broadcasts, client_id=CLIENT, device=self.device, labels=labels
        )

    def egress(self, policy: Path | None = None) -> Egress:
        enforcer = PolicyEnforcer(policy, self.coordinator.url)
        ledger = Ledger(self.folder / "ledger", policy=enforcer.digest, rules=enforcer.ledger)
        return Egress(self.client, ledger, enforcer)

    def ledger(self) -> list[dict[str, Any]]:
        """Verify the ledger, and return the bodies of its entries."""
        verify(self.folder / "ledger")
        return [entry.body for entry in read_entries(self.folder / "ledger")]

    def kinds(self) -> list[str]:
        return [body["kind"] for body in self.ledger()]

    def write_policy(self, *lines: str) -> Path:
        path = self.folder / "policy.toml"
        head = f'schema = 1\nclient = "{CLIENT}"\ncoordinator = "{self.coordinator.url}"\n'
        path.write_text(head + "\n".join(lines) + "\n")
        return path

    def reregistering(self, policy: Path | None = None) -> tuple[Agent, Callable[[], str]]:
        """Return an agent that registers again if its policy changes, as in `run_worker`, and the function that
        registers it."""
        egress = self.egress(policy)

        def reregister() -> str:
            return egress.register(lambda news: self.client.register(INTRODUCTION.model_copy(update=news)))

        agent = Agent(self.client, self.executor(), egress, claim_seconds=0.1, reregister=reregister)
        return agent, reregister

    def restart(self, policy: Path | None = None, labels: OwnLabels | None = None, **changes: Any) -> Agent:
        backoff = Backoff(first=0.01, longest=0.05)
        egress, changes = self.egress(policy), {"claim_seconds": 0.1, "backoff": backoff, **changes}
        return Agent(self.client, self.executor(labels), egress, **changes)

    def sent(self, index: int = -1) -> Tensors:
        """Return the tensors of a submitted update, by default the last one."""
        path = self.folder / "received.safetensors"
        path.write_bytes(self.coordinator.artifacts[self.coordinator.submissions[index].update])
        return load_tensors(path)

    def train_directly(self, spec: RunSpec, num_rounds: int) -> list[Tensors]:
        """Return the updates that an uninterrupted client computes if each update becomes the next round's
        broadcast."""
        return list(_updates(spec.model_dump_json(), num_rounds, self.images))


@functools.lru_cache(maxsize=8)
def _updates(spec_json: str, num_rounds: int, images: OwnImages) -> list[Tensors]:
    spec = RunSpec.model_validate_json(spec_json)
    method = METHODS[spec.method.name]
    broadcast = start_run(method, Context(spec=spec, round_number=0)).received
    updates: list[Tensors] = []
    state: Tensors | None = None
    for number in range(1, num_rounds + 1):
        context = Context(spec=spec, round_number=number, client_id=CLIENT)
        result = run_local_round(method, broadcast, state, images.data, context)
        broadcast, state = result.update, result.state
        updates.append(broadcast)
    return updates


def good_update() -> Tensors:
    return start_run(METHODS["fedbyol"], Context(spec=make_spec(), round_number=0)).received


def write_images(path: Path, num_images: int = 32, size: int = 16) -> Path:
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (num_images, 1, size, size), dtype=np.uint8)
    save_npz(path, ImageData(pixels, np.arange(num_images, dtype=np.int64) % 10))
    return path


def own_labels(folder: Path) -> OwnLabels:
    """Return the labels of images as `write_images` writes them."""
    labels = load_own_labels(str(write_images(folder / "own.npz")), "own", None, 32)
    assert labels is not None
    return labels


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> OwnImages:
    torch.set_num_threads(1)
    return OwnImages(str(write_images(tmp_path_factory.mktemp("images") / "own.npz")), CPU)


@pytest.fixture
def coordinator() -> Iterator[FakeCoordinator]:
    with FakeCoordinator(CLIENT) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def harness(coordinator: FakeCoordinator, images: OwnImages, tmp_path: Path) -> Iterator[WorkerHarness]:
    with WorkerClient(coordinator.url, TOKEN, retry=QUICK) as client:
        yield WorkerHarness(coordinator, tmp_path, images, client)


@pytest.fixture
def many_heartbeats(harness: WorkerHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make trainings report each step, and wait after the first one for a heartbeat with its progress."""
    report = lease.Lease.report

    def is_known() -> bool:
        return any(beat.progress and beat.progress.phase == "training" for beat in harness.coordinator.heartbeats)

    def report_and_wait(self: lease.Lease, progress: Progress) -> None:
        report(self, progress)
        if progress.phase == "training":
            wait_until(is_known)

    monkeypatch.setattr(lease, "_PROGRESS_SECONDS", 0.01)
    monkeypatch.setattr(lease, "_REPORTS_PER_LEASE", 6000)
    monkeypatch.setattr(local, "PROGRESS_SECONDS", 0.0)  # with every step, however quickly it trains
    monkeypatch.setattr(lease.Lease, "report", report_and_wait)


@pytest.fixture
def item(harness: WorkerHarness) -> WorkItem:
    """Return a claimed work item of a first round."""
    harness.offer(make_spec(), 1)
    item = harness.client.claim(0)
    assert item is not None
    return item
