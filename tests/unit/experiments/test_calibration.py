"""The measurement of a machine's speed: steps like those of a run, without the preparation before them."""

import pytest

from fedssl.engine import LocalProgress
from fedssl.engine.cuda_graphs import COMPILE_FROM, wants_compiling
from fedssl.errors import Cancelled
from fedssl.experiments.calibration import _quick, _Stopwatch, training_speed
from fedssl.methods import METHODS
from support.methods import method_spec


def _measured(times: list[tuple[float, int]], num_warm: int, monkeypatch: pytest.MonkeyPatch) -> float:
    """Return the measured speed if progress is reported at these pairs of a second and a step.

    The clock starts at 0, and the last report must end the measurement.
    """
    clock = iter([0.0] * (num_warm == 0) + [second for second, _ in times])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    watch = _Stopwatch(1.5, 32, num_warm)
    for second, step in times:
        done = LocalProgress(1, 1, step, 10_000, None, images_per_second=32 * step / second)
        if (second, step) == times[-1]:
            with pytest.raises(Cancelled):
                watch(done)
        else:
            watch(done)
    return watch.speed


def test_the_first_steps_on_a_gpu_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = [(60.0, 1), (60.5, 40), (61.0, 90), (62.0, 190)]
    assert _measured(looks, 10, monkeypatch) == pytest.approx(32 * 100)


def test_the_first_steps_on_a_cpu_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _measured([(1.0, 2), (2.0, 4)], 0, monkeypatch) == pytest.approx(64)
    assert _measured([(5.0, 1)], 0, monkeypatch) == pytest.approx(6.4)  # one step lasts longer than the measurement


def test_nothing_is_compiled_for_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "cc")
    spec = method_spec("fedsimclr")
    quick, algorithm = _quick(spec, "cuda"), METHODS["fedsimclr"].bind(spec).client
    assert not wants_compiling(algorithm, quick, COMPILE_FROM)


def test_the_training_speed_is_positive() -> None:
    assert training_speed(method_spec("fedsimclr"), seconds=0.1) > 0
