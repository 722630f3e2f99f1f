"""The activities of a run's clients, in words."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy.orm import Session

from fedssl.protocol.states import AssignmentState, Cause, RunState
from fedssl_coordinator.core import database_clock
from fedssl_coordinator.core.models import Round, Run
from fedssl_coordinator.dashboard.layout import formats
from fedssl_coordinator.dashboard.layout.client_labels import Named
from fedssl_coordinator.dashboard.run import queries as run_queries
from fedssl_coordinator.dashboard.run.queries import Attempt
from fedssl_coordinator.federation.rounds.unseen import SEEN_SECONDS

SHOWN_CLIENTS = 24
"""Rows of the timeline. If there are more clients, those that the run waits for come first."""

CAUSES = {
    Cause.CLIENT_DATA: "the client's data",
    Cause.CLIENT_MACHINE: "the client's machine",
    Cause.COORDINATOR: "the coordinator",
    Cause.SPEC: "the run's settings",
}
"""The causes of declined work, for people."""


@dataclass(frozen=True, slots=True)
class Activity:
    """A client's current activity: an icon's name and a sentence."""

    client: Named
    word: str
    text: str

    @property
    def is_exception(self) -> bool:
        return self.word in ("expired", "rejected", "declined", "warn")


def in_order(activities: list[Activity]) -> list[Activity]:
    """Return the activities by name, or if there are too many to show, exceptions first."""
    if len(activities) <= SHOWN_CLIENTS:
        return activities
    return sorted(activities, key=lambda one: (not one.is_exception, one.word == "accepted"))


def activities_of(
    session: Session, run: Run, current: Round | None, members: Sequence[Named], attempts: Sequence[Attempt]
) -> list[Activity]:
    """Return what each client is doing. `attempts`: those of the current round, in order."""
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
