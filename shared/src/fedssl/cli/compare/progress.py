"""The progress of a comparison on standard error."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from fedssl.cli.accuracies import accuracies_of
from fedssl.cli.output import console, duration, note
from fedssl.cli.simulation_progress import SPEED_SECONDS
from fedssl.experiments.comparison import ComparisonEntry, Failure, Outcome, Watcher


@contextmanager
def comparison_progress(entries: Sequence[ComparisonEntry]) -> Iterator[Watcher]:
    """Show a bar over all rounds of all runs on a terminal, else a line per finished run."""
    screen = console(stderr=True)
    if not screen.is_terminal:
        yield Watcher(on_end=_report_end)
        return
    rounds = {(entry.variant, entry.seed): entry.spec.num_rounds for entry in entries if entry.spec is not None}
    done = dict.fromkeys(rounds, 0)
    with Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TimeRemainingColumn(),
        console=screen,
        transient=True,
        speed_estimate_period=SPEED_SECONDS,
    ) as progress:
        task = progress.add_task("starting", total=sum(rounds.values()))

        def count(entry: ComparisonEntry, rounds_done: int) -> None:
            gained = rounds_done - done[entry.variant, entry.seed]
            done[entry.variant, entry.seed] = rounds_done
            if gained > 1:  # rounds that an earlier start completed, or that a failed run will never have, took no time
                progress.reset(task, completed=sum(done.values()))
            else:
                progress.update(task, completed=sum(done.values()))

        def advance(entry: ComparisonEntry, rounds_done: int) -> None:
            count(entry, rounds_done)
            text = f"{entry.variant}, seed {entry.seed}: round {rounds_done} of {rounds[entry.variant, entry.seed]}"
            progress.update(task, description=text)

        def finish(entry: ComparisonEntry, outcome: Outcome) -> None:
            if entry.spec is not None:
                count(entry, entry.spec.num_rounds)
            _report_end(entry, outcome)

        yield Watcher(on_round=advance, on_end=finish)


def _report_end(entry: ComparisonEntry, outcome: Outcome) -> None:
    if isinstance(outcome, Failure):
        note(f"{entry.variant}, seed {entry.seed}: failed, for a reason that the results show")  # once, below the table
    else:
        accuracies = accuracies_of(dict(outcome.last)) or "not evaluated"
        note(f"{entry.variant}, seed {entry.seed}: {accuracies}, {duration(outcome.seconds)}")
        if outcome.mixed is not None:
            note(f"warning: {entry.variant}, seed {entry.seed}: {outcome.mixed}")
