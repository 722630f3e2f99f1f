"""One run as its page shows it: figures, the clients that it waits for, and why."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from sqlalchemy.orm import Session

from fedssl.protocol.runs import RunSpec
from fedssl.protocol.secure_aggregation import NOT_PROMISED
from fedssl.protocol.states import AssignmentState, Cause, Outcome, RunState
from fedssl.protocol.views import DistillationJobView
from fedssl.wording import plural
from fedssl_coordinator.core import database_clock
from fedssl_coordinator.core.models import Event, Round, Run
from fedssl_coordinator.core.problems import ProblemError
from fedssl_coordinator.core.run_documents import spec_of
from fedssl_coordinator.dashboard.layout import formats
from fedssl_coordinator.dashboard.layout.client_labels import Named, named
from fedssl_coordinator.dashboard.run import queries as run_queries
from fedssl_coordinator.dashboard.run import site_queries
from fedssl_coordinator.dashboard.run.queries import Attempt
from fedssl_coordinator.dashboard.run.site_queries import Progress
from fedssl_coordinator.dashboard.run.traffic import Traffic, traffic
from fedssl_coordinator.dashboard.runs import overview
from fedssl_coordinator.dashboard.runs import queries as overview_queries
from fedssl_coordinator.federation import run_rows
from fedssl_coordinator.federation.dimensions import repository as dimensions
from fedssl_coordinator.federation.distillation import service as distillation
from fedssl_coordinator.federation.rounds.unseen import SEEN_SECONDS
from fedssl_coordinator.identity import clients

SHOWN_CLIENTS = 24
"""Rows of the timeline. If there are more clients, those that the run waits for come first."""

CAUSES = {
    Cause.CLIENT_DATA: "the client's data",
    Cause.CLIENT_MACHINE: "the client's machine",
    Cause.COORDINATOR: "the coordinator",
    Cause.SPEC: "the run's settings",
}
"""The causes of declined work, for people."""

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
class Activity:
    """A client's current activity: an icon's name and a sentence."""

    client: Named
    word: str
    text: str

    @property
    def is_exception(self) -> bool:
        return self.word in ("expired", "rejected", "declined", "warn")


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
    activities = in_order(_activities(session, run, current, members, attempts))
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


def in_order(activities: list[Activity]) -> list[Activity]:
    """Return the activities by name, or if there are too many to show, exceptions first."""
    if len(activities) <= SHOWN_CLIENTS:
        return activities
    return sorted(activities, key=lambda one: (not one.is_exception, one.word == "accepted"))


def _activities(
    session: Session, run: Run, current: Round | None, members: Sequence[Named], attempts: Sequence[Attempt]
) -> list[Activity]:
    by_client = {one.client_id: one for one in attempts}  # attempts come in order, so the last one stays
    known = run_queries.presence(session, [client.id for client in members])
    found = []
    for client in members:
        (seen_at, revoked_at), newest = known.get(client.id, (None, None)), by_client.get(client.id)
        if revoked_at is not None:
            found.append(Activity(client, "warn", f"revoked {formats.ago(revoked_at)}"))
            continue
        word, text = _words(run, current, newest, seen_at)
        found.append(Activity(client, word, text))
    return found


def _words(run: Run, current: Round | None, newest: Attempt | None, seen_at: datetime | None) -> tuple[str, str]:
    is_over = run.state == RunState.FINISHED
    if newest is None or current is None:
        before = "no round was opened" if is_over else "waits for the first round"
        return "offered", "not part of this round" if current else before
    number = current.number
    attempt = f", attempt {newest.attempt}" if newest.attempt > 1 else ""
    match newest.state:
        case AssignmentState.ACCEPTED | AssignmentState.SUBMITTED:
            after = (
                f"delivered round {number}" if is_over or number >= run.num_rounds else f"waits for round {number + 1}"
            )
            return "accepted", after + attempt
        case AssignmentState.LEASED:
            return _training(newest)
        case AssignmentState.OFFERED:
            silent = seen_at is None or database_clock.now() - seen_at > timedelta(seconds=SEEN_SECONDS)
            if silent:
                return "warn", f"last seen {formats.ago(seen_at)}: round {number} not claimed yet{attempt}"
            return "offered", f"has not claimed round {number} yet{attempt}"
        case state:
            whose = f" ({CAUSES[Cause(newest.cause)]})" if newest.cause else ""
            return state, f"{state} in round {number}{attempt}{whose}: {newest.reason or 'no reason given'}"


def _training(attempt: Attempt) -> tuple[str, str]:
    if attempt.lease_expires_at is not None and attempt.lease_expires_at <= database_clock.now():
        return "warn", f"no heartbeat: the lease expired {formats.ago(attempt.lease_expires_at)}"
    progress = attempt.progress or {}
    if not progress:
        return "running", f"has claimed round {attempt.round_number}"
    steps = progress.get("num_steps") or 0
    share = f", {formats.percent(progress.get('step', 0) / steps, 0)}" if steps else ""
    epoch = f", epoch {max(1, progress.get('epoch', 0))} of {progress['num_epochs']}"
    is_training = progress.get("phase") == "training" and progress.get("num_epochs")
    speed = progress.get("images_per_second") if is_training else None
    pace = f", {formats.number(speed)} images/s" if speed else ""
    held = _machine(attempt.resources or {})
    return "running", f"{progress.get('phase', 'training')}{epoch if is_training else ''}{share}{pace}{held}"


def _machine(resources: Mapping[str, Any]) -> str:
    named = [(resources.get("memory_bytes"), "memory"), (resources.get("gpu_memory_bytes"), "GPU memory")]
    held = "".join(f", {formats.in_bytes(num_bytes)} {name}" for num_bytes, name in named if num_bytes is not None)
    busy = resources.get("gpu_utilisation")
    return held if busy is None else f"{held}, GPU {formats.percent(busy, 0)} busy"


def stretches(owned: Sequence[tuple[int, str]]) -> list[tuple[str, int, int]]:
    """Return the runs of neighbouring dimensions with one owner: owner, first dimension, number of them."""
    found: list[tuple[str, int, int]] = []
    for dimension, client in owned:
        if found and found[-1][0] == client and found[-1][1] + found[-1][2] == dimension:
            found[-1] = (client, found[-1][1], found[-1][2] + 1)
        else:
            found.append((client, dimension, 1))
    return found


def flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a spec with dotted keys, as `--set` takes them. Lists stay whole."""
    found: dict[str, Any] = {}
    for name, inner in value.items():
        if isinstance(inner, Mapping):
            found |= flat(inner, f"{prefix}{name}.")
        else:
            found[prefix + name] = inner
    return found


def shown(value: object) -> str:
    """Format a setting for people."""
    if value is None:
        return formats.NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(shown(inner) for inner in value) or "none"
    if isinstance(value, Mapping):
        name, rest = value.get("name"), {key: inner for key, inner in value.items() if key != "name"}
        inside = ", ".join(f"{key} {shown(inner)}" for key, inner in rest.items() if inner is not None)
        return f"{name} ({inside})" if name and inside else str(name or inside)
    return str(value)


def summary(spec: RunSpec) -> list[tuple[str, str]]:
    """Return the most important settings."""
    training, cohort = spec.training, spec.cohort
    needed = "all" if cohort.min_updates is None else formats.number(cohort.min_updates)
    members = "every client" if cohort.clients is None else plural(len(cohort.clients), "client")
    share = "" if cohort.fraction == 1 else f", {formats.percent(cohort.fraction, 0)} per round"
    optimizer = training.optimizer
    part = "" if training.epoch_fraction == 1 else f" of {formats.percent(training.epoch_fraction)} of the batches"
    return [
        ("Method", spec.method.info.title),
        ("Encoder", spec.model.encoder.name),
        ("Local training", f"{plural(training.local_epochs, 'epoch')}{part}, batch {training.batch_size}"),
        ("Optimiser", f"{optimizer.name}, {optimizer.learning_rate:g}, {optimizer.schedule}"),
        ("Images", f"{spec.data.channels} × {spec.data.image_size} × {spec.data.image_size}"),
        ("Cohort", f"{members}{share}"),
        ("Updates needed", needed),
        ("Deadline", formats.seconds(cohort.deadline_seconds)),
        ("Attempts", f"{cohort.max_attempts}, then {cohort.without_quorum}"),
        *_secure(spec),
        ("Seed", str(spec.seed)),
        ("Leaves the client", spec.method.info.leaves_the_client),
    ]


def _secure(spec: RunSpec) -> list[tuple[str, str]]:
    config = spec.secure_aggregation
    if config is None:
        return []
    return [("Secure aggregation", f"sums of {formats.number(config.min_cohort)} updates or more. {NOT_PROMISED}")]
