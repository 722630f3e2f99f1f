"""A FLESD run whose clients train in this process, controlled by the test up to its distillation."""

from pathlib import Path
from typing import Any

from fedssl.client import WorkerClient
from fedssl.engine import LocalResult, run_local_round
from fedssl.methods import METHODS
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.views import DistillationJobView, EventView, RoundView, RunView
from fedssl.protocol.work import WorkItem
from support.coordinator import Coordinator
from support.federation import deliver_tensors
from support.methods import PUBLIC, context, method_spec, shards
from support.rounds import client_data
from support.tables import Tables


def distillation_spec(num_epochs: int = 6, **changes: Any) -> RunSpec:
    """Return a spec of FLESD on the digits, whose distillation has `num_epochs` epochs of three steps.

    `changes` replace whole sections.
    """
    spec = method_spec("flesd", public_data=PUBLIC).model_dump(mode="json")
    spec["method"]["reducer"]["num_epochs"] = num_epochs
    return RunSpec.model_validate({**spec, "num_rounds": 1, **changes})


_trained: dict[tuple[str, int, str, str], LocalResult] = {}
"""The results of clients that trained, by spec, round, client and broadcast: most scenarios train the same."""


class DistillationScenario:
    """Real updates of real workers, and a run of theirs. Only `coordinator.distil` distils."""

    def __init__(
        self, coordinator: Coordinator, tables: Tables, folder: Path, spec: RunSpec | None = None, *, train: bool = True
    ) -> None:
        self.coordinator = coordinator
        self.tables = tables
        self.spec = spec or distillation_spec()
        self._folder = folder
        self.workers: dict[str, WorkerClient] = {name: coordinator.worker(name) for name in shards(self.spec)}
        self.id = coordinator.client.create_run(self.spec).id
        coordinator.advance(self.id)
        if train:
            self.train()

    def train(self) -> None:
        """Train and submit the open round for every client, then run the aggregator's task."""
        for name, worker in self.workers.items():
            item = worker.claim(0)
            assert item is not None, f"nothing to do for {name}"
            self._submit(name, worker, item)
        self.coordinator.advance(self.id)

    def _submit(self, name: str, worker: WorkerClient, item: WorkItem) -> None:
        key = (self.spec.model_dump_json(), item.round_number, name, item.broadcast)
        if (result := _trained.get(key)) is None:
            broadcast = self.coordinator.tensors(item.broadcast)
            ctx = context(self.spec, item.round_number, name)
            method = METHODS[self.spec.method.name]
            result = _trained[key] = run_local_round(method, broadcast, None, client_data(self.spec, name), ctx)
        deliver_tensors(worker, item, result.update, self._folder, result.num_examples, result.metrics)

    def distil(self) -> None:
        """Do in this process what the worker of the queue `distill` does with the run's unfinished job."""
        self.coordinator.distil(self.id)

    @property
    def run(self) -> RunView:
        return self.coordinator.client.run(self.id)

    @property
    def round(self) -> RoundView:
        """The newest round."""
        return list(self.coordinator.client.rounds(self.id))[-1]

    @property
    def jobs(self) -> list[DistillationJobView]:
        return list(self.coordinator.client.distillation_jobs(self.id))

    @property
    def job(self) -> DistillationJobView:
        """The newest job."""
        return self.jobs[-1]

    def kinds(self, prefix: str = "") -> list[str]:
        """Return the kinds of the run's events so far that begin with `prefix`."""
        return [event.kind for event in self.coordinator.client.event_log(self.id) if event.kind.startswith(prefix)]

    def events(self, kind: str) -> list[EventView]:
        return [event for event in self.coordinator.client.event_log(self.id) if event.kind == kind]

    def end_pause(self) -> None:
        """End the pause after a failed attempt."""
        self.tables.execute("UPDATE distillation_jobs SET retry_at = now() - interval '1 second'")

    def checkpoints(self) -> list[str]:
        """Return the artifacts that no run, round or assignment refers to: they belong to a distillation."""
        rows = self.tables.query(
            "SELECT digest FROM artifacts WHERE digest NOT IN (SELECT unnest(ARRAY[initial_broadcast, server_state, "
            "broadcast]) FROM runs WHERE broadcast IS NOT NULL) AND digest NOT IN (SELECT update_digest FROM "
            "assignments WHERE update_digest IS NOT NULL) AND digest NOT IN (SELECT broadcast FROM rounds)"
        )
        return [digest for (digest,) in rows]

    def files(self) -> set[str]:
        """Return the digests of all files in the store."""
        return {path.name for path in self.coordinator.store.rglob("*") if path.is_file() and len(path.name) == 64}

    def orphaned_files(self) -> set[str]:
        """Return the digests of the files that no row refers to."""
        return self.files() - {digest for (digest,) in self.tables.query("SELECT digest FROM artifacts")}
