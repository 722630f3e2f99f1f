"""A worker on a GPU: out of memory, a failing GPU, and two workers on one GPU."""

import dataclasses
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
import torch

from fedssl.client import WorkerClient
from fedssl.engine import cuda_graphs, release_trainer
from fedssl.protocol.states import Cause
from fedssl_worker.data import OwnImages
from support.tensors import are_equal
from support.waiting import wait_until
from unit.worker.conftest import (  # noqa: F401 - fixtures
    CLIENT,
    QUICK,
    WorkerHarness,
    coordinator,
    harness,
    images,
    make_spec,
    write_images,
)
from unit.worker.coordinator import TOKEN, FakeCoordinator

DEVICE = "cuda"
LARGE = {"model": {"encoder": {"name": "resnet50"}}, "training": {"batch_size": 32}}
"""Its weights, their first values, gradients and momentum take 4 x 100 MB without any activation."""


@pytest.fixture
def on_gpu(harness: WorkerHarness, tmp_path: Path) -> WorkerHarness:  # noqa: F811
    """Return a worker whose images are on the GPU."""
    own = OwnImages(str(write_images(tmp_path / "gpu.npz")), torch.device(DEVICE))
    return dataclasses.replace(harness, images=own, device=torch.device(DEVICE))


def _limit(num_bytes: float) -> None:
    """Limit this process's share of the GPU's memory."""
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction(min(1.0, num_bytes / total))


@pytest.fixture
def without_limit() -> Iterator[None]:
    """Free all memory before the test, and remove the limit after it."""
    release_trainer()
    torch.cuda.empty_cache()
    yield
    _limit(float("inf"))


@pytest.mark.usefixtures("without_limit")
def test_work_that_runs_out_of_memory_is_declined_and_the_next_round_succeeds(on_gpu: WorkerHarness) -> None:
    agent, before = on_gpu.restart(), torch.cuda.memory_reserved()
    _limit(before + 300e6)
    on_gpu.offer(make_spec(**LARGE), 1)
    agent.step()
    [declined] = on_gpu.coordinator.declined
    assert declined.reason.startswith("out of memory on cuda with batch size 32: lower training.batch_size")
    assert declined.cause == Cause.CLIENT_MACHINE
    # What the failed round used is free. The work space of cuBLAS, 32 MB per stream, stays.
    assert torch.cuda.memory_reserved() - before < 100e6
    on_gpu.offer(make_spec(), 1)
    agent.step()
    assert len(on_gpu.coordinator.submissions) == 1
    assert len(on_gpu.coordinator.declined) == 1


@pytest.mark.usefixtures("without_limit")
def test_work_that_runs_out_of_memory_while_recording_is_declined(
    on_gpu: WorkerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = make_spec(training={"batch_size": 4, "gpu_steps": "recorded"})
    agent, original = on_gpu.restart(), cuda_graphs._Capture

    class Full(original):  # type: ignore[misc, valid-type]
        def __init__(self, *args: object) -> None:
            _limit(1e5)
            super().__init__(*args)

    on_gpu.offer(spec, 1)
    with monkeypatch.context() as patch:
        patch.setattr(cuda_graphs, "_Capture", Full)
        agent.step()
    assert on_gpu.coordinator.declined[0].reason.startswith("out of memory on cuda with batch size 4")
    _limit(float("inf"))
    on_gpu.offer(spec, 1)
    agent.step()
    assert len(on_gpu.coordinator.submissions) == 1
    release_trainer()
    torch.cuda.empty_cache()  # fails permanently after a capture that was not ended in the allocator
    torch.cuda.synchronize()


_LOSES_ITS_GPU = """
import sys, torch
from fedssl.methods.composition.client import ClientAlgorithm
original = ClientAlgorithm.begin_epoch

def broken(self, modules, data, epoch, ctx):
    assert ctx.device.type == "cuda"
    torch.zeros(1, device="cuda")[torch.tensor([7], device="cuda")]  # the GPU itself finds that
    original(self, modules, data, epoch, ctx)

ClientAlgorithm.begin_epoch = broken
from fedssl_worker.main import app
app(sys.argv[1:], prog_name="fedssl-worker")
"""


def _worker(harness: WorkerHarness, folder: Path, code: str | None = None) -> subprocess.Popen[str]:  # noqa: F811
    folder.mkdir()
    write_images(folder / "own.npz")
    (folder / "token").write_text(TOKEN + "\n")
    (folder / "token").chmod(0o600)
    options = {
        "coordinator": harness.coordinator.url,
        "data": folder / "own.npz",
        "state": folder / "state",
        "token-file": folder / "token",
        "device": DEVICE,
    }
    program = ["-m", "fedssl_worker"] if code is None else ["-c", code]
    arguments = [f"--{name}={value}" for name, value in options.items()]
    return subprocess.Popen(
        [sys.executable, *program, "run", *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def test_a_worker_whose_gpu_fails_declines_the_work_and_ends(harness: WorkerHarness) -> None:  # noqa: F811
    harness.offer(make_spec(), 1)
    process = _worker(harness, harness.folder / "worker", _LOSES_ITS_GPU)
    try:
        output, _ = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode == 1, output
    [declined] = harness.coordinator.declined
    assert declined.reason == "the worker lost its GPU, and ends (AcceleratorError): see its log"
    assert '"event": "device.lost"' in output
    assert "device-side assert triggered" in output
    assert "start the worker again" in output


def test_a_worker_without_its_gpu_ends_at_once(
    harness: WorkerHarness,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    process = _worker(harness, harness.folder / "worker")
    try:
        output, _ = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode == 2
    assert f"this machine has no device {DEVICE}: use --device auto, or check the driver" in output
    assert harness.coordinator.calls == []


def test_two_workers_on_one_gpu_train_the_same_bits_as_one_after_another(harness: WorkerHarness) -> None:  # noqa: F811
    spec = make_spec(training={"batch_size": 8, "local_epochs": 60, "gpu_steps": "recorded", "deterministic": True})
    with FakeCoordinator(CLIENT) as second, WorkerClient(second.url, TOKEN, retry=QUICK) as client:
        threading.Thread(target=second.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        other = dataclasses.replace(harness, coordinator=second, client=client)
        both = (harness, other)
        processes = [_worker(each, harness.folder / name) for each, name in zip(both, "ab", strict=True)]
        try:
            wait_until(lambda: all(each.coordinator.introductions for each in both), 100)
            for each in both:
                each.offer(spec, 1, run_id=uuid4())
            wait_until(lambda: all(len(each.coordinator.submissions) == 1 for each in both), 60)
            for each in both:  # one after the other
                each.offer(spec, 1, run_id=uuid4())
                wait_until(lambda each=each: len(each.coordinator.submissions) == 2, 60)  # type: ignore[misc]
        finally:
            for process in processes:
                process.kill()
                process.wait()
            second.shutdown()
        together, alone = ([each.sent(number) for each in both] for number in (0, 1))
    for found in (together[1], *alone):
        assert are_equal(found, together[0])
