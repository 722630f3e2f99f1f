"""The lines of a simulation on standard error while it runs."""

import pytest

from fedssl.cli.simulation_progress import simulation_progress
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
        calls.on_evaluation(4, {"probe": 0.5, "uniformity": 1.0})
        calls.on_evaluation(5, {"uniformity": 1.0})
    assert capsys.readouterr().err.splitlines() == [
        "resuming after round 3, the last that an earlier start completed",
        "after round 4: linear probe 50.00 %",
        "after round 5: evaluated",
    ]
