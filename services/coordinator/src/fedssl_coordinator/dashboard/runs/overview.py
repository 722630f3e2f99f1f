"""The list of runs: one row per run, the runs that need attention, and four figures of the federation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from sqlalchemy.orm import Session

from fedssl.protocol.chance import Chance
from fedssl.protocol.states import RoundState
from fedssl_coordinator.core import database_clock
from fedssl_coordinator.core.models import Run
from fedssl_coordinator.core.paging import encode_cursor
from fedssl_coordinator.dashboard.layout import formats
from fedssl_coordinator.dashboard.layout.svg import ribbon, spark
from fedssl_coordinator.dashboard.runs import queries
from fedssl_coordinator.dashboard.runs.run_status import Last, RunStatus, last_verdict, run_status
from fedssl_coordinator.federation.rounds import declines, unattended
from fedssl_coordinator.federation.rounds.repository import counts

PAGE = 50
_BACK = 10  # rounds over which a change of the score is shown


@dataclass(frozen=True, slots=True)
class Baselines:
    """The baselines of the newest accuracies: the same of the encoder before the first round, and chance.

    `before` is "start" if the run started from given weights, else "untrained". `chance` is None if it is not known.
    """

    before: str
    results: Mapping[str, float | None]
    chance: Chance | None

    def next_to(self, measure: str) -> str:
        """Return the baselines of "probe" or "knn" as text: `untrained 81.4%, chance 10.0%`."""
        found = [
            (self.before, self.results.get(measure)),
            ("chance", None if self.chance is None else self.chance.accuracy),
        ]
        return ", ".join(f"{name} {formats.percent(value)}" for name, value in found if value is not None)


@dataclass(frozen=True, slots=True)
class Row:
    """One run in the list.

    A number is that of the newest evaluation that measured it; None if there is none, or if it was not finite because
    training `diverged`.
    """

    run: Run
    status: RunStatus
    last: Last
    ribbon: str
    verdicts: str
    curve: str
    probe: float | None
    change: str
    knn: float | None
    rank: float | None
    diverged: bool
    dataset: str | None
    baselines: Baselines

    @property
    def took(self) -> float | None:
        """Seconds from the start to the end, or until now."""
        if self.run.started_at is None:
            return None
        return ((self.run.finished_at or database_clock.now()) - self.run.started_at).total_seconds()

    @property
    def about(self) -> str:
        """Method and encoder."""
        encoder = self.run.spec.get("model", {}).get("encoder", {}).get("name", "")
        title = formats.method(self.run.method)
        return f"{title} · {encoder}" if encoder else title


@dataclass(frozen=True, slots=True)
class Overview:
    """A page of the list."""

    rows: list[Row]
    next_cursor: str | None


def overview(
    session: Session, before: tuple[datetime, UUID] | None, group: str, text: str, limit: int = PAGE
) -> Overview:
    """Return the newest runs of a group that match a text."""
    found = queries.page(session, limit + 1, before, group, text)
    shown = found[:limit]
    last = shown[-1] if len(found) > limit else None
    return Overview(
        rows(session, shown), None if last is None else encode_cursor(last.created_at.isoformat(), str(last.id))
    )


def rows(session: Session, runs: Sequence[Run]) -> list[Row]:
    """Return a row for every run, with a few queries for all of them together."""
    ids = [run.id for run in runs]
    rounds, scores, jobs = queries.last_rounds(session, ids), queries.scores(session, ids), queries.jobs(session, ids)
    looked_at = [row.id for some in rounds.values() for row in some[-2:]]
    tallies = counts(session, looked_at)
    unclosed = [some[-1].id for some in rounds.values() if some[-1].state == RoundState.OPEN]
    declined = declines.reasons(session, runs)
    waiting = unattended.reasons(session, runs)
    absent, num_eligible = queries.missing(session, unclosed), queries.num_eligible(session)
    made = []
    for run in runs:
        its, found = rounds.get(run.id, []), queries.drawn(scores.get(run.id, []))
        newest = its[-1].id if its else None
        status = run_status(
            run, its, tallies.get(newest, {}) if newest else {}, absent.get(newest, []) if newest else [],
            jobs.get(run.id), num_eligible.get(run.project, 0), declined.get(run.id), waiting.get(run.id),
        )  # fmt: skip
        picture, words = ribbon(its)
        probe = _newest(found, "probe")
        probes = [(score.round_number, value) for score in found if (value := score.results.get("probe")) is not None]
        made.append(
            Row(run, status, last_verdict(its, tallies), picture, words, spark([value for _, value in probes]),
                probe, "" if probe is None else _change(probes), _newest(found, "knn"),
                _newest(found, "effective_rank"), probe is None and any("probe" in score.results for score in found),
                found[-1].dataset if found else None, baselines(run, found))
        )  # fmt: skip
    return made


def baselines(run: Run, scores: Sequence[queries.Score]) -> Baselines:
    """Return the baselines of a run's scores, which are of one data set and in the order of the rounds."""
    first = scores[0].results if scores and scores[0].round_number == 0 else {}
    before = "untrained" if (run.spec.get("model") or {}).get("initial") is None else "start"
    return Baselines(before, first, scores[-1].chance if scores else None)


def _newest(scores: Sequence[queries.Score], name: str) -> float | None:
    return next((score.results[name] for score in reversed(scores) if name in score.results), None)


def _change(probes: Sequence[tuple[int, float]]) -> str:
    """Return the change since the score at least ten rounds before, or else since the previous one, in words."""
    if len(probes) < 2:
        return ""
    number, value = probes[-1]
    earlier = [(at, score) for at, score in probes[:-1] if at <= number - _BACK] or probes[:-1]
    at, score = earlier[-1]
    return f"{formats.points(value - score)} points since round {at}"


def needing_attention(session: Session, known: Sequence[Row] = ()) -> list[Row]:
    """Return the unfinished runs that need attention. `known`: rows that the same page shows, to compute none twice."""
    by_run = {row.run.id: row for row in known}
    found: list[Row] = []
    before = None
    while active := queries.page(session, PAGE, before, "active", ""):
        if others := [run for run in active if run.id not in by_run]:
            by_run |= {row.run.id: row for row in rows(session, others)}
        found += [by_run[run.id] for run in active if by_run[run.id].status.needs_attention]
        before = (active[-1].created_at, active[-1].id)
    return found


def totals(session: Session) -> tuple[queries.Facts, dict[str, int], int]:
    """Return the four figures, how many runs there are in each group, and how many of the active ones are paused."""
    return queries.facts(session), queries.group_counts(session), queries.num_paused(session)
