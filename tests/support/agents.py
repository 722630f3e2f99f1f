"""Real workers in this process, advanced round by round."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import UUID

import pytest
import torch

from fedssl.artifacts.tensors import load_tensors
from fedssl.backoff import Backoff
from fedssl.data import save_npz
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.states import Outcome
from fedssl.protocol.views import EventView
from fedssl.simulation import Result
from fedssl_worker import agent
from fedssl_worker.agent import Agent
from fedssl_worker.data import OwnImages
from fedssl_worker.disclosure.egress import Egress
from fedssl_worker.disclosure.ledger import Ledger
from fedssl_worker.executor import Executor
from fedssl_worker.state import ClientStates
from support.coordinator import Coordinator
from support.methods import shards

CPU = torch.device("cpu")
LOST = "client-1"


@contextmanager
def short_pauses() -> Iterator[None]:
    """Let workers of this process that find no work pause for a moment only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agent, "_IDLE_SECONDS", 0.1)
        yield


class Workers:
    """One worker per client, in this process, advanced round by round."""

    def __init__(self, coordinator: Coordinator, folder: Path, spec: RunSpec) -> None:
        self.coordinator = coordinator
        self.spec = spec
        self.folder = folder
        self._clients = {name: coordinator.worker(name) for name in shards(spec)}
        self.agents = {name: self._agent(name) for name in self._clients}
        self.id: UUID = coordinator.client.create_run(spec).id
        coordinator.advance(self.id)

    def _agent(self, name: str) -> Agent:
        folder = self.folder / name
        (folder / "broadcasts").mkdir(parents=True, exist_ok=True)
        save_npz(folder / "own.npz", shards(self.spec)[name])
        client = self._clients[name]
        states = ClientStates(folder / "runs")
        images = OwnImages(str(folder / "own.npz"), CPU)
        executor = Executor(client, images, states, folder / "broadcasts", client_id=name, device=CPU)
        egress = Egress(client, Ledger(folder / "ledger"))
        return Agent(client, executor, egress, claim_seconds=0, backoff=Backoff(first=0.01, longest=0.02))

    def restart(self, name: str) -> None:
        """Replace a worker with a new one on the same folder, as after a restart."""
        self.agents[name] = self._agent(name)

    def train(self, *names: str) -> None:
        with short_pauses():
            for name in names or tuple(self.agents):
                self.agents[name].step()
        self.coordinator.advance(self.id)

    def damage_state(self, name: str = LOST, *, how: str = "flipped") -> None:
        """Damage the client's newest state on disk, or delete it if `how` is not "flipped"."""
        newest = sorted((self.folder / name / "runs" / str(self.id)).iterdir())[-1] / "state.safetensors"
        content = newest.read_bytes()
        if how == "flipped":
            newest.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        else:
            newest.unlink()

    def state(self, name: str) -> dict[str, torch.Tensor]:
        """Return the client's newest state on disk."""
        newest = sorted((self.folder / name / "runs" / str(self.id)).iterdir())[-1]
        return load_tensors(newest / "state.safetensors")

    def events(self, kind: str) -> list[EventView]:
        return list(self.coordinator.client.event_log(self.id, kind))

    def assert_simulated(self, result: Result) -> None:
        run = self.coordinator.client.run(self.id)
        assert run.outcome == Outcome.COMPLETED, run.reason
        assert run.model is not None
        deployed = self.coordinator.tensors(run.model)
        assert [name for name, value in result.model.items() if not torch.equal(deployed[name], value)] == []
