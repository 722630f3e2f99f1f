"""The lines of steps that may take long, if the output is not a terminal."""

import pytest

from fedssl.cli.step_progress import step_progress


def test_each_step_has_a_line_and_a_long_one_its_share_every_quarter_of_a_minute(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    with step_progress() as report:
        for step, share in (("a", None), ("a", 0.1), ("a", 0.2), ("a", 0.3), ("b", 0.0), ("b", None), ("b", None)):
            report(step, share)
            now[0] += 8

    assert capsys.readouterr().err.splitlines() == ["a", "a: 20 %", "b", "b"]
