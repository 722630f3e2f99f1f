"""The lines of a simulation on standard error while it runs."""

import io
from typing import Any

import pytest
from rich.console import Console
from rich.progress import Progress

from fedssl.cli import simulation_progress as module
from fedssl.cli.output import duration
from fedssl.cli.simulation_progress import simulation_progress
from fedssl.engine import LocalProgress
from fedssl.engine.distillation import DistillationProgress
from fedssl.simulation import RoundRecord
from support.federation import tiny_spec


def lines(capsys: pytest.CaptureFixture[str], *records: RoundRecord, action: str = "warn") -> list[str]:
    """Return the lines that rounds lead to, without the time that is left."""
    with simulation_progress(tiny_spec(num_rounds=4, watch={"action": action})) as calls:
        for record in records:
            calls.on_round(record)
    return [line.partition(", 0:")[0] for line in capsys.readouterr().err.splitlines()]


def test_each_round_is_a_line_and_what_is_wrong_with_it_another(capsys: pytest.CaptureFixture[str]) -> None:
    trained = RoundRecord(1, {"a": {"loss": 0.5}}, {"a": 10}, alarms=["a collapses", "b collapses"])
    odd = RoundRecord(2, {}, {}, unusual=["the update of a is large", "that of b too"], alarms=["c collapses"])
    assert lines(capsys, trained, odd, RoundRecord(3, {}, {}, skipped="too few updates")) == [
        "round 1 of 4: loss 0.5000",
        "warning: after round 1, a collapses, and 1 more like it",
        "round 2 of 4: no loss",
        "warning: after round 2, c collapses",
        "warning: unusual update in round 2: the update of a is large",
        "warning: unusual update in round 2: that of b too",
        "round 3 of 4: no loss",
        "warning: round 3 was skipped: too few updates",
    ]


def test_an_alarm_that_pauses_the_run_is_left_to_the_error(capsys: pytest.CaptureFixture[str]) -> None:
    alarmed = [RoundRecord(number, {}, {}, alarms=["a collapses"]) for number in (3, 4)]
    assert lines(capsys, *alarmed, action="pause") == [
        "round 3 of 4: no loss",
        "round 4 of 4: no loss",
        "warning: after round 4, a collapses",
    ]


def test_resumptions_and_evaluations_are_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with simulation_progress(tiny_spec()) as calls:
        calls.on_resume(3)
        calls.on_warning("2 versions compute it")
        calls.on_evaluation(4, {"probe": 0.5, "uniformity": 1.0})
        calls.on_evaluation(5, {"uniformity": 1.0})
    assert capsys.readouterr().err.splitlines() == [
        "resuming after round 3, the last that an earlier start completed",
        "warning: 2 versions compute it",
        "after round 4: linear probe 50.00 %",
        "after round 5: evaluated",
    ]


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the time, which the test changes."""
    moment = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: moment[0])
    return moment


def trained(number: int) -> RoundRecord:
    return RoundRecord(number, {"a": {"loss": 0.5}}, {"a": 10})


def test_rounds_of_an_earlier_start_do_not_shorten_the_time_that_is_left(
    capsys: pytest.CaptureFixture[str], now: list[float]
) -> None:
    with simulation_progress(tiny_spec(num_rounds=100)) as calls:
        calls.on_resume(50)
        for number in (51, 52):
            now[0] += 100
            calls.on_round(trained(number))

    assert capsys.readouterr().err.splitlines()[1:] == [
        f"round 51 of 100: loss 0.5000, {duration(49 * 100)} left",
        f"round 52 of 100: loss 0.5000, {duration(48 * 100)} left",
    ]


def test_a_long_round_and_a_long_evaluation_have_a_line_per_minute(
    capsys: pytest.CaptureFixture[str], now: list[float]
) -> None:
    with simulation_progress(tiny_spec(num_rounds=4)) as calls:
        for _ in range(5):
            now[0] += 30
            calls.on_progress(1, "client-0", LocalProgress(1, 10, 1, 1, 0.5, 1234.0))
        for share in (0.25, 0.5, None):
            now[0] += 45
            calls.on_judging(1, "linear probe", share)
        now[0] += 60
        calls.on_distillation(2, DistillationProgress(3, 9, 0.5))

    assert capsys.readouterr().err.splitlines() == [
        "round 1 of 4: client-0, 1,234 images/s",
        "round 1 of 4: client-0, 1,234 images/s",
        "round 1 of 4: evaluating, linear probe, 25%",
        "round 1 of 4: evaluating, linear probe",
        "round 2 of 4: distilling, epoch 3 of 9",
    ]


def test_the_bar_of_long_rounds_shows_how_long_the_others_will_take(
    monkeypatch: pytest.MonkeyPatch, now: list[float]
) -> None:
    """A bar of rich forgets the rounds of more than half a minute ago, and needs two of them."""
    bars: list[Progress] = []

    class Recorded(Progress):
        def __init__(self, *columns: Any, **options: Any) -> None:
            super().__init__(*columns, **options, get_time=lambda: now[0], auto_refresh=False)
            bars.append(self)

    monkeypatch.setattr(module, "Progress", Recorded)
    monkeypatch.setattr(module, "console", lambda **_: Console(file=io.StringIO(), force_terminal=True))
    with simulation_progress(tiny_spec(num_rounds=100)) as calls:
        calls.on_resume(50)
        for number in (51, 52):
            for _ in range(4):
                now[0] += 100
                calls.on_progress(number, "client-0", LocalProgress(1, 10, 1, 1, 0.5, 1234.0))
            calls.on_round(trained(number))
        assert bars[0].tasks[0].time_remaining == 48 * 400
