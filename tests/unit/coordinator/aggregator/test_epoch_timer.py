"""The speed that a distillation reports."""

from collections.abc import Iterator

import pytest

from fedssl_coordinator.aggregator import distillation_checkpoints


def test_the_first_epoch_counts_only_until_there_is_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first epoch also builds the networks, reads the images and warms up the device."""
    clock: Iterator[float] = iter([100.0, 130.0, 132.0, 136.0, 139.0])
    monkeypatch.setattr(distillation_checkpoints.time, "monotonic", lambda: next(clock))
    timer = distillation_checkpoints._EpochTimer()
    seen = []
    for _ in range(4):
        timer.tick()
        seen.append(timer.seconds_per_epoch)
    assert seen == [30.0, 2.0, 3.0, 3.0]
