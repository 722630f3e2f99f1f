"""How the worker's options choose devices, and rounds on several of them."""

import os
import signal
from typing import Any

import pytest
import torch

from fedssl.protocol.states import Cause
from fedssl_worker import lease as lease_module
from fedssl_worker.agent import Agent
from fedssl_worker.devices import choose_devices, describe_devices, describe_environment, image_device
from fedssl_worker.executor import Executor
from fedssl_worker.settings import SettingsError, read_settings
from support.forked_clients import forked_processes

from .conftest import CLIENT, CPU, WorkerHarness, make_spec


@pytest.mark.parametrize(
    ("wanted", "num_gpus", "present", "words"),
    [
        ("cuda:99", 1, 0, "this machine has no device cuda:99: use --device auto"),
        ("cpu", 4, 8, "--gpus 4 needs GPUs, and --device cpu is not one: leave --gpus out"),
        ("auto", 4, 0, "--gpus 4 needs GPUs, and this machine has no GPU: leave --gpus out"),
        ("cuda", 4, 1, "--gpus 4: this machine shows 1 to the worker, so use at most --gpus 1"),
        ("cuda:1", 2, 4, "--gpus 2 and --device cuda:1 contradict each other: use --device cuda, and name the GPUs in"),
    ],
)
def test_missing_devices_are_refused(
    wanted: str, num_gpus: int, present: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: present > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: present)
    with pytest.raises(SettingsError, match=words):
        choose_devices(wanted, num_gpus, 1)


def test_several_gpus_are_the_first_ones_and_images_stay_in_main_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100")
    devices = choose_devices("auto", 3, 1)
    assert list(map(str, devices)) == ["cuda:0", "cuda:1", "cuda:2"]
    assert describe_devices(devices) == "3 x NVIDIA H100"
    assert describe_environment(devices) != describe_environment(devices[:2])
    assert image_device(devices) == CPU
    assert image_device(devices[:1]) == devices[0]


def test_less_than_one_gpu_is_refused(tmp_path: Any) -> None:
    with pytest.raises(SettingsError, match=r"--gpus: .* greater than or equal to 1"):
        read_settings({"coordinator": "http://a", "data": "digits", "state": tmp_path, "gpus": 0})


def _agent(harness: WorkerHarness) -> Agent:
    executor = Executor(
        harness.client,
        harness.images,
        harness.states(),
        harness.folder / "broadcasts",
        client_id=CLIENT,
        device=CPU,
        devices=(CPU, CPU),
    )
    return Agent(harness.client, executor, harness.egress(), claim_seconds=0.1)


def test_a_killed_process_declines_the_work_and_the_worker_continues(
    harness: WorkerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = _agent(harness)
    long = make_spec(training={"batch_size": 2, "local_epochs": 400})
    original = lease_module.Lease.report

    def kill_one(lease: lease_module.Lease, progress: Any) -> None:
        original(lease, progress)
        if progress.phase == "training":
            os.kill(processes[1].pid, signal.SIGKILL)

    with forked_processes() as processes:
        harness.offer(long, 1)
        with monkeypatch.context() as patch:
            patch.setattr(lease_module.Lease, "report", kill_one)
            agent.step()
        (decline,) = harness.coordinator.declined
        assert decline.cause is Cause.CLIENT_MACHINE
        assert "a process that trains clients was ended by SIGKILL" in decline.reason
        assert "fewer --gpus" in decline.reason
        assert harness.coordinator.submissions == []

        spec = make_spec()
        harness.offer(spec, 1)
        agent.step()
        assert [process.poll() for process in processes] == [-signal.SIGKILL] * 4

    assert len(harness.coordinator.submissions) == 1
    (alone,) = harness.train_directly(spec, 1)
    together = harness.sent()
    for name, tensor in alone.items():
        torch.testing.assert_close(together[name], tensor, rtol=1e-2, atol=1e-3)
