"""One run as its page shows it: figures, the clients that it waits for, and why."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

from sqlalchemy.orm import Session

from fedssl.protocol.runs import RunSpec
from fedssl.protocol.states import Outcome, RunState
from fedssl.protocol.views import DistillationJobView
from fedssl_coordinator.core.models import Event, Round, Run
from fedssl_coordinator.core.problems import ProblemError
from fedssl_coordinator.core.run_documents import spec_of
from fedssl_coordinator.dashboard.layout.client_labels import Named, named
from fedssl_coordinator.dashboard.run import queries as run_queries
from fedssl_coordinator.dashboard.run import site_queries
from fedssl_coordinator.dashboard.run.activities import SHOWN_CLIENTS, Activity, activities_of, in_order
from fedssl_coordinator.dashboard.run.site_queries import Progress
from fedssl_coordinator.dashboard.run.traffic import Traffic, traffic
from fedssl_coordinator.dashboard.runs import overview
from fedssl_coordinator.dashboard.runs import queries as overview_queries
from fedssl_coordinator.federation import run_rows
from fedssl_coordinator.federation.dimensions import repository as dimensions
from fedssl_coordinator.federation.distillation import service as distillation
from fedssl_coordinator.identity import clients

_VERBS = {
    RunState.CREATED: ("start", "stop"),
    RunState.RUNNING: ("pause", "stop"),
    RunState.PAUSED: ("resume", "stop"),
}
_EVENTS = 8
ROUTINE = (
    "assignment.leased",
    "assignment.submitted",
    "assignment.accepted",
    "round.aggregating",
    "evaluation.queued",
    "evaluation.started",
)
"""Kinds of events that report only progress."""


@dataclass(frozen=True, slots=True)
class RunPage:
    """Everything on a run's page except the numbers of its charts."""

    row: overview.Row
    spec: RunSpec
    current: Round | None
    members: list[Named]
    activities: list[Activity]
    num_hidden: int
    traffic: Traffic
    job: DistillationJobView | None
    num_jobs: int
    events: Sequence[Event]
    last_event_id: int
    dimensions: list[tuple[str, int, int]]
    width: int
    names: list[str]
    is_judged: bool
    site_progress: Progress | None

    @property
    def run(self) -> Run:
        return self.row.run

    @property
    def is_live(self) -> bool:
        """True if the page may still change: the last evaluation may continue after the run has finished."""
        is_awaited = self.site_progress is not None and self.site_progress.awaited > 0
        return self.run.state != RunState.FINISHED or self.is_judged or is_awaited

    @property
    def verbs(self) -> tuple[str, ...]:
        """The actions that the run's state permits."""
        if self.run.outcome == Outcome.FAILED:
            return ("resume",)
        return _VERBS.get(RunState(self.run.state), ())

    @property
    def shape(self) -> str:
        """A digest of the panels' arrangement. When it changes, the attempts that depend on it are sent again."""
        goes_on = (self.run.state, self.is_live, self.run.rounds_closed > 0)
        members = [client.id for client in self.members]
        panels = (members, self.names, self.dimensions, self.num_jobs, self.site_progress)
        return hashlib.sha256(repr((goes_on, panels)).encode()).hexdigest()[:12]


def get(session: Session, run_id: UUID) -> Run:
    """Return the run. Raises ProblemError if it does not exist."""
    run = run_rows.get(session, run_id)
    if run is None:
        raise ProblemError("not-found", f"There is no run {run_id}. The list of runs has all that you may see.")
    return run


def run_page(session: Session, run_id: UUID) -> RunPage:
    """Return everything on the page with about sixteen queries, without the charts' numbers."""
    run = get(session, run_id)
    [row] = overview.rows(session, [run])
    spec = spec_of(run)
    newest = overview_queries.last_rounds(session, [run_id], limit=4).get(run_id, [])
    current = newest[-1] if newest else None
    ids = run_queries.client_ids(session, run_id) or clients.eligible(session, run.project, spec.cohort.clients)
    members = named(ids)
    attempts = run_queries.attempts(session, run_id, current.number, current.number) if current else []
    activities = in_order(activities_of(session, run, current, members, attempts))
    jobs = run_queries.distillations(session, run_id, 1)
    wanted = spec.method.dimensions_wanted(spec.model)
    owned = sorted((d, client) for client, its in dimensions.by_client(session, run_id).items() for d in its)
    return RunPage(
        row=row,
        spec=spec,
        current=current,
        members=members,
        activities=activities[:SHOWN_CLIENTS],
        num_hidden=max(0, len(activities) - SHOWN_CLIENTS),
        traffic=traffic(session, run),
        job=distillation.view(jobs[0]) if jobs else None,
        num_jobs=run_queries.num_distillations(session, run_id) if jobs else 0,
        events=run_queries.newest_events(session, run_id, _EVENTS, but=ROUTINE),
        last_event_id=run_queries.last_event_id(session, run_id),
        dimensions=stretches(owned),
        width=wanted.width if wanted is not None else 0,
        names=_names(session, run_id, current),
        is_judged=run_queries.is_judged(session, run_id),
        site_progress=site_queries.progress(session, run_id) if spec.site_evaluation is not None else None,
    )


def _names(session: Session, run_id: UUID, current: Round | None) -> list[str]:
    """Return the names of the metrics in the round before the current one, or in the first if it has none."""
    last = max(current.number - 1, 1) if current else 1
    return run_queries.metric_names(session, run_id, last) or run_queries.metric_names(session, run_id, 1)


def stretches(owned: Sequence[tuple[int, str]]) -> list[tuple[str, int, int]]:
    """Return the runs of neighbouring dimensions with one owner: owner, first dimension, number of them."""
    found: list[tuple[str, int, int]] = []
    for dimension, client in owned:
        if found and found[-1][0] == client and found[-1][1] + found[-1][2] == dimension:
            found[-1] = (client, found[-1][1], found[-1][2] + 1)
        else:
            found.append((client, dimension, 1))
    return found
