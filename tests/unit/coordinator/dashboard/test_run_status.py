"""The status of a run: the word for its state, and the remaining time."""

from datetime import UTC, datetime, timedelta

import pytest

from fedssl.protocol.runs import RunSpec
from fedssl.protocol.states import AssignmentState, RoundState, RunState
from fedssl_coordinator.core.models import Round, Run
from fedssl_coordinator.dashboard.runs.run_status import run_status


def _running(open_for_seconds: float) -> tuple[Run, list[Round]]:
    """Return a run of five rounds: two closed ones, which took ten seconds each, and an open one."""
    run = Run(state=RunState.RUNNING, num_rounds=5, rounds_closed=2, spec=RunSpec(num_rounds=5).model_dump(mode="json"))
    opened = datetime.now(UTC) - timedelta(seconds=open_for_seconds)
    rounds = [
        Round(
            number=number,
            state=RoundState.CLOSED,
            opened_at=opened - timedelta(seconds=10 * (3 - number)),
            closed_at=opened - timedelta(seconds=10 * (2 - number)),
        )
        for number in (1, 2)
    ]
    rounds.append(
        Round(number=3, state=RoundState.OPEN, attempt=1, opened_at=opened, deadline=opened + timedelta(hours=1))
    )
    return run, rounds


@pytest.mark.parametrize(("open_for_seconds", "left"), [(0, "30 s"), (4, "26 s"), (9, "21 s"), (60, "20 s")])
def test_the_time_left_counts_down_within_a_round(open_for_seconds: float, left: str) -> None:
    run, rounds = _running(open_for_seconds)
    status = run_status(run, rounds, {AssignmentState.LEASED: 2}, [], None, 2)
    assert (status.word, status.reason) == ("running", f"{left} left")


def test_declines_are_given_as_the_reason_instead_of_the_time_left() -> None:
    run, rounds = _running(4)
    declined = "1 of 2 clients declined: b: no images"
    status = run_status(run, rounds, {AssignmentState.DECLINED: 1}, [], None, 2, declined)
    assert status.reason.startswith(f"{declined}; 0 of 1 update received; deadline ")
    assert status.needs_attention


@pytest.mark.parametrize("num_rounds", [2, 3])  # between two rounds, and during a round
def test_a_run_with_a_newer_versions_cohort_setting_stays_in_the_list(num_rounds: int) -> None:
    run, rounds = _running(4)
    run.spec["cohort"] |= {"from_later": 1}
    status = run_status(run, rounds[:num_rounds], {AssignmentState.LEASED: 2}, [], None, 2)
    assert status.word == "running"
