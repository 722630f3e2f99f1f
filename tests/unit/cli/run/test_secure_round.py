"""The output of `fedssl run show` for a run with secure aggregation."""

from datetime import UTC, datetime

import pytest

from fedssl.cli.run.commands import _show_round
from fedssl.protocol.states import RoundState
from fedssl.protocol.views import RoundView, SecureRoundView


def test_the_phase_the_missing_clients_and_the_reveals_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    secure = SecureRoundView(
        phase="reveals",
        cohort=["a", "b", "c", "d"],
        awaited=["a"],
        lost=["d"],
        min_survivors=3,
        threshold=3,
        roster=None,
        own_masks=["a", "b", "c"],
        mask_keys=["d"],
    )
    now = datetime.now(UTC)
    _show_round(
        RoundView(
            number=1,
            attempt=1,
            state=RoundState.OPEN,
            verdict=None,
            reason=None,
            broadcast="0" * 64,
            opened_at=now,
            deadline=now,
            closed_at=None,
            secure=secure,
            assignments=[],
        )
    )
    out, err = capsys.readouterr()
    lines = [" ".join(line.split()) for line in out.splitlines()]
    for line in (
        "phase reveals",
        "waits for a",
        "not in the sum d",
        "own masks revealed of a, b, c",
        "mask keys revealed of d",
    ):
        assert line in lines
    assert "No cryptographer outside this project has reviewed the protocol." in " ".join(err.split())
