"""Runs that real processes train, and comparisons with their simulations."""

from collections.abc import Iterable
from pathlib import Path
from uuid import UUID

import torch

from fedssl.artifacts.header import file_bytes
from fedssl.artifacts.tensors import Tensors, load_tensors
from fedssl.methods import METHODS
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.states import Outcome, RunState
from fedssl.protocol.views import RunView
from support.processes import Federation


def train_to_end(running: Federation, spec: RunSpec, clients: Iterable[str], seconds: float) -> RunView:
    """Train a run to its end with each client's worker, and return it."""
    for name in clients:
        running.start(name)
    return wait_until_completed(running, running.client.create_run(spec).id, seconds)


def wait_until_ended(running: Federation, run_id: UUID, seconds: float) -> RunView:
    """Return a run once it has ended."""

    def look() -> RunView | None:
        run = running.client.run(run_id)
        return run if run.state is RunState.FINISHED else None

    return running.wait_for(look, "the run's end", seconds)


def wait_until_completed(running: Federation, run_id: UUID, seconds: float = 150) -> RunView:
    """Return a run once it is completed."""
    done = wait_until_ended(running, run_id, seconds)
    assert done.outcome is Outcome.COMPLETED, done.reason
    return done


def assert_simulated(running: Federation, run_id: UUID, simulated: Tensors) -> None:
    """Assert that the newest weights of a run are exactly those of the simulation."""
    path = running.folder / "model.safetensors"
    running.client.download_model(run_id, path)
    assert_same_bits(path, simulated)


def download_updates(running: Federation, run: RunView, folder: Path) -> list[Path]:
    """Download the updates of all clients and rounds, and return the files' paths."""
    digests = [a.update for view in running.client.rounds(run.id) for a in view.assignments if a.update]
    paths = [folder / f"update-{number}" for number in range(len(digests))]
    for digest, path in zip(digests, paths, strict=True):
        running.client.download_artifact(digest, path)
    return paths


def assert_same_bits(weights: Path, simulated: Tensors) -> None:
    """Assert that the weights in a file are exactly those of the simulation."""
    deployed = load_tensors(weights)
    assert deployed.keys() == simulated.keys()
    assert [name for name in deployed if not torch.equal(deployed[name], simulated[name])] == []


def assert_planned_size(updates: list[Path], spec: RunSpec) -> None:
    """Assert that each update has exactly as many bytes as the plan declares."""
    plan = METHODS[spec.method.name].bind(spec).plan
    assert {path.stat().st_size for path in updates} == {file_bytes(plan.update)}
