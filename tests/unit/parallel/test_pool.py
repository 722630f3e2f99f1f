"""Clients that several processes train: the bits are those of one process, and no process is left behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest
import torch

from fedssl.artifacts.tensors import serialised
from fedssl.engine import LocalProgress
from fedssl.errors import Cancelled, LocalError, MethodError
from fedssl.experiments.checkpoints import FolderCheckpoint
from fedssl.simulation import Result, simulate
from support.combinations import ALL_COMBINATIONS, combined_spec
from support.forked_clients import forked_processes, processes_of
from support.methods import method_spec, methods_of_this_run, shards

pytestmark = pytest.mark.full


SPEC = method_spec("scaffold", num_rounds=3)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for_the_end(pids: Collection[int]) -> None:
    deadline = time.monotonic() + 60
    while left := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < deadline, f"{left} did not end"
        time.sleep(0.05)


def outcome(result: Result) -> tuple[object, ...]:
    """Return everything that must be equal: the bits of weights and states and the metrics, but not the times."""
    states = {name: serialised(state) for name, state in result.client_states.items()}
    rounds = [
        (list(record.clients.items()), list(record.num_examples.items()), record.num_images, record.server)
        for record in result.history
    ]
    return serialised(result.model), serialised(result.server_state), states, rounds


@pytest.fixture
def forks() -> Iterator[None]:
    with forked_processes():
        yield


@pytest.mark.parametrize("name", methods_of_this_run(ALL_COMBINATIONS))
def test_two_processes_give_the_bits_of_one(name: str, forks: None) -> None:
    spec = combined_spec(name)

    assert outcome(simulate(spec, shards(spec), jobs=2)) == outcome(simulate(spec, shards(spec)))


def test_more_processes_than_clients_report_all_progress_and_end() -> None:
    told: dict[tuple[int, str], LocalProgress] = {}
    before = processes_of()

    result = simulate(
        SPEC, shards(SPEC), jobs=5, on_progress=lambda number, client, p: told.update({(number, client): p})
    )

    assert told.keys() == {(number, client) for number in (1, 2, 3) for client in shards(SPEC)}
    assert all(progress.step == progress.num_steps for progress in told.values())
    assert outcome(result) == outcome(simulate(SPEC, shards(SPEC)))
    assert processes_of() == before


def test_worker_processes_use_as_many_cpu_threads_as_this_one() -> None:
    """With a different number of threads, sums are computed in a different order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert outcome(simulate(SPEC, shards(SPEC), jobs=2)) == outcome(simulate(SPEC, shards(SPEC)))
    finally:
        torch.set_num_threads(threads)


def test_an_error_of_a_client_is_reported_as_by_a_single_process() -> None:
    diverging = {"batch_size": 32, "local_epochs": 5, "optimizer": {"learning_rate": 100, "weight_decay": 1}}
    spec = method_spec("fedsimclr", training=diverging)
    before, descriptors = processes_of(), len(os.listdir("/proc/self/fd"))
    with pytest.raises(MethodError, match="is not a finite number") as alone:
        simulate(spec, shards(spec))

    with pytest.raises(MethodError) as among_several:
        simulate(spec, shards(spec), jobs=2)

    assert str(among_several.value) == str(alone.value)
    assert "Traceback" in among_several.value.__notes__[0]
    assert processes_of() == before
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_cancelling_in_the_middle_of_a_round_ends_all_processes() -> None:
    before = processes_of()

    def stop(number: int, client: str, progress: LocalProgress) -> None:
        raise Cancelled("enough")

    with pytest.raises(Cancelled, match="enough"):
        simulate(SPEC, shards(SPEC), jobs=2, on_progress=stop)

    assert processes_of() == before


def test_a_killed_process_ends_the_simulation_which_resumes_with_any_number_of_processes(tmp_path: Path) -> None:
    before = processes_of()

    def kill_one(number: int, client: str, progress: LocalProgress) -> None:
        if number == 2:
            os.kill(min(processes_of() - before), signal.SIGKILL)

    with pytest.raises(LocalError, match=r"was ended by SIGKILL, which is .* memory runs out .*with fewer --jobs"):
        simulate(SPEC, shards(SPEC), jobs=2, checkpoint=FolderCheckpoint(tmp_path), on_progress=kill_one)
    resumed_after = []
    result = simulate(
        SPEC,
        shards(SPEC),
        jobs=3,
        checkpoint=FolderCheckpoint(tmp_path),
        on_round=lambda record: resumed_after.append(record.round_number),
    )

    assert resumed_after == [2, 3]
    assert outcome(result) == outcome(simulate(SPEC, shards(SPEC)))
    assert processes_of() == before


COMMAND = """
[training]
batch_size = 64
local_epochs = 500
[watch]
num_images = 0
[data]
channels = 1
image_size = 16
[partition]
dataset = "digits"
num_clients = 2
"""


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_the_command(signum: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "long.toml").write_text(COMMAND)
    arguments = ["-m", "fedssl.cli.main", "simulate", "long.toml", "--out", "out", "--jobs", "2"]
    with subprocess.Popen([sys.executable, *arguments], cwd=tmp_path, stderr=subprocess.PIPE, text=True) as command:
        deadline = time.monotonic() + 120
        while len(processes := processes_of(command.pid)) < 2:
            assert command.poll() is None, "it ended before it started its processes"
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(1)
        command.send_signal(signum)
        _, stderr = command.communicate()

    wait_for_the_end(processes)
    assert "Traceback" not in stderr
    if signum == signal.SIGINT:
        assert command.returncode == 130
        assert "interrupted: run the same command again" in stderr
