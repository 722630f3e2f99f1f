"""A step's time, out of what the training tells of its progress."""

import pytest

from fedssl.protocol.work import Progress
from fedssl_worker.metrics import REGISTRY, Pace


def progress(step: int, phase: str = "training") -> Progress:
    return Progress.model_validate({"phase": phase, "epoch": 1, "num_epochs": 1, "step": step, "num_steps": 10})


def test_steps_are_timed_between_two_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    def seen(what: str) -> float:
        return REGISTRY.get_sample_value(f"fedssl_worker_step_seconds_{what}") or 0.0

    times = iter([10.0, 12.0, 12.5, 13.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(times))
    count, total = seen("count"), seen("sum")
    pace = Pace()
    for step in (0, 4, 4, 5):  # 2 s for four steps, then a look without a step, then one of 0.5 s
        pace.note(progress(step))
    pace.note(progress(0, "uploading"))
    assert seen("count") - count == 2
    assert seen("sum") - total == pytest.approx(0.5 + 0.5)
