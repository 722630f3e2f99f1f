"""The progress of a run: a live display on a terminal, else a line per change."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fedssl.cli.output import duration
from fedssl.protocol.states import AssignmentState
from fedssl.protocol.views import AssignmentView, DistillationJobView, RunView
from fedssl.protocol.work import Progress
from fedssl.wording import in_one_line, plural

CLIENTS_SHOWN = 16
MOST_LISTED = 200
"""If a round has more clients, only their number per state is read and shown."""
# Which clients to show first if there is no room for all.
_ORDER = {"rejected": 0, "declined": 1, "expired": 2, "leased": 3, "submitted": 4, "offered": 5, "accepted": 6}
_TROUBLE = ("rejected", "declined", "expired")
_DELIVERED = (AssignmentState.SUBMITTED, AssignmentState.ACCEPTED)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A run at one moment.

    `losses`: the mean loss of each closed round up to `losses_through`; `seconds_left` is None if it is not known yet.
    """

    run: RunView
    losses: Mapping[int, float]
    losses_through: int
    seconds_left: float | None = None

    @property
    def assignments(self) -> list[AssignmentView]:
        """The newest assignment of each client in the current round, in name order."""
        current = self.run.current_round
        newest = {} if current is None else {part.client_id: part for part in current.assignments}
        return [newest[client] for client in sorted(newest)]

    @property
    def images_per_second(self) -> float:
        """The sum over all clients that are training at this moment."""
        return sum(
            part.progress.images_per_second or 0.0
            for part in self.assignments
            if part.progress is not None and part.progress.phase == "training" and part.state.value == "leased"
        )

    @property
    def share_done(self) -> float:
        """How much of the run is done, 0..1, including the progress of the clients in the current round."""
        current, closed = self.run.current_round, self.run.rounds_closed
        if current is not None and current.number > closed and (parts := self.assignments):
            closed_and_open = closed + self._share_of_round(current.number, sum(map(_share, parts)) / len(parts))
        elif current is not None and current.number > closed and current.counts:
            delivered = sum(current.counts.get(state, 0) for state in _DELIVERED) / sum(current.counts.values())
            closed_and_open = closed + self._share_of_round(current.number, delivered)
        else:
            closed_and_open = closed
        return min(1.0, closed_and_open / self.run.num_rounds)

    def _share_of_round(self, number: int, clients: float) -> float:
        """Return how much of the round is done. If the coordinator trains too, that counts for half of the round."""
        num_epochs = self.run.spec.method.distillation_epochs(number)
        if not num_epochs:
            return clients
        job = self.run.distillation
        return (clients + (0.0 if job is None else job.epoch / job.num_epochs)) / 2

    @property
    def loss(self) -> float | None:
        """The mean loss of the newest closed round that has one."""
        return self.losses[max(self.losses)] if self.losses else None


@dataclass(slots=True)
class PlainDisplay:
    """Prints a line per closed round, and a line for each problem in between."""

    console: Console
    _closed: int | None = None
    _speed: float = 0.0
    _printed: set[tuple[Any, ...]] = field(default_factory=set)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def show(self, snapshot: Snapshot) -> None:
        for line in self.lines(snapshot):
            self.console.print(line, soft_wrap=True)

    def lines(self, snapshot: Snapshot) -> list[str]:
        """Return a line for each change since the last snapshot."""
        run = snapshot.run
        found = []
        if run.reason and run.state.value != "finished":
            found += self._once(("reason", run.reason), in_one_line(run.reason))
        if (job := run.distillation) is not None:
            found += self._once(
                (job.id,), f"{_round(job)}: the coordinator trains for {plural(job.num_epochs, 'epoch')}"
            )
            if job.reason:
                found += self._once((job.id, job.reason), f"{_round(job)}: {in_one_line(job.reason)}")
        for part in snapshot.assignments:
            if part.state.value in _TROUBLE:
                text = f"{part.client_id} {part.state.value}: {part.reason or '-'}"
                found += self._once((part.id, part.state), in_one_line(text))
        self._speed = snapshot.images_per_second or self._speed
        if self._closed is None:  # of the rounds before the first snapshot, only the last is shown
            self._closed = max(0, snapshot.losses_through - 1)
        for number in range(self._closed + 1, snapshot.losses_through + 1):
            found.append(round_line(snapshot, number, self._speed))
            self._closed = number
        return found

    def _once(self, key: tuple[Any, ...], text: str) -> list[str]:
        if key in self._printed:
            return []
        self._printed.add(key)
        return [text]


class LiveDisplay:
    """Redraws the state of the run in place, below the lines that PlainDisplay prints."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._above = PlainDisplay(console)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, snapshot: Snapshot) -> None:
        self._above.show(snapshot)
        self._live.update(picture(snapshot), refresh=True)


def round_line(snapshot: Snapshot, number: int, images_per_second: float) -> str:
    """Describe one closed round in one line."""
    run, loss = snapshot.run, snapshot.losses.get(number)
    parts = [f"loss {loss:.4f}" if loss is not None else "no loss was reported"]
    if images_per_second:
        parts.append(f"{images_per_second:,.0f} images/s")
    if snapshot.seconds_left is not None and number < run.num_rounds:
        parts.append(f"{duration(snapshot.seconds_left)} left")
    return f"round {number} of {run.num_rounds}: {', '.join(parts)}"


def picture(snapshot: Snapshot) -> Any:
    """Draw the whole run: a bar, the current numbers, and a line per client."""
    rows = [_headline(snapshot), _numbers(snapshot)]
    if snapshot.assignments:
        rows.append(_clients(snapshot.assignments))
    elif counts := _counts(snapshot.run):
        rows.append(Text(f"  {plural(sum(counts.values()), 'client')}: {_in_words(counts)}"))
    return Group(*rows)


def num_clients(run: RunView) -> int:
    """Return how many clients the run's current round has, or 0 if an older coordinator does not state it."""
    return sum(_counts(run).values())


def _counts(run: RunView) -> Mapping[AssignmentState, int]:
    return {} if run.current_round is None else run.current_round.counts


def _in_words(counts: Mapping[AssignmentState, int]) -> str:
    return ", ".join(f"{number:,} {state.value}" for state, number in counts.items())


def _headline(snapshot: Snapshot) -> Any:
    run = snapshot.run
    line = Table.grid(padding=(0, 1))
    for _ in range(3):
        line.add_column(no_wrap=True)
    number = run.current_round.number if run.current_round is not None else 0
    line.add_row(
        Text(f"{in_one_line(run.name)}: round {number} of {run.num_rounds}", style="bold"),
        ProgressBar(total=1.0, completed=snapshot.share_done, width=30),
        Text(f"{100 * snapshot.share_done:.0f} %"),
    )
    return line


def _numbers(snapshot: Snapshot) -> Any:
    run, current = snapshot.run, snapshot.run.current_round
    parts = [run.state.value]
    if run.state.value == "running" and current is not None:
        parts = ["training" if current.state.value == "open" else current.state.value]
    if run.distillation is not None:
        parts[-1:] = _distilling(run.distillation)
    if snapshot.loss is not None:
        parts.append(f"loss {snapshot.loss:.4f}")
    if speed := snapshot.images_per_second:
        parts.append(f"{speed:,.0f} images/s")
    if snapshot.seconds_left is not None:
        parts.append(f"{duration(snapshot.seconds_left)} left")
    if run.reason and run.state.value != "finished":
        parts.append(in_one_line(run.reason))
    return Text("  ".join(parts), style="dim")


def _distilling(job: DistillationJobView) -> list[str]:
    if job.state.value == "queued":
        return ["waiting to distil"]
    parts = [f"distilling epoch {job.epoch} of {job.num_epochs}"]
    if job.loss is not None:
        parts.append(f"distillation loss {job.loss:.4f}")
    if job.eta_seconds is not None:
        parts.append(f"{duration(job.eta_seconds)} of distillation left")
    if job.reason:
        parts.append(in_one_line(job.reason))
    return parts


def _round(job: DistillationJobView) -> str:
    return f"round {job.round_number}" if job.round_number else "before the first round"


def _clients(assignments: Sequence[AssignmentView]) -> Any:
    shown = sorted(assignments, key=lambda part: _ORDER[part.state.value])[:CLIENTS_SHOWN]
    grid = Table.grid(padding=(0, 2))
    for justify in ("left", "left", "left", "right", "right"):
        grid.add_column(justify=justify, no_wrap=True)
    for part in sorted(shown, key=lambda part: part.client_id):
        progress = part.progress if part.state.value in ("leased", "submitted") else None
        style = "red" if part.state.value in _TROUBLE else "green" if part.state.value == "accepted" else ""
        grid.add_row(
            Text(f"  {in_one_line(part.client_id)}"),
            Text(_doing(part), style=style),
            ProgressBar(total=1.0, completed=_share(part), width=20),
            Text("" if progress is None or progress.loss is None else f"loss {progress.loss:.3f}"),
            Text("" if progress is None or not progress.images_per_second else f"{progress.images_per_second:,.0f}/s"),
        )
    if len(assignments) > len(shown):
        grid.add_row(Text(f"  and {len(assignments) - len(shown)} more"))
    return grid


def _doing(part: AssignmentView) -> str:
    if part.state.value == "offered":
        return "waiting"
    if part.state.value == "leased":
        if part.progress is None:
            return "starting"
        epochs = _epochs(part.progress)
        return f"{part.progress.phase}{epochs}"
    return part.state.value if not part.reason else f"{part.state.value}: {in_one_line(part.reason)[:40]}"


def _epochs(progress: Progress) -> str:
    shown = progress.phase == "training" and progress.num_epochs > 1
    return f" epoch {progress.epoch} of {progress.num_epochs}" if shown else ""


def _share(part: AssignmentView) -> float:
    """Return how much of its assignment a client has done, 0..1."""
    if part.state.value in ("submitted", "accepted"):
        return 1.0
    if part.state.value != "leased" or part.progress is None:
        return 0.0
    if part.progress.phase == "uploading":
        return 1.0
    return part.progress.step / part.progress.num_steps if part.progress.num_steps else 0.0
