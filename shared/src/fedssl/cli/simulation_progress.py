"""The progress of a simulation on standard error: a bar on a terminal, else a line per round."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from fedssl.cli.accuracies import accuracies_of
from fedssl.cli.output import console, duration, note
from fedssl.cli.remaining_time import RemainingTime
from fedssl.engine import LocalProgress
from fedssl.experiments.runs import Calls
from fedssl.protocol.runs import RunSpec
from fedssl.simulation import RoundRecord

_SECONDS_BETWEEN_LINES = 60.0
SPEED_SECONDS = 86_400.0
"""A bar estimates the remaining time from the rounds of this long. Two of them are needed, and they may take hours."""


class _Display(Protocol):
    def on_resume(self, rounds_done: int) -> None: ...
    def on_round(self, record: RoundRecord) -> None: ...
    def on_progress(self, number: int, client: str, progress: LocalProgress) -> None: ...
    def on_step(self, number: int, text: str) -> None: ...


class _Bar:
    """A bar on a terminal."""

    def __init__(self, progress: Progress, spec: RunSpec) -> None:
        self._progress = progress
        self._task = progress.add_task("starting", total=spec.num_rounds, what="")
        self._num_rounds = spec.num_rounds

    def on_resume(self, rounds_done: int) -> None:
        self._progress.reset(self._task, completed=rounds_done)

    def on_round(self, record: RoundRecord) -> None:
        loss = "" if record.loss is None else f"loss {record.loss:.4f}"
        self._progress.update(self._task, completed=record.round_number, what=loss)

    def on_progress(self, number: int, client: str, progress: LocalProgress) -> None:
        self.on_step(number, f"{client}, {progress.images_per_second:,.0f} images/s")

    def on_step(self, number: int, text: str) -> None:
        self._progress.update(self._task, description=f"round {number} of {self._num_rounds}: {text}")


class _Lines:
    """A line per round, and one per minute within a long round, for output that is piped."""

    def __init__(self, spec: RunSpec) -> None:
        self._num_rounds = spec.num_rounds
        self._last = time.monotonic()
        self.on_resume(0)

    def on_resume(self, rounds_done: int) -> None:
        self._remaining = RemainingTime()
        self._remaining.seconds_left(rounds_done / self._num_rounds)

    def on_round(self, record: RoundRecord) -> None:
        left = self._remaining.seconds_left(record.round_number / self._num_rounds)
        ending = "" if not left else f", {duration(left)} left"
        loss = "no loss" if record.loss is None else f"loss {record.loss:.4f}"
        self._note(record.round_number, f"{loss}{ending}")

    def on_progress(self, number: int, client: str, progress: LocalProgress) -> None:
        self.on_step(number, f"{client}, {progress.images_per_second:,.0f} images/s")

    def on_step(self, number: int, text: str) -> None:
        if time.monotonic() - self._last >= _SECONDS_BETWEEN_LINES:
            self._note(number, text)

    def _note(self, number: int, text: str) -> None:
        self._last = time.monotonic()
        note(f"round {number} of {self._num_rounds}: {text}")


@contextmanager
def simulation_progress(spec: RunSpec) -> Iterator[Calls]:
    """Show the progress of a run inside the block; yields what the run is to call."""
    screen = console(stderr=True)
    if not screen.is_terminal:
        yield _calls(_Lines(spec), spec)
        return
    text = TextColumn("{task.description}", markup=False)
    columns = (text, BarColumn(), TextColumn("{task.fields[what]}", markup=False), TimeRemainingColumn())
    with Progress(*columns, console=screen, transient=True, speed_estimate_period=SPEED_SECONDS) as progress:
        yield _calls(_Bar(progress, spec), spec)


def _calls(display: _Display, spec: RunSpec) -> Calls:
    pauses, num_rounds = spec.watch.action == "pause", spec.num_rounds

    def on_round(record: RoundRecord) -> None:
        display.on_round(record)
        if record.alarms and not (pauses and record.round_number < num_rounds):  # else the error names the alarm
            more = f", and {len(record.alarms) - 1} more like it" if len(record.alarms) > 1 else ""
            note(f"warning: after round {record.round_number}, {record.alarms[0]}{more}")
        for message in record.unusual:
            note(f"warning: unusual update in round {record.round_number}: {message}")
        if record.skipped is not None:
            note(f"warning: round {record.round_number} was skipped: {record.skipped}")

    def on_resume(done: int) -> None:
        note(f"resuming after round {done}, the last that an earlier start completed")
        display.on_resume(done)

    def on_judging(number: int, what: str, share: float | None) -> None:
        display.on_step(number, f"evaluating, {what}" + ("" if share is None else f", {share:.0%}"))

    return Calls(
        on_resume=on_resume,
        on_warning=lambda warning: note(f"warning: {warning}"),
        on_round=on_round,
        on_progress=display.on_progress,
        on_distillation=lambda number, p: display.on_step(number, f"distilling, epoch {p.epoch} of {p.num_epochs}"),
        on_judging=on_judging,
        on_evaluation=lambda number, values: note(f"after round {number}: {accuracies_of(values) or 'evaluated'}"),
    )
