"""`fedssl up` with four workers and three methods whose coordinator does more than average, on Fashion-MNIST.

The methods are SSD with its dimensions, FedRLC with its centers, and FLESD with distillation for clients of two
kinds. They run one after another, all at once, and while workers and the coordinator's processes are killed. `make
demonstration` runs this in about ten minutes; docs/contributing/log.md has the last results.

Every run has the bits of its simulation, also on a GPU (`make demonstration ARGS="--device cuda"`), which the
workers and the coordinator share: there the runs are deterministic. A GPU draws other random numbers than a CPU, so
its scores are compared with those of a simulation on a CPU as if it had another seed.
"""

import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import torch

from fedssl.artifacts.tensors import load_tensors
from fedssl.cli.datasets.fetching import data_folder
from fedssl.client import Client, Retry
from fedssl.data import ImageData, load_dataset
from fedssl.protocol.methods.distillation import distillation_of
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.states import AssignmentState, JobState, Outcome, RunState
from fedssl.protocol.views import RunView
from fedssl.simulation import Result, simulate
from support.running_command import FEDSSL, RunningCommand
from support.weights import distance

pytestmark = pytest.mark.timeout(900)

DATA = "fashion-mnist"
CLIENTS = tuple(f"client-{number}" for number in range(4))
OWN_ENCODER = "client-3={ name = 'convnet', widths = [8, 16, 32] }"
DISTILLER, WORKER = "--queues distill", "fedssl_worker run"
VICTIMS = ("--queues aggregate", "--queues evaluate", "fedssl_coordinator beat")
REST_SECONDS = 25.0  # before another kill: the supervisor gives up a process that dies within 20 s
METHODS: dict[str, dict[str, Any]] = {
    "ssd": {"method": {"name": "ssd"}},
    "fedrlc": {"method": {"name": "fedrlc"}},
    "flesd": {
        "num_rounds": 2,
        "method": {
            "name": "flesd",
            "reducer": {
                "name": "distillation",
                "num_epochs": 40,
                "batch_size": 64,
                "num_anchors": 256,
                "momentum": 0.99,
                "client_encoders": "declared",
                "client_distillation": {"num_epochs": 5},
            },
        },
        "public_data": {"dataset": DATA, "split": "test", "num_images": 1000},
    },
}


def _spec(method: str, seed: int, device: str) -> RunSpec:
    return RunSpec.model_validate(
        {
            "name": f"{method} {seed}",
            "seed": seed,
            "num_rounds": 3,
            "model": {
                "encoder": {"widths": [16, 32, 64]},
                "projector": {"hidden_dims": [64], "out_dim": 64},
                "predictor": {"hidden_dims": [64], "out_dim": 64},
            },
            "data": {"channels": 1, "image_size": 28},
            "training": {
                "batch_size": 128,
                "local_epochs": 2,
                "drop_last": False,
                "deterministic": device.startswith("cuda"),
            },
            "cohort": {"clients": CLIENTS, "min_clients": 4, "min_updates": 4, "lease_seconds": 20},
            "evaluation": {"dataset": DATA, "measures": ["knn"], "every": 1, "max_train": 2000, "max_test": 1000},
            **METHODS[method],
        }
    )


SCORE_TOLERANCE = 0.062
"""Four standard errors of an accuracy of 60 % on 1,000 test images: between the scores of a GPU and of a CPU."""


class Running:
    """The federation as its operator sees it, and its files."""

    def __init__(self, folder: Path, up: RunningCommand, device: str) -> None:
        self.device = device
        introduced = up.ready_document()
        self.folder = folder
        self.up = up
        token = Path(introduced["token_file"]).read_text(encoding="ascii").strip()
        self.client = Client(introduced["url"], token, retry=Retry(seconds=30))
        self.clients = {name: _own_images(folder / ".fedssl" / "shards" / f"{name}.npz") for name in CLIENTS}
        self.kills: list[str] = []

    def fedssl(self, *arguments: str) -> None:
        """Run a `fedssl` command in the federation's folder."""
        subprocess.run([*FEDSSL, *arguments], cwd=self.folder, check=True, capture_output=True, timeout=120)

    def submit(self, method: str, seed: int) -> RunView:
        return self.client.create_run(_spec(method, seed, self.device))

    def finished(self, run_id: UUID) -> RunView:
        """Wait until the run and its evaluations have ended, and return the run."""
        deadline = time.monotonic() + 600
        while time.monotonic() < deadline:
            run = self.client.run(run_id)
            if run.state == RunState.FINISHED and all(
                evaluation.state == JobState.COMPLETED for evaluation in self.client.evaluations(run_id)
            ):
                return run
            time.sleep(0.2)
        raise AssertionError(f"not at its end: {self.client.run(run_id)}")

    def kill(self, what: str, environment: str = "") -> bool:
        """Send SIGKILL to a process with `what` in its command line and `environment` in its variables.

        Returns whether there was one.
        """
        for pid in self.up.descendants():
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                if what in command and environment.encode() in Path(f"/proc/{pid}/environ").read_bytes():
                    os.kill(pid, signal.SIGKILL)
                    self.kills.append(what)
                    return True
            except (FileNotFoundError, ProcessLookupError):
                continue
        return False

    def training(self, run_id: UUID) -> list[str]:
        """Return the clients that have a lease in the run's current round."""
        newest = self.client.run(run_id).current_round
        assignments = [] if newest is None else newest.assignments
        return [each.client_id for each in assignments if each.state == AssignmentState.LEASED]


def _own_images(path: Path) -> ImageData:
    return load_dataset(str(path), "train")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[Running]:
    """Yield a federation of four workers, one with a smaller encoder. Public and labelled images are registered."""
    folder = tmp_path_factory.mktemp("demonstration")
    device: str = pytestconfig.getoption("--device")
    options = ["--data", DATA, "--clients", "4", "--alpha", "0.5", "--max-images", "4000", "--device", device]
    up = RunningCommand(folder, "up", "--port", "0", *options, "--encoder", OWN_ENCODER, "--format", "json")
    try:
        running = Running(folder, up, device)
        # They are registered under the name by which a simulation finds the same images.
        running.fedssl("public-dataset", "add", DATA, DATA, "--split", "test")
        running.fedssl("evaluation-dataset", "add", DATA, DATA)
        yield running
        assert up.interrupt() == 0
    finally:
        up.process.kill()
        up.process.wait()


Simulated = dict[tuple[str, int, str], Result]


@pytest.fixture(scope="module")
def simulated() -> Simulated:
    """Return the results of the simulations so far, by method, seed and device."""
    return {}


def _problems(running: Running, run: RunView, simulated: Simulated) -> list[str]:
    """Return how a run differs from its simulation, and which scores are too far from those of a simulation on a
    CPU."""
    results = []
    for device in dict.fromkeys((running.device, "cpu")):  # meanwhile the federation trains
        key = (run.spec.method.name, run.spec.seed, device)
        if key not in simulated:
            jobs = 1 if device == running.device else len(CLIENTS)
            simulated[key] = simulate(run.spec, running.clients, data_root=data_folder(), device=device, jobs=jobs)
        results.append(simulated[key])
    result, on_cpu = results[0], results[-1]
    done = running.finished(run.id)
    assert done.outcome == Outcome.COMPLETED, done.reason
    path = running.folder / "model.safetensors"
    running.client.download_model(run.id, path)
    deployed = load_tensors(path)
    assert deployed.keys() == result.model.keys()
    others = [name for name in result.model if not torch.equal(deployed[name], result.model[name])]
    measured = {row.round_number: row.results for row in running.client.evaluations(run.id)}
    assert done.finished_at is not None
    how = f"{distance(deployed, result.model, result.initial):.2g} of the way apart" if others else "equal bits"
    seconds = (done.finished_at - done.created_at).total_seconds()
    on_a_cpu = "" if on_cpu is result else f", on a CPU {_percent(on_cpu.evaluations_by_round)}"
    _tell(f"{run.spec.name}: {how}, kNN {_percent(measured)}{on_a_cpu}, {seconds:.0f} s")
    problems = [f"{run.spec.name}: {name} has other bits" for name in others]
    if measured != result.evaluations_by_round:
        problems.append(f"{run.spec.name}: scored {measured}, simulated {result.evaluations_by_round}")
    for number, scores in on_cpu.evaluations_by_round.items():
        if abs(measured[number]["knn"] - scores["knn"]) > SCORE_TOLERANCE:
            problems.append(f"{run.spec.name}: {measured[number]['knn']} in round {number}, on a CPU {scores['knn']}")
    return problems


def _percent(scores: Mapping[int, Mapping[str, float]]) -> str:
    return ", ".join(f"{100 * scores[number]['knn']:.1f}" for number in sorted(scores))


def _tell(line: str) -> None:
    print(line, flush=True)  # noqa: T201


def test_runs_one_after_another_equal_their_simulations(running: Running, simulated: Simulated) -> None:
    assert [each for method in METHODS for each in _problems(running, running.submit(method, 0), simulated)] == []
    flesd = distillation_of(
        next(run for run in map(running.client.run, _ids(running)) if "flesd" in run.name).spec.method
    )
    assert flesd is not None
    assert list(flesd.client_encoders) == ["client-3"]


def _ids(running: Running) -> list[UUID]:
    return [run.id for run in running.client.runs()]


def test_runs_all_at_once_equal_their_simulations(running: Running, simulated: Simulated) -> None:
    runs = [running.submit(method, 1) for method in METHODS]
    assert [each for run in runs for each in _problems(running, run, simulated)] == []


def test_runs_whose_processes_are_killed_equal_their_simulations(running: Running, simulated: Simulated) -> None:
    """Every two to four seconds one of the coordinator's processes is killed. A training worker is killed too, and
    the distiller in the middle of a distillation.

    The supervisor restarts killed processes, but would give up one that dies again soon after its start.
    """
    draw = random.Random(5)
    runs = [running.submit(method, 1) for method in METHODS]
    killed_at = dict.fromkeys((*VICTIMS, DISTILLER, WORKER), 0.0)
    next_kill = time.monotonic() + draw.uniform(2, 4)
    while any(running.client.run(run.id).state != RunState.FINISHED for run in runs):
        time.sleep(0.2)
        rested = [victim for victim, when in killed_at.items() if time.monotonic() - when > REST_SECONDS]
        victim, whose = "", ""
        jobs = [job for run in runs for job in running.client.distillation_jobs(run.id)]
        training = [client for run in runs for client in running.training(run.id)]
        if DISTILLER in rested and any(job.state == JobState.RUNNING and job.epoch > 5 for job in jobs):
            victim = DISTILLER
        elif WORKER in rested and training:
            victim, whose = WORKER, draw.choice(training)
        elif time.monotonic() > next_kill:
            victim = draw.choice([each for each in rested if each in VICTIMS] or [""])
            next_kill = time.monotonic() + draw.uniform(2, 4)
        if victim and running.kill(victim, f"/{whose}.npz" if whose else ""):
            killed_at[victim] = time.monotonic()
    _tell(f"killed: {dict(Counter(running.kills))}")
    assert {DISTILLER, WORKER} <= set(running.kills)
    assert [each for run in runs for each in _problems(running, run, simulated)] == []
