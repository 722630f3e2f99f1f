"""Checks that the events of a run are a path of the state machines, and that they lead to the states in the rows.

The coordinator records an event with every change of a state, in the same transaction. So the events of a run, in
their order, must describe its life: each change is legal according to the code's own TRANSITIONS, it follows from
the earlier ones, the numbers are right, and nothing comes after the end.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from fedssl.protocol.states import AssignmentState, JobState, Outcome, RoundState, RunState, Verdict
from fedssl.protocol.views import EventView
from fedssl_coordinator.core import models
from fedssl_coordinator.federation.transitions import TRANSITIONS
from support.tables import Tables

LIVE = (AssignmentState.OFFERED, AssignmentState.LEASED, AssignmentState.SUBMITTED)
UNFINISHED = (JobState.QUEUED, JobState.RUNNING)

EVALUATIONS = (models.Evaluation, models.SiteEvaluation)

_LIFE = {
    "run.created",
    "run.prepared",
    "run.waiting",
    "round.opened",
    "round.reoffered",
    "distillation.queued",
    "distillation.resumed",
    "distillation.stalled",
    "assignment.resumed",
    *(kind for table, changes in TRANSITIONS.items() if table not in EVALUATIONS for kind in changes.values()),
}
"""Events that only a run which has not ended may have. Evaluations and refusals may come later."""


class ImpossibleTrace(AssertionError):
    """The events of a run cannot have happened in this order."""


@dataclass
class TracedRound:
    """A round, as the events report it."""

    state: str
    cohort: frozenset[str]
    verdict: str | None = None
    assignments: dict[str, str] = field(default_factory=dict)
    """The state of each assignment that has had an event, by its id."""
    clients: dict[str, str] = field(default_factory=dict)
    """The client of each assignment, by its id."""
    newest: dict[str, str] = field(default_factory=dict)
    """Each client's newest assignment."""
    num_left_out: int = 0

    def of(self, state: str) -> list[str]:
        """Return the clients whose newest assignment is in a state."""
        return [client for client, newest in self.newest.items() if self.assignments[newest] == state]


@dataclass
class Trace:
    """A run, as its events report it."""

    state: str | None = None
    outcome: str | None = None
    is_prepared: bool = False
    num_rounds: int | None = None
    rounds: dict[int, TracedRound] = field(default_factory=dict)
    jobs: dict[str, str] = field(default_factory=dict)
    evaluations: dict[str, str] = field(default_factory=dict)

    def follow(self, event: EventView) -> None:
        """Apply one event. Raises ImpossibleTrace if the event is impossible in this state."""
        if self.state is None and event.kind in _LIFE and event.kind != "run.created":
            raise ImpossibleTrace("the run was not created")
        if self.state == RunState.FINISHED and event.kind in _LIFE and event.kind != "run.resumed":
            raise ImpossibleTrace(f"the run had ended as {self.outcome}")
        prefix = event.kind.partition(".")[0]
        step = getattr(self, f"_{event.kind.replace('.', '_')}", None) or getattr(self, f"_any_{prefix}", None)
        if step is not None:
            step(event)

    # Runs

    def _run_created(self, event: EventView) -> None:
        _require(self.state is None, "the run was created before")
        self.state = RunState.CREATED
        if found := re.search(r"(\d+) rounds$", event.message):
            self.num_rounds = int(found[1])

    def _run_prepared(self, _: EventView) -> None:
        _require(not self.is_prepared, "the run was prepared before")
        _require(not self.rounds, "a round was opened before")
        self.is_prepared = True

    def _run_finished(self, event: EventView) -> None:
        self.outcome = event.data["outcome"]
        self._any_run(event)
        _require(self._unclosed() is None, f"round {max(self.rounds, default=0)} is not closed")
        unfinished = [job for job, state in self.jobs.items() if state in UNFINISHED]
        _require(not unfinished, f"the job {unfinished} has not ended")
        if self.outcome == Outcome.COMPLETED and self.num_rounds is not None:
            counted = [traced for traced in self.rounds.values() if traced.verdict != Verdict.FAILED]
            _require(len(counted) == self.num_rounds, f"{len(counted)} of {self.num_rounds} rounds are closed")

    def _run_resumed(self, event: EventView) -> None:
        is_continued = self.outcome == Outcome.COMPLETED and "num_rounds" in event.data
        _require(self.outcome in (None, Outcome.FAILED) or is_continued, f"the run had ended as {self.outcome}")
        if is_continued:
            self.num_rounds = event.data["num_rounds"]
        self._any_run(event)
        self.outcome = None

    def _any_run(self, event: EventView) -> None:
        self.state = _after(models.Run, self.state, event.kind)

    # Rounds

    def _round_opened(self, event: EventView) -> None:
        number = _number(event)
        _require(self.state == RunState.RUNNING, f"the run is {self.state}")
        _require(self.is_prepared, "the run is not prepared")
        _require(self._unclosed() is None, "another round is in progress")
        _require(number == len(self.rounds) + 1, f"{len(self.rounds)} rounds were opened before")
        _require(self.num_rounds is None or number <= self.num_rounds, f"the run has {self.num_rounds} rounds")
        self.rounds[number] = TracedRound(RoundState.OPEN, frozenset(event.data["cohort"]))

    def _round_reoffered(self, event: EventView) -> None:
        traced = self._round(event)
        _require(traced.state == RoundState.OPEN, f"the round is {traced.state}")
        clients = set(event.data["clients"])
        _require(clients <= traced.cohort, f"{clients - traced.cohort} are not of the cohort")
        _require(not clients & set(traced.of(AssignmentState.ACCEPTED)), "a client whose update is accepted")

    def _round_aggregating(self, event: EventView) -> None:
        traced = self._round(event)
        traced.state = _after(models.Round, traced.state, event.kind)
        _require(not any(traced.of(state) for state in LIVE), "work is live")
        counted = (len(traced.of(AssignmentState.ACCEPTED)), len(traced.cohort))
        _require_numbers(event.message, r"aggregating (\d+) of (\d+) updates?", counted)
        _require(counted[0] >= 1, "no update is accepted")

    def _round_closed(self, event: EventView) -> None:
        traced = self._round(event)
        before, verdict = traced.state, event.data["verdict"]
        traced.state, traced.verdict = _after(models.Round, before, event.kind), verdict
        _require(not any(traced.of(state) for state in LIVE), "work is live")
        _require(set(event.data["clients"]) == traced.cohort, f"the cohort is {sorted(traced.cohort)}")
        if verdict in (Verdict.AGGREGATED, Verdict.PARTIAL):
            _require(before != RoundState.OPEN, "nothing was aggregated")
            num_used = len(traced.of(AssignmentState.ACCEPTED)) - traced.num_left_out
            _require_numbers(event.message, r"(\d+) of (\d+) updates?", (num_used, len(traced.cohort)))
            _require(num_used >= 1, "no update was used")
        last = max(self.rounds)
        _require(_number(event) == last, f"round {last} is the newest")

    def _any_round(self, event: EventView) -> None:
        traced = self._round(event)
        _require(_number(event) == max(self.rounds), "the round is not the newest")
        before, traced.state = traced.state, _after(models.Round, traced.state, event.kind)
        if before == RoundState.CLOSED:
            _require(traced.verdict == Verdict.FAILED, f"the round was closed as {traced.verdict}")
            traced.verdict = None

    # Assignments

    def _assignment_leased(self, event: EventView) -> None:
        self._move(event)
        _require(self.state in (RunState.RUNNING, RunState.PAUSED), f"the run is {self.state}")

    def _assignment_resumed(self, event: EventView) -> None:
        state = self._round(event).assignments.get(event.data["assignment"])
        _require(state == AssignmentState.LEASED, f"the assignment is {state}")

    def _assignment_expired(self, event: EventView) -> None:
        self._move(event, in_open_round=False)

    def _assignment_rejected(self, event: EventView) -> None:
        self._move(event, in_open_round=False)

    def _assignment_refused(self, _: EventView) -> None:
        """Accept the event at any time, because the request changed nothing."""

    def _any_assignment(self, event: EventView) -> None:
        self._move(event)

    def _update_rejected(self, event: EventView) -> None:
        """Count the update as accepted but not used, unless an accepted assignment can become rejected."""
        if (models.Assignment, "accepted", "rejected") not in _legal():
            self._round(event).num_left_out += 1

    def _move(self, event: EventView, *, in_open_round: bool = True) -> None:
        traced, client, assignment = self._round(event), event.client_id, event.data["assignment"]
        assert client is not None
        _require(client in traced.cohort, "the client is not of the cohort")
        _require(traced.clients.setdefault(assignment, client) == client, "the assignment is another client's")
        if assignment not in traced.assignments:
            earlier = traced.assignments.get(traced.newest.get(client, ""))
            _require(earlier not in LIVE, f"the client's other assignment is {earlier}")
            _require(earlier != AssignmentState.ACCEPTED, "the client's update is accepted")
            traced.newest[client] = assignment
        _require(traced.newest[client] == assignment, "the client has a newer assignment")
        _require(traced.state != RoundState.CLOSED, "the round is closed")
        _require(not in_open_round or traced.state == RoundState.OPEN, f"the round is {traced.state}")
        before = traced.assignments.get(assignment, AssignmentState.OFFERED)
        traced.assignments[assignment] = _after(models.Assignment, before, event.kind)

    # Jobs

    def _distillation_queued(self, event: EventView) -> None:
        _require(not [job for job, state in self.jobs.items() if state in UNFINISHED], "another job has not ended")
        _require(self.state == RunState.RUNNING, f"the run is {self.state}")
        if event.round_number:
            _require(self._round(event).state == RoundState.DISTILLING, "the round does not distil")
        self.jobs[event.data["job"]] = JobState.QUEUED

    def _distillation_resumed(self, event: EventView) -> None:
        _require(self.jobs.get(event.data["job"]) == JobState.RUNNING, "the job does not run")

    def _distillation_stalled(self, event: EventView) -> None:
        _require(self.jobs.get(event.data["job"]) in UNFINISHED, "the job has ended")

    def _any_distillation(self, event: EventView) -> None:
        job = event.data["job"]
        self.jobs[job] = _after(models.DistillationJob, self.jobs.get(job), event.kind)

    def _evaluation_queued(self, event: EventView) -> None:
        evaluation = event.data["evaluation"]
        before = self.evaluations.get(evaluation)
        known = before is not None
        self.evaluations[evaluation] = _after(models.Evaluation, before, event.kind) if known else JobState.QUEUED

    def _any_evaluation(self, event: EventView) -> None:
        if event.kind in TRANSITIONS[models.Evaluation].values():
            evaluation = event.data["evaluation"]
            before = self.evaluations.get(evaluation)
            self.evaluations[evaluation] = _after(models.Evaluation, before, event.kind)

    def _round(self, event: EventView) -> TracedRound:
        traced = self.rounds.get(_number(event))
        if traced is None:
            raise ImpossibleTrace(f"round {event.round_number} was not opened")
        return traced

    def _unclosed(self) -> TracedRound | None:
        return next((traced for traced in self.rounds.values() if traced.state != RoundState.CLOSED), None)


def follow(events: Iterable[EventView]) -> Trace:
    """Return the life that the events of one run, oldest first, report. Raises ImpossibleTrace at the first impossible
    event."""
    trace, before = Trace(), list[EventView]()
    for event in events:
        try:
            _require(not before or event.id > before[-1].id, "the events are not in their order")
            trace.follow(event)
        except ImpossibleTrace as error:
            reported = [f"  {each.id} {each.kind}: {each.message}" for each in (*before[-20:], event)]
            raise ImpossibleTrace("\n".join([f"{event.kind} cannot be: {error}", *reported])) from error
        before.append(event)
    return trace


def check(tables: Tables, run_id: UUID) -> Trace:
    """Follow a run's events, and compare what they report with its rows. Raises ImpossibleTrace."""
    # One statement, because processes may still write: all rows are from one moment.
    [(events, runs, rounds, assignments, jobs, evaluations)] = tables.query(
        "SELECT coalesce((SELECT jsonb_agg(to_jsonb(e) ORDER BY id) FROM events e WHERE run_id = v.id), '[]'), "
        "(SELECT jsonb_agg(jsonb_build_array(state, outcome, plan IS NOT NULL)) FROM runs WHERE id = v.id), "
        "(SELECT jsonb_object_agg(number, jsonb_build_array(state, verdict)) FROM rounds WHERE run_id = v.id), "
        "(SELECT jsonb_object_agg(id, state) FROM assignments WHERE run_id = v.id AND state <> 'offered'), "
        "(SELECT jsonb_object_agg(id, state) FROM distillation_jobs WHERE run_id = v.id), "
        "(SELECT jsonb_object_agg(id, state) FROM evaluations WHERE run_id = v.id) FROM (SELECT %s::uuid AS id) v",
        run_id,
    )
    trace = follow(map(EventView.model_validate, events))
    if runs is None:  # the run was deleted
        return trace
    reported: dict[str, Any] = {
        "run": [[trace.state, trace.outcome, trace.is_prepared]],
        "rounds": {str(number): [traced.state, traced.verdict] for number, traced in trace.rounds.items()},
        "assignments": {name: state for traced in trace.rounds.values() for name, state in traced.assignments.items()},
        "jobs": trace.jobs,
        "evaluations": trace.evaluations,
    }
    found = dict(zip(reported, (runs, rounds or {}, assignments or {}, jobs or {}, evaluations or {}), strict=True))
    for name, rows in found.items():
        _require(
            reported[name] == rows,
            f"the events of run {run_id} report {name}: {reported[name]}, and the rows are {rows}",
        )
    return trace


def check_all(tables: Tables, *but: UUID) -> list[UUID]:
    """Check every run, and return those that have ended. Raises ImpossibleTrace."""
    runs = [run_id for (run_id,) in tables.query("SELECT id FROM runs") if run_id not in but]
    return [run_id for run_id in runs if check(tables, run_id).state == RunState.FINISHED]


def _after(table: Any, before: str | None, kind: str) -> str:
    """Return the state to which an event of this kind leads. Raises ImpossibleTrace if that is not legal."""
    found = [after for (legal, after), own in TRANSITIONS[table].items() if own == kind and legal == before]
    if not found:
        if kind not in TRANSITIONS[table].values():
            return before or ""  # it reports something else
        raise ImpossibleTrace(f"{table.__tablename__}: it is {before}")
    [after] = found
    return after


def _legal() -> set[tuple[Any, str, str]]:
    return {(table, *map(str, change)) for table, changes in TRANSITIONS.items() for change in changes}


def _number(event: EventView) -> int:
    _require(event.round_number is not None, "it names no round")
    assert event.round_number is not None
    return event.round_number


def _require_numbers(message: str, pattern: str, expected: tuple[int, int]) -> None:
    found = re.search(pattern, message)
    _require(found is not None and tuple(map(int, found.groups())) == expected, f"it should be {expected}")


def _require(is_so: bool, otherwise: str) -> None:  # noqa: FBT001 - reads as a sentence
    if not is_so:
        raise ImpossibleTrace(otherwise)
