"""The progress of a comparison."""

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.progress import Progress

from fedssl.cli.compare import progress as module
from fedssl.cli.compare.progress import comparison_progress
from fedssl.experiments.comparison import ComparisonEntry, Failure
from fedssl.experiments.runs import FinishedRun
from support.federation import tiny_spec

FINISHED = FinishedRun(10, 1, 0, 0, 65.0, {10: {"probe": 0.5}}, {}, [])
ENTRIES = [ComparisonEntry(name, 0, Path(name), tiny_spec(num_rounds=10)) for name in "abcd"]


def test_runs_are_lines_if_the_output_is_not_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with comparison_progress(ENTRIES) as watcher:
        watcher.on_round(ENTRIES[0], 1)
        watcher.on_end(ENTRIES[0], FINISHED)
        watcher.on_end(ENTRIES[1], replace(FINISHED, evaluations={}))
        watcher.on_end(ENTRIES[2], Failure("out of memory"))
        watcher.on_end(ENTRIES[3], mixed := replace(FINISHED, sources=("0123", "4567")))

    assert capsys.readouterr().err.splitlines() == [
        "a, seed 0: linear probe 50.00 %, 1:05",
        "b, seed 0: not evaluated, 1:05",
        "c, seed 0: failed, for a reason that the results show",
        "d, seed 0: linear probe 50.00 %, 1:05",
        f"warning: d, seed 0: {mixed.mixed}",
    ]


def test_rounds_that_took_no_time_do_not_shorten_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A is finished, b failed, and c resumes after its eighth round: 12 rounds are left."""
    now, bars = [0.0], list[Progress]()

    class Recorded(Progress):
        def __init__(self, *columns: Any, **options: Any) -> None:
            super().__init__(*columns, **options, get_time=lambda: now[0], auto_refresh=False)
            bars.append(self)

    monkeypatch.setattr(module, "Progress", Recorded)
    monkeypatch.setattr(module, "console", lambda **_: Console(file=io.StringIO(), force_terminal=True))
    with comparison_progress(ENTRIES) as watcher:
        watcher.on_end(ENTRIES[0], FINISHED)
        watcher.on_end(ENTRIES[1], Failure("out of memory"))
        watcher.on_round(ENTRIES[2], 8)
        for number in (9, 10):
            now[0] += 100
            watcher.on_round(ENTRIES[2], number)
        watcher.on_end(ENTRIES[2], FINISHED)
        [task] = bars[0].tasks
        assert task.completed == 30
        assert task.description == "c, seed 0: round 10 of 10"
        assert task.time_remaining == 10 * 100
