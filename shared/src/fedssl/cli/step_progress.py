"""The progress of steps that each may take long, on standard error."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from fedssl.cli.output import console, note

Report = Callable[[str, float | None], None]
"""Called with the name of the current step, and the share of it that is done, 0..1, if that is known."""

_SECONDS_BETWEEN_LINES = 15.0


@contextmanager
def step_progress() -> Iterator[Report]:
    """Show the step in progress inside the block: a bar on a terminal, else a line per step."""
    screen = console(stderr=True)
    if not screen.is_terminal:
        yield _lines()
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=screen, transient=True) as progress:
        task = progress.add_task("", total=None)
        current = [""]

        def report(what: str, share: float | None) -> None:
            if what != current[0]:
                current[0] = what
                progress.reset(task, description=what, total=None)
            progress.update(task, completed=share or 0, total=None if share is None else 1)

        yield report


def _lines() -> Report:
    current, last = "", time.monotonic()

    def report(what: str, share: float | None) -> None:
        nonlocal current, last
        now = time.monotonic()
        if what == current and now - last < _SECONDS_BETWEEN_LINES:
            return
        note(what if what != current or share is None else f"{what}: {100 * share:.0f} %")
        current, last = what, now

    return report
