"""Real workers of secure rounds in threads of this process, each of which can be killed after each of its steps."""

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, get_args
from uuid import UUID

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedssl.backoff import Backoff
from fedssl.client import WorkerClient
from fedssl.data import save_npz
from fedssl.protocol.plan import Kind
from fedssl.protocol.policy import AllowRule, PolicyNotice
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.states import RunState
from fedssl_worker import secure_rounds
from fedssl_worker.agent import Agent
from fedssl_worker.data import OwnImages
from fedssl_worker.disclosure.egress import Egress
from fedssl_worker.disclosure.ledger import Ledger
from fedssl_worker.executor import Executor
from fedssl_worker.secure_rounds import SecureRounds
from fedssl_worker.state import ClientStates
from support.agents import CPU, short_pauses
from support.coordinator import Coordinator
from support.methods import shards

SECURE_ONLY = PolicyNotice(
    digest="0" * 64,
    allow=tuple(AllowRule(artifact=kind, methods=("*",), secure="required") for kind in get_args(Kind)),
)
"""Nothing leaves except in secure rounds, so no number of images is registered."""


class Killed(BaseException):
    """The worker was killed at this point."""


class SecureWorkers:
    """One worker per client of `spec`, whose run is created. `urls`: of proxies, by client."""

    def __init__(
        self,
        coordinator: Coordinator,
        folder: Path,
        spec: RunSpec,
        urls: Mapping[str, str] | None = None,
    ) -> None:
        self.coordinator, self.spec, self.folder = coordinator, spec, folder
        self.identities = {name: Ed25519PrivateKey.generate() for name in shards(spec)}
        self.clients: dict[str, WorkerClient] = {}
        self._urls = urls or {}
        for name, images in shards(spec).items():
            save_npz(folder / f"{name}.npz", images)
        self.register(SECURE_ONLY)
        self.id: UUID = coordinator.client.create_run(spec).id

    def register(self, policy: PolicyNotice) -> None:
        """Register all workers with this policy."""
        for name, key in self.identities.items():
            public, url = key.public_key().public_bytes_raw().hex(), self._urls.get(name, "")
            self.clients[name] = self.coordinator.worker(name, identity=public, policy=policy, url=url)

    def agent(self, name: str) -> Agent:
        """Return a worker that starts with the files that an earlier one has left."""
        folder, client = self.folder / name, self.clients[name]
        (folder / "broadcasts").mkdir(parents=True, exist_ok=True)
        states = ClientStates(folder / "runs")
        images = OwnImages(str(self.folder / f"{name}.npz"), CPU)
        executor = Executor(client, images, states, folder / "broadcasts", client_id=name, device=CPU)
        egress = Egress(client, Ledger(folder / "ledger"))
        secure = SecureRounds(client, egress, states, folder / "secure", self.identities[name])
        backoff = Backoff(first=0.01, longest=0.02)
        return Agent(client, executor, egress, claim_seconds=0, backoff=backoff, begin_secure=secure.begin)

    def train(
        self,
        *,
        gone: str = "",
        on_gone: Callable[[], object] = lambda: None,
        before_advance: Callable[[], object] = lambda: None,
        seconds: float = 60,
    ) -> None:
        """Work until the run has finished.

        A killed worker starts again, except `gone`: then `on_gone` is called. `before_advance` is called before each
        step of the aggregator.
        """
        done, end = threading.Event(), time.monotonic() + seconds

        def work(name: str) -> None:
            self._work(name, done, is_gone=name == gone)
            if name == gone:
                on_gone()

        with short_pauses(), ThreadPoolExecutor(len(self.clients)) as pool:
            working = [pool.submit(work, name) for name in self.clients]
            try:
                while not self._has_finished():
                    assert time.monotonic() < end, "the run did not end"
                    before_advance()
                    self.coordinator.advance(self.id)
                    time.sleep(0.05)
            finally:
                done.set()
        for each in working:
            each.result()

    def _work(self, name: str, done: threading.Event, *, is_gone: bool) -> None:
        agent = self.agent(name)
        while not done.is_set():
            try:
                agent.step()
            except Killed:
                if is_gone:
                    return
                agent = self.agent(name)

    def _has_finished(self) -> bool:
        """Read only the state: a view of the run, many times a second, would take most of the time."""
        from fedssl_coordinator.core.db import transaction
        from fedssl_coordinator.federation import run_rows

        with transaction() as session:
            return run_rows.get_one(session, self.id).state == RunState.FINISHED

    def events(self, kind: str) -> list[Any]:
        return list(self.coordinator.client.event_log(self.id, kind))


def kill_after(
    monkeypatch: pytest.MonkeyPatch, workers: SecureWorkers, victim: str, points: Mapping[int, tuple[str, int]]
) -> None:
    """Kill a worker once in each round of `points`: after its n-th write of its file, or after its n-th message."""
    counts: dict[tuple[int, str], int] = {}
    write, send = secure_rounds.write_private, Egress.send_secure

    def reached(kind: str) -> None:
        number = workers.coordinator.client.run(workers.id).rounds_closed + 1
        at = counts[number, kind] = counts.get((number, kind), 0) + 1
        if points.get(number) == (kind, at):
            raise Killed

    def counted_write(path: Path, text: str) -> None:
        write(path, text)
        if victim in path.parts:
            reached("write")

    def counted_send(self: Egress, item: Any, *arguments: Any) -> None:
        send(self, item, *arguments)
        if item.client_id == victim:
            reached("send")

    monkeypatch.setattr(secure_rounds, "write_private", counted_write)
    monkeypatch.setattr(Egress, "send_secure", counted_send)
