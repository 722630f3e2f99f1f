"""The progress of a long operation: a bar on a terminal, else a line every few seconds."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from fedssl.cli.output import console, note

_SECONDS_BETWEEN_LINES = 5.0


class Update(Protocol):
    """Called with the amount that is done, and with the total once that is known."""

    def __call__(self, done: int, total: int | None = None) -> None: ...


@contextmanager
def progress_bar(what: str, total: int | None, unit: float = 1.0, suffix: str = "") -> Iterator[Update]:
    """Show how much of `total` is done inside the block; yields a function to call with the amount done.

    If `total` is None, it is given to the yielded function later. Numbers are shown divided by `unit`, with the suffix.
    """
    screen = console(stderr=True)
    if not screen.is_terminal:
        yield _lines(what, total, unit, suffix)
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    def title(total: int | None) -> str:
        return what if total is None else f"{what} {total / unit:,.0f}{suffix}"

    text = TextColumn("{task.description}", markup=False)
    with Progress(text, BarColumn(), TimeRemainingColumn(), console=screen, transient=True) as progress:
        task = progress.add_task(title(total), total=total)

        def update(done: int, total: int | None = None) -> None:
            progress.update(task, completed=done, total=total, description=None if total is None else title(total))

        yield update


def _lines(what: str, total: int | None, unit: float, suffix: str) -> Update:
    last = time.monotonic()
    whole = total

    def update(done: int, total: int | None = None) -> None:
        nonlocal last, whole
        whole = total or whole
        if time.monotonic() - last > _SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            of = "" if whole is None else f" of {whole / unit:,.0f}"
            note(f"{what} {done / unit:,.0f}{of}{suffix}")

    return update
