"""Following a run until it has finished."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from uuid import UUID

from rich.console import Console

from fedssl.cli.errors import RunNotCompleted, RunPaused, RunStopped, WaitedTooLong
from fedssl.cli.output import console
from fedssl.cli.remaining_time import RemainingTime
from fedssl.cli.run.progress import MOST_LISTED, LiveDisplay, PlainDisplay, Snapshot, num_clients
from fedssl.client import Client, RunNotFinished
from fedssl.protocol.views import EventView, RunView
from fedssl.wording import in_one_line

POLL_SECONDS = 0.4
EVENTS_SECONDS = 2.0
PATIENCE_SECONDS = 120.0
_NEXT = {
    RunNotCompleted: "`fedssl run logs {run}` shows what happened, `fedssl run resume {run}` continues it afterwards",
    RunStopped: "`fedssl run pull {run}` fetches the weights so far",
    RunPaused: "`fedssl run resume {run}` resumes it",
    WaitedTooLong: "It continues; `fedssl run watch {run}` shows its progress",
}
_EVENTS_SHOWN: dict[str, Callable[[EventView], str]] = {
    "run.alarm": lambda event: f"warning: round {event.round_number}: {in_one_line(event.message)}",
    "evaluation.completed": lambda event: f"evaluated: {in_one_line(event.message)}",
}


def watch(
    client: Client, run_id: UUID, *, on_poll: Callable[[], None] = lambda: None, screen: Console | None = None
) -> RunView:
    """Show a run's progress on standard error until it has finished, and return the finished run.

    `on_poll` is called between two polls and may raise. Raises ClientError.
    """
    screen = screen or console(stderr=True)
    lists_clients = True
    remaining, losses, events = RemainingTime(), _Losses(client, run_id), _Events(client, run_id)
    with _client_warnings_on(screen), LiveDisplay(screen) if screen.is_terminal else PlainDisplay(screen) as display:
        while True:
            run = client.run(run_id, assignments=lists_clients)
            lists_clients = num_clients(run) <= MOST_LISTED
            known = losses.up_to(run)
            snapshot = Snapshot(run, known, losses.through)
            left = remaining.seconds_left(snapshot.share_done) if run.state.value == "running" else None
            display.show(replace(snapshot, seconds_left=left))
            for line in events.since_last(run):
                screen.print(line, soft_wrap=True)
            if run.state.value == "finished":
                return run
            on_poll()
            time.sleep(POLL_SECONDS)


def wait(
    client: Client, run_id: UUID, *, timeout_seconds: float | None = None, through_pauses: bool = False
) -> RunView:
    """Block without output until a run has ended or is paused, or the time is up. Raises ClientError."""
    try:
        return client.wait(run_id, timeout_seconds=timeout_seconds, through_pauses=through_pauses)
    except RunNotFinished as error:
        return error.run


def require_completed(run: RunView) -> None:
    """Raise unless the run has completed: RunStopped, RunPaused, WaitedTooLong, or RunNotCompleted if it failed."""
    how = run.state.value if run.outcome is None else run.outcome.value
    if how == "completed":
        return
    kind = {"stopped": RunStopped, "failed": RunNotCompleted, "paused": RunPaused}.get(how, WaitedTooLong)
    message = f"run {run.id} is {how}" + (f": {run.reason}" if run.reason else "")
    raise kind(f"{message}. {_NEXT[kind].format(run=str(run.id)[:8])}")


class _Losses:
    """The losses of the rounds. They are fetched when a round has closed, and less often the longer fetching takes."""

    def __init__(self, client: Client, run_id: UUID) -> None:
        self._client = client
        self._run_id = run_id
        self._known: dict[int, float] = {}
        self.through = 0
        self._not_before = 0.0

    def up_to(self, run: RunView) -> dict[int, float]:
        finished = run.state.value == "finished"
        if run.rounds_closed > self.through and (finished or time.monotonic() >= self._not_before):
            began = time.monotonic()
            metrics = self._client.metrics(self._run_id, "loss")
            self._known = {metric.round_number: metric.value for metric in metrics if metric.client_id is None}
            self.through = run.rounds_closed
            self._not_before = began + 10 * (time.monotonic() - began)
        return self._known


class _Events:
    """Events that get a line of their own when they happen: alarms, and the results of evaluations."""

    def __init__(self, client: Client, run_id: UUID) -> None:
        self._client = client
        self._run_id = run_id
        self._last_id: int | None = None  # events before the first poll are not shown
        self._not_before = 0.0

    def since_last(self, run: RunView) -> list[str]:
        if time.monotonic() < self._not_before and run.state.value != "finished":
            return []
        began = time.monotonic()
        found = {event.id: event for kind in _EVENTS_SHOWN for event in self._client.event_log(self._run_id, kind)}
        self._not_before = began + max(EVENTS_SECONDS, 10 * (time.monotonic() - began))
        seen, self._last_id = self._last_id, max(found, default=self._last_id or 0)
        new = [found[number] for number in sorted(found) if seen is not None and number > seen]
        return [_EVENTS_SHOWN[event.kind](event) for event in new]


@contextmanager
def _client_warnings_on(screen: Console) -> Iterator[None]:
    """Print the client's warnings, such as `Trying again in ...`, above the live display."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            screen.print(record.getMessage(), style="yellow", soft_wrap=True)

    logger, handler = logging.getLogger("fedssl.client"), Handler()
    logger.addHandler(handler)
    propagate, logger.propagate = logger.propagate, False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate
