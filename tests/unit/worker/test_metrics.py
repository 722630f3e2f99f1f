"""The worker's metrics: the time per training step and the GPU memory."""

import pytest
import torch

from fedssl.engine.gpu_memory import gpu_bytes
from fedssl.protocol.work import Progress
from fedssl_worker.metrics import REGISTRY, StepTimer


def progress(step: int, phase: str = "training") -> Progress:
    return Progress.model_validate({"phase": phase, "epoch": 1, "num_epochs": 1, "step": step, "num_steps": 10})


def test_steps_are_timed_between_two_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    def seen(what: str) -> float:
        return REGISTRY.get_sample_value(f"fedssl_worker_step_seconds_{what}") or 0.0

    times = iter([10.0, 12.0, 12.5, 13.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(times))
    count, total = seen("count"), seen("sum")
    step_timer = StepTimer()
    for step in (0, 4, 4, 5):  # 2 s for four steps, then a report without a step, then 0.5 s for one step
        step_timer.observe(progress(step))
    step_timer.observe(progress(0, "uploading"))
    assert seen("count") - count == 2
    assert seen("sum") - total == pytest.approx(0.5 + 0.5)


def test_gpu_memory_is_summed_over_all_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu_bytes() == 0
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device=0: (0, 4096)[device])
    assert gpu_bytes() == 4096
    assert REGISTRY.get_sample_value("fedssl_worker_gpu_memory_bytes") == 4096
