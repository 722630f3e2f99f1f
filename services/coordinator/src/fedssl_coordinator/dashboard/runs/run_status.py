"""A run's status, a word and a reason: derived from its round, its leases and its jobs, not only from its row.

"Running" does not explain why a run makes no progress. If its round is past the deadline, or if none of the missing
clients has been seen for a while, a run is *stalled*, and the reason names what it waits for and what happens next.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from fedssl.protocol.states import AssignmentState, JobState, Outcome, RoundState, RunState, Verdict
from fedssl.protocol.training import CohortConfig
from fedssl.wording import plural
from fedssl_coordinator.core import database_clock
from fedssl_coordinator.core.models import DistillationJob, Round, Run
from fedssl_coordinator.dashboard.layout import formats
from fedssl_coordinator.dashboard.runs.queries import Missing

_NAMED = 3
_TAKEN_SECONDS = 60.0  # a process that is free takes a job at once
_REFUSALS = (AssignmentState.EXPIRED, AssignmentState.REJECTED, AssignmentState.DECLINED)


@dataclass(frozen=True, slots=True)
class RunStatus:
    """`word` also names an icon, `phase` describes the current work, `needs_attention` asks an operator to act."""

    word: str
    reason: str
    phase: str = ""
    needs_attention: bool = False


@dataclass(frozen=True, slots=True)
class Last:
    """The verdict of the last closed round, or a text in its place if no round is closed."""

    word: str
    reason: str
    number: int | None = None


def run_status(
    run: Run,
    rounds: Sequence[Round],
    tally: Mapping[AssignmentState, int],
    absent: Sequence[Missing],
    job: DistillationJob | None,
    num_eligible: int,
    declined: str | None = None,
    unattended: str | None = None,
) -> RunStatus:
    """Return the status of a run.

    `rounds` are the newest rounds, oldest first; `tally` and `absent` describe the last of them; `job` is unfinished;
    `declined` names the clients that have declined that round, with their reasons; `unattended` is the reason if the
    run only waits for an aggregator.
    """
    if run.state == RunState.CREATED:
        return RunStatus("created", "waiting to be started")
    if run.state == RunState.PAUSED:
        return RunStatus(
            "paused", run.reason or "no new work is handed out; resume it to continue", needs_attention=bool(run.reason)
        )
    if run.state == RunState.FINISHED:
        return _ended(run)
    if reason := run.reason or unattended:
        return RunStatus("stalled", reason, needs_attention=True)
    if job is not None:
        return _distilling(job)
    current = rounds[-1] if rounds and rounds[-1].state != RoundState.CLOSED else None
    if current is None:
        return _between(run, num_eligible)
    if current.state == RoundState.AGGREGATING:
        return RunStatus("running", f"aggregating round {current.number}", f"round {current.number}, aggregating")
    return _open(run, rounds, current, tally, absent, declined)


def _ended(run: Run) -> RunStatus:
    took = formats.seconds(_seconds(run.started_at, run.finished_at))
    if run.outcome == Outcome.COMPLETED:
        return RunStatus("completed", f"took {took}")
    if run.outcome == Outcome.STOPPED:
        return RunStatus("stopped", f"{run.reason or 'stopped'} after {took}")
    return RunStatus("failed", run.reason or f"after {took}")


def _distilling(job: DistillationJob) -> RunStatus:
    where = f"for round {job.round_number}" if job.round_number else "before round 1"
    done = f"{job.epoch} of {plural(job.num_epochs, 'distillation epoch')}"
    if job.reason:
        return RunStatus("stalled", f"distillation {where}: {job.reason}", needs_attention=True)
    if job.state == JobState.QUEUED and (database_clock.now() - job.created_at).total_seconds() > _TAKEN_SECONDS:
        waits = f"distillation {where} waits for a process that serves the queue distill"
        return RunStatus("stalled", f"{waits}, or for earlier jobs", needs_attention=True)
    return RunStatus("distilling", f"{done} {where}", where)


def _between(run: Run, num_eligible: int) -> RunStatus:
    cohort = CohortConfig.model_construct(**run.spec["cohort"])
    if num_eligible < cohort.min_clients:
        reason = f"{num_eligible} of {plural(cohort.min_clients, 'required client')} registered: start more workers"
        return RunStatus("stalled", reason, needs_attention=True)
    what = "creating the initial weights" if run.broadcast is None else f"opening round {run.rounds_closed + 1}"
    return RunStatus("running", what, "preparing" if run.broadcast is None else "")


def _open(
    run: Run,
    rounds: Sequence[Round],
    current: Round,
    tally: Mapping[AssignmentState, int],
    absent: Sequence[Missing],
    declined: str | None,
) -> RunStatus:
    cohort = CohortConfig.model_construct(**run.spec["cohort"])
    everybody, accepted = sum(tally.values()), tally.get(AssignmentState.ACCEPTED, 0)
    needed = min(cohort.min_updates or everybody, everybody)
    state = f"{accepted} of {plural(everybody, 'update')} received"
    then = f"deadline {formats.clock(current.deadline)[:5]} UTC, then {_after(current, accepted, needed, cohort)}"
    if declined is not None:
        is_working = any(one.state == AssignmentState.LEASED for one in absent)
        word, phase = "running" if is_working else "stalled", f"round {current.number}, {state}"
        return RunStatus(word, f"{declined}; {state}; {then}", phase, needs_attention=True)
    waited_for = [one.client_id for one in absent if not one.is_seen]
    if current.deadline <= database_clock.now():
        return RunStatus("stalled", f"round {current.number} is past its deadline: {state}", needs_attention=True)
    if waited_for and len(waited_for) == len(absent):
        who = f"{names(waited_for)} {'has' if len(waited_for) == 1 else 'have'} not been seen recently"
        return RunStatus("stalled", f"{state}; {who}; {then}", f"round {current.number}", needs_attention=True)
    left = _left(run, rounds)
    return RunStatus("running", left or f"{state}; {then}", f"round {current.number}, {state}")


def _after(current: Round, accepted: int, needed: int, cohort: CohortConfig) -> str:
    if accepted >= needed:
        return "the round is closed as partial"
    if current.attempt < cohort.max_attempts:
        return f"missing updates are offered again, attempt {current.attempt + 1} of {cohort.max_attempts}"
    return "the run fails" if cohort.without_quorum == "fail" else "the round is skipped"


def names(client_ids: Sequence[str]) -> str:
    """Return the names like `a, b and 3 more`."""
    shown, more = list(client_ids[:_NAMED]), len(client_ids) - _NAMED
    if more > 0:
        return f"{', '.join(shown)} and {more} more"
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)


def _left(run: Run, rounds: Sequence[Round]) -> str:
    """Return the remaining time at the speed of the last rounds, or nothing if it is unknown.

    The time that the open round has taken so far is subtracted, until it takes longer than those before.
    """
    closed = [row for row in rounds if row.closed_at is not None][-10:]
    passed = _seconds(closed[0].opened_at, closed[-1].closed_at) if closed else None
    if passed is None:
        return ""
    per_round, current = passed / len(closed), rounds[-1]
    so_far = 0.0 if current.closed_at is not None else (database_clock.now() - current.opened_at).total_seconds()
    left = per_round * (run.num_rounds - run.rounds_closed) - min(max(so_far, 0.0), per_round)
    return f"{formats.seconds(left)} left"


def _seconds(start: datetime | None, end: datetime | None) -> float | None:
    return None if start is None or end is None else (end - start).total_seconds()


def last_verdict(rounds: Sequence[Round], tallies: Mapping[UUID, Mapping[AssignmentState, int]]) -> Last:
    """Return the verdict of the newest closed round of `rounds`, with its numbers of clients."""
    closed = [row for row in rounds if row.verdict is not None]
    if not closed:
        return Last("", "no rounds closed yet")
    row = closed[-1]
    return Last(row.verdict or "", verdict_reason(row, tallies.get(row.id, {})), row.number)


def verdict_reason(row: Round, tally: Mapping[AssignmentState, int]) -> str:
    """Return the round's reason, or its numbers like `10 of 11, 1 declined`."""
    everybody, accepted = sum(tally.values()), tally.get(AssignmentState.ACCEPTED, 0)
    if row.verdict in (Verdict.FAILED, Verdict.SKIPPED) and row.reason:
        return row.reason
    refused = [f"{tally[state]} {state}" for state in _REFUSALS if tally.get(state)]
    return ", ".join([f"{accepted} of {everybody}", *refused])
