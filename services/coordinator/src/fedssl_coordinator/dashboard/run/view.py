"""One run as its page shows it: figures, who holds it up, and why."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from sqlalchemy.orm import Session

from fedssl.protocol.runs import RunSpec
from fedssl.protocol.states import AssignmentState, RunState
from fedssl.protocol.views import DistillationJobView
from fedssl_coordinator.core.models import Event, Round, Run
from fedssl_coordinator.core.problems import ProblemError
from fedssl_coordinator.dashboard.layout import formats
from fedssl_coordinator.dashboard.layout.client_labels import Named, named
from fedssl_coordinator.dashboard.run import queries as run_queries
from fedssl_coordinator.dashboard.run.queries import Part, Traffic
from fedssl_coordinator.dashboard.runs import overview
from fedssl_coordinator.dashboard.runs import queries as overview_queries
from fedssl_coordinator.federation import run_rows
from fedssl_coordinator.federation.dimensions import repository as dimensions
from fedssl_coordinator.federation.distillation import service as distillation
from fedssl_coordinator.identity import clients

SHOWN_CLIENTS = 24
"""Rows of the timeline; past them, those that hold up the run come first."""

_EVENTS = 8
ROUTINE = (
    "assignment.leased",
    "assignment.submitted",
    "assignment.accepted",
    "round.aggregating",
    "evaluation.queued",
    "evaluation.started",
)
"""Kinds of events that tell of nothing but work going on."""


@dataclass(frozen=True, slots=True)
class Doing:
    """What one client does now: an icon's name and a sentence."""

    client: Named
    word: str
    text: str

    @property
    def is_exception(self) -> bool:
        return self.word in ("expired", "rejected", "declined", "warn")


@dataclass(frozen=True, slots=True)
class RunPage:
    """Everything on a run's page but the numbers of its charts."""

    row: overview.Row
    spec: RunSpec
    current: Round | None
    members: list[Named]
    doing: list[Doing]
    num_hidden: int
    traffic: Traffic
    job: DistillationJobView | None
    num_jobs: int
    events: Sequence[Event]
    last_event_id: int
    dimensions: list[tuple[str, int, int]]
    width: int
    num_classes: int | None
    names: list[str]
    is_judged: bool

    @property
    def run(self) -> Run:
        return self.row.run

    @property
    def is_live(self) -> bool:
        """Whether anything may still happen: the last evaluation goes on after the run has finished."""
        return self.run.state != RunState.FINISHED or self.is_judged

    @property
    def shape(self) -> str:
        """What panels there are, in a few letters; the parts of the page that hang on them come anew with another."""
        goes_on = (self.run.state, self.is_live, self.run.rounds_closed > 0)
        panels = ([client.id for client in self.members], self.names, self.dimensions, self.num_jobs)
        return hashlib.sha256(repr((goes_on, panels)).encode()).hexdigest()[:12]


def get(session: Session, run_id: UUID) -> Run:
    """Raises ProblemError where there is no such run."""
    run = run_rows.get(session, run_id)
    if run is None:
        raise ProblemError("not-found", f"There is no run {run_id}. The list of runs has all existing runs.")
    return run


def run_page(session: Session, run_id: UUID) -> RunPage:
    """Everything on the page, in about fifteen queries, none of which reads what a chart reads."""
    run = get(session, run_id)
    [row] = overview.rows(session, [run])
    spec = RunSpec.model_validate(run.spec)
    newest = overview_queries.last_rounds(session, [run_id], limit=4).get(run_id, [])
    current = newest[-1] if newest else None
    ids = run_queries.client_ids(session, run_id) or clients.eligible(session, spec.cohort.clients)
    members = named(ids)
    parts = run_queries.parts(session, run_id, current.number, current.number) if current else []
    doing = in_order(_doing(session, run, current, members, parts))
    jobs = run_queries.distillations(session, run_id, 1)
    wanted = spec.method.dimensions_wanted(spec.model)
    owned = sorted((d, client) for client, its in dimensions.by_client(session, run_id).items() for d in its)
    return RunPage(
        row=row,
        spec=spec,
        current=current,
        members=members,
        doing=doing[:SHOWN_CLIENTS],
        num_hidden=max(0, len(doing) - SHOWN_CLIENTS),
        traffic=run_queries.traffic(session, run_id),
        job=distillation.view(jobs[0]) if jobs else None,
        num_jobs=run_queries.num_distillations(session, run_id) if jobs else 0,
        events=run_queries.newest_events(session, run_id, _EVENTS, but=ROUTINE),
        last_event_id=run_queries.last_event_id(session, run_id),
        dimensions=stretches(owned),
        width=wanted.width if wanted is not None else 0,
        num_classes=run_queries.num_classes(session, spec.evaluation.dataset) if spec.evaluation else None,
        names=_names(session, run_id, current),
        is_judged=run_queries.is_judged(session, run_id),
    )


def _names(session: Session, run_id: UUID, current: Round | None) -> list[str]:
    """What clients send, by the last round that all of them may have sent it in; else by the first."""
    last = max(current.number - 1, 1) if current else 1
    return run_queries.metric_names(session, run_id, last) or run_queries.metric_names(session, run_id, 1)


def in_order(doing: list[Doing]) -> list[Doing]:
    """By name; where there are too many to show, exceptions first."""
    if len(doing) <= SHOWN_CLIENTS:
        return doing
    return sorted(doing, key=lambda one: (not one.is_exception, one.word == "accepted"))


def _doing(
    session: Session, run: Run, current: Round | None, members: Sequence[Named], parts: Sequence[Part]
) -> list[Doing]:
    newest = {part.client_id: part for part in parts}  # attempts come in order, so the last one stays
    known = run_queries.presence(session, [client.id for client in members])
    found = []
    for client in members:
        (seen_at, revoked_at), part = known.get(client.id, (None, None)), newest.get(client.id)
        if revoked_at is not None:
            found.append(Doing(client, "warn", f"revoked {formats.ago(revoked_at)}"))
            continue
        word, text = _words(run, current, part, seen_at)
        found.append(Doing(client, word, text))
    return found


def _words(run: Run, current: Round | None, part: Part | None, seen_at: datetime | None) -> tuple[str, str]:
    if part is None or current is None:
        return "offered", "not part of this round" if current else "waits for the first round"
    number, is_over = current.number, run.state == RunState.FINISHED
    attempt = f", attempt {part.attempt}" if part.attempt > 1 else ""
    match part.state:
        case AssignmentState.ACCEPTED | AssignmentState.SUBMITTED:
            after = (
                f"delivered round {number}" if is_over or number >= run.num_rounds else f"waits for round {number + 1}"
            )
            return "accepted", after + attempt
        case AssignmentState.LEASED:
            return _training(part)
        case AssignmentState.OFFERED:
            silent = seen_at is None or datetime.now(UTC) - seen_at > timedelta(seconds=overview_queries.SEEN_SECONDS)
            if silent:
                return "warn", f"last seen {formats.ago(seen_at)}: round {number} not claimed yet{attempt}"
            return "offered", f"has not claimed round {number} yet{attempt}"
        case state:
            return state, f"{state} in round {number}{attempt}: {part.reason or 'no reason given'}"


def _training(part: Part) -> tuple[str, str]:
    if part.lease_expires_at is not None and part.lease_expires_at <= datetime.now(UTC):
        return "warn", f"no heartbeat: the lease expired {formats.ago(part.lease_expires_at)}"
    progress = part.progress or {}
    if not progress:
        return "running", f"has claimed round {part.round_number}"
    steps = progress.get("num_steps") or 0
    share = f", {formats.percent(progress.get('step', 0) / steps, 0)}" if steps else ""
    epoch = f", epoch {min(progress.get('epoch', 0) + 1, progress['num_epochs'])} of {progress['num_epochs']}"
    is_training = progress.get("phase") == "training" and progress.get("num_epochs")
    return "running", f"{progress.get('phase', 'training')}{epoch if is_training else ''}{share}"


def stretches(owned: Sequence[tuple[int, str]]) -> list[tuple[str, int, int]]:
    """Runs of neighbouring dimensions with one owner: owner, first, how many."""
    found: list[tuple[str, int, int]] = []
    for dimension, client in owned:
        if found and found[-1][0] == client and found[-1][1] + found[-1][2] == dimension:
            found[-1] = (client, found[-1][1], found[-1][2] + 1)
        else:
            found.append((client, dimension, 1))
    return found


def flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A spec with dotted keys, as `--set` takes them; lists stay whole."""
    found: dict[str, Any] = {}
    for name, inner in value.items():
        if isinstance(inner, Mapping):
            found |= flat(inner, f"{prefix}{name}.")
        else:
            found[prefix + name] = inner
    return found


def shown(value: object) -> str:
    """A setting as people read it."""
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
    """The settings that one looks for first."""
    training, cohort = spec.training, spec.cohort
    needed = "all" if cohort.min_updates is None else formats.number(cohort.min_updates)
    members = "every client" if cohort.clients is None else formats.plural(len(cohort.clients), "client")
    share = "" if cohort.fraction == 1 else f", {formats.percent(cohort.fraction, 0)} per round"
    optimizer = training.optimizer
    return [
        ("Method", spec.method.info.title),
        ("Encoder", spec.model.encoder.name),
        ("Local training", f"{formats.plural(training.local_epochs, 'epoch')}, batch {training.batch_size}"),
        ("Optimiser", f"{optimizer.name}, {optimizer.learning_rate:g}, {optimizer.schedule}"),
        ("Images", f"{spec.data.channels} × {spec.data.image_size} × {spec.data.image_size}"),
        ("Cohort", f"{members}{share}"),
        ("Updates needed", needed),
        ("Deadline", formats.seconds(cohort.deadline_seconds)),
        ("Attempts", f"{cohort.max_attempts}, then {cohort.without_quorum}"),
        ("Seed", str(spec.seed)),
        ("Leaves the client", spec.method.info.leaves_the_client),
    ]
