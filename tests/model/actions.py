"""The actions of the model. Each is one transaction of the coordinator, or an event outside of it.

An action takes a state and yields each state that may follow, with the step to it. Its docstring names the function of
the code that it models. Every change of a state goes through `_moved`, which takes what is legal from the code's own
table TRANSITIONS: an action that the table does not allow is a violation.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

from fedssl.protocol.states import AssignmentState, JobState, Outcome, RoundState, RunState, Verdict
from fedssl_coordinator.core import models as tables
from fedssl_coordinator.federation import retries
from fedssl_coordinator.federation.rounds import steps
from fedssl_coordinator.federation.transitions import TRANSITIONS
from model.states import DISTILLER, Computation, Job, Member, Round, Run, Setup, State


class Step(NamedTuple):
    """One step: the action, the client or the process that it is about, and its outcome."""

    action: str
    who: int | None = None
    detail: str = ""

    def __str__(self) -> str:
        who = "" if self.who is None else f" {self.who}"
        return f"{self.action}{who}" + (f" ({self.detail})" if self.detail else "")


Successors = Iterator[tuple[Step, State]]
Branches = Iterator[tuple[str, State]]
Action = Callable[[State, Setup], Successors]
S = TypeVar("S", RunState, RoundState, AssignmentState, JobState)

taken: set[tuple[type, str, str]] = set()
"""Every transition of the code's table that an action of this process has taken."""


class Violation(AssertionError):
    """The model broke a promise: there is a bug in the model, or in the code that it mirrors."""


def allows(table: type, before: str, after: str) -> bool:
    """Return whether the code's table has this transition."""
    return (before, after) in TRANSITIONS[table]


# Behaviours of some versions of the code. In the other versions, the actions that model them do nothing.
_REJECTS = allows(tables.Assignment, AssignmentState.ACCEPTED, AssignmentState.REJECTED)
_ASKS_AGAIN = allows(tables.Round, RoundState.AGGREGATING, RoundState.OPEN)
_TAKES_UP = allows(tables.Run, RunState.FINISHED, RunState.RUNNING)
_CHECKS_INPUTS = hasattr(steps.Step, "CHECK_INPUTS")
_QUARANTINES = hasattr(retries, "MOST_DEATHS")


# What operators do: runs/service.py, clients/service.py


def start(state: State, setup: Setup) -> Successors:
    """`runs.service.change`, verb start."""
    if state.run.state is RunState.CREATED:
        yield Step("start"), _run(state, RunState.RUNNING)


def pause(state: State, setup: Setup) -> Successors:
    """`runs.service.change`, verb pause."""
    if state.run.state is RunState.RUNNING:
        yield Step("pause"), _run(state, RunState.PAUSED)


def resume(state: State, setup: Setup) -> Successors:
    """`runs.service.change`, verb resume: the pause counts neither against the round nor against a retry."""
    if state.run.state is RunState.PAUSED:
        state = _run(state._replace(run=state.run.without_tries()), RunState.RUNNING)
        if state.job is not None:
            state = state._replace(job=state.job._replace(pauses=False, num_deaths=0))
        if state.round is not None and state.is_open:
            state = state._replace(round=state.round._replace(is_overdue=False))
        yield Step("resume"), state


def take_up(state: State, setup: Setup) -> Successors:
    """`rounds.reopening.take_up`: a failed run is resumed, and the round in which it failed is opened again."""
    if state.run.outcome is not Outcome.FAILED or not allows(tables.Run, RunState.FINISHED, RunState.RUNNING):
        return
    state = _run(state._replace(run=state.run.without_tries(outcome=None)), RunState.RUNNING)
    if state.round is not None and state.round.verdict is Verdict.FAILED:
        state = _round(state, RoundState.OPEN)
        assert state.round is not None
        reopened = state.round._replace(attempt=1, is_overdue=False, verdict=None)
        state = state._replace(round=reopened, members=tuple(map(_taken_up, state.members)))
    yield Step("take_up"), state


def stop(state: State, setup: Setup) -> Successors:
    """`runs.service.change`, verb stop."""
    if state.run.state is not RunState.FINISHED:
        yield Step("stop"), _end_run(state, Outcome.STOPPED)


def revoke(state: State, setup: Setup) -> Successors:
    """`clients.service.revoke`: the client's live assignments end, its accepted updates stay."""
    for index, member in enumerate(state.members):
        if not member.is_revoked:
            revoked = _expired(member) if member.is_live else member
            yield Step("revoke", index), state.with_member(index, revoked._replace(is_revoked=True))


def cancel_job(state: State, setup: Setup) -> Successors:
    """`distillation.service.cancel`: the run pauses, and queues another job when it is resumed."""
    if state.job is not None:
        state = _end_job(state, JobState.CANCELLED)
        yield Step("cancel_job"), _run(state, RunState.PAUSED) if state.run.state is RunState.RUNNING else state


# What workers do: work/service.py


def register(state: State, setup: Setup) -> Successors:
    """`work.service.register`: the worker starts again, perhaps with another policy; pauses of its offers end."""
    for index, member in enumerate(state.members):
        if member.is_revoked:
            continue
        waits = member.waits and member.assignment is not AssignmentState.OFFERED
        for refuses in (False, True) if "policies" in setup.events else (False,):
            after = member._replace(is_registered=True, refuses=refuses, waits=waits)
            if after != member:
                yield Step("register", index, "refusing" if refuses else "accepting"), state.with_member(index, after)


def claim(state: State, setup: Setup) -> Successors:
    """`work.service.claim`: an offer is leased, or a lease resumed."""
    if state.run.state is not RunState.RUNNING or not state.is_open:
        return
    for index, member in enumerate(state.members):
        if member.is_revoked:
            continue
        if member.assignment is AssignmentState.OFFERED and not member.waits:
            _state_is_right(member)
            yield Step("claim", index), state.with_member(index, _assigned(member, AssignmentState.LEASED))
        elif member.assignment is AssignmentState.LEASED:
            yield Step("claim", index, "again"), state.with_member(index, member._replace(waits=False))


def heartbeat(state: State, setup: Setup) -> Successors:
    """`work.service.heartbeat`: a lease is renewed, even one that has run out, if no check has ended it."""
    for index, member in enumerate(state.members):
        if member.assignment is AssignmentState.LEASED and not member.is_revoked:
            yield Step("heartbeat", index), state.with_member(index, member._replace(waits=False))


def submit(state: State, setup: Setup) -> Successors:
    """`work.service.submit`: leased -> submitted -> accepted in one transaction, unless the round has enough updates.

    A paused run accepts updates. Every other submission is refused and changes nothing, including one for an assignment
    that has ended. A submission that repeats an accepted one changes nothing either.
    """
    if not state.is_open or state.has_enough:
        return
    assert state.round is not None
    for index, member in enumerate(state.members):
        if member.assignment is AssignmentState.LEASED and not member.is_revoked:
            submitted = _assigned(member, AssignmentState.SUBMITTED)
            accepted = _assigned(submitted, AssignmentState.ACCEPTED)._replace(last_accepted=state.round.number)
            yield Step("submit", index), state.with_member(index, accepted)


def decline(state: State, setup: Setup) -> Successors:
    """`work.service.decline`."""
    for index, member in enumerate(state.members):
        if member.assignment is AssignmentState.LEASED and state.is_open and not member.is_revoked:
            yield Step("decline", index), state.with_member(index, _assigned(member, AssignmentState.DECLINED))


# What the aggregators do: rounds/service.py and aggregator/rounds.py


def next_step(state: State, setup: Setup) -> Successors:
    """`rounds.service.next_step`, after a message: any number of them may come, at any time."""
    for process in range(1, 1 + setup.num_aggregators):
        if state.computations[process] is None and state.run.state is RunState.RUNNING:
            for detail, after in _next(state, setup, process):
                if after != state:
                    yield Step("next_step", process, detail), after


def sweep(state: State, setup: Setup) -> Successors:
    """`rounds.service.next_step`, after `aggregator.tasks.sweep`: for runs that need attention."""
    if needs_attention(state):
        yield from next_step(state, setup)


def read_updates(state: State, setup: Setup) -> Successors:
    """`aggregator.rounds.aggregate`, first transaction: which updates are there."""
    for process, computation in _aggregations(state):
        if not computation.has_read and computation.round_number:
            current = state.unclosed
            if current is None or current.state is not RoundState.AGGREGATING:
                yield Step("read_updates", process, "no longer due"), state.with_computation(process, None)
            else:
                reading = state.with_computation(process, Computation(current.number, has_read=True))
                yield Step("read_updates", process), reading.reads(process)


def publish(state: State, setup: Setup) -> Successors:
    """`aggregator.rounds.prepare` and `aggregate`, last transaction: the weights, unless they are no longer due.

    If the code may reject an accepted update by name, each of them may be left out.
    """
    for process, computation in _aggregations(state):
        if not computation.has_read and computation.round_number:
            continue
        done = state.with_computation(process, None)
        if not computation.round_number:
            if state.run.state is not RunState.FINISHED and not state.run.is_prepared:
                done = done._replace(run=done.run.without_tries(is_prepared=True))
            yield Step("publish", process, "first weights"), done
        elif not _is_still_due(state, computation) or _has_changed(state, process):
            yield Step("publish", process, "no longer due"), done
        else:
            for detail, closed in _new_weights(state, done, process, setup):
                yield Step("publish", process, detail), closed


def aggregation_fails(state: State, setup: Setup) -> Successors:
    """`rounds.service.record_failure`: a temporary error or a missing file. The computation is retried later."""
    for process, _ in _aggregations(state):
        failed = state.with_computation(process, None)
        if state.run.state is not RunState.FINISHED:
            failed = failed._replace(run=failed.run._replace(pauses=True, was_tried=True, num_deaths=0))
        yield Step("aggregation_fails", process), failed


def aggregation_is_impossible(state: State, setup: Setup) -> Successors:
    """`aggregator.rounds._fail`: an error that ends the run."""
    for process, computation in _aggregations(state):
        if not computation.has_read and computation.round_number:
            continue
        failed = state.with_computation(process, None)
        is_due = not computation.round_number or _is_still_due(state, computation)
        if state.run.state is not RunState.FINISHED and is_due:
            failed = _end_run(failed, Outcome.FAILED)
        yield Step("aggregation_is_impossible", process), failed


def update_is_lost(state: State, setup: Setup) -> Successors:
    """`rounds.reopening.ask_again`, by an aggregator or the distiller: the store has lost updates of the round."""
    if not _ASKS_AGAIN:
        return
    for process, computation in enumerate(state.computations):
        if computation is None or not computation.has_read or not computation.round_number:
            continue
        lost = [member for member in state.members if process in member.read_by and member.is_damaged]
        if lost and process == DISTILLER:
            yield Step("update_is_lost", process), _asked_again(_end_job(state, JobState.CANCELLED), process, state)
        elif lost and _is_still_due(state, computation) and not _has_changed(state, process):
            yield Step("update_is_lost", process), _asked_again(state.with_computation(process, None), process, state)


def updates_are_useless(state: State, setup: Setup) -> Successors:
    """`rounds.closing.end_without_result`: too many updates are rejected by name for the round to give new weights."""
    if not _REJECTS:
        return
    for process, computation in enumerate(state.computations):
        if computation is None or not computation.has_read or not computation.round_number:
            continue
        if process != DISTILLER and (not _is_still_due(state, computation) or _has_changed(state, process)):
            continue
        done = _end_job(state, JobState.FAILED) if process == DISTILLER else state.with_computation(process, None)
        members = tuple(
            _assigned(after, AssignmentState.REJECTED)._replace(last_accepted=after.used)
            if process in before.read_by
            else after
            for before, after in zip(state.members, done.members, strict=True)
        )
        yield Step("updates_are_useless", process), _without_result(done._replace(members=members), setup)


def update_is_damaged(state: State, setup: Setup) -> Successors:
    """Let the store lose an accepted update of the round in progress."""
    for index, member in enumerate(state.members):
        if member.is_accepted and not member.is_damaged and state.unclosed is not None:
            yield Step("update_is_damaged", index), state.with_member(index, member._replace(is_damaged=True))


def aggregator_dies(state: State, setup: Setup) -> Successors:
    """Kill an aggregator, or break its connection to Postgres: its locks are released, and it writes nothing."""
    for process, _ in _aggregations(state):
        yield Step("aggregator_dies", process), state.with_computation(process, None)


# What the distiller does: distillation/service.py, jobs/service.py and aggregator/distillation.py


def begin_job(state: State, setup: Setup) -> Successors:
    """`distillation.service.begin`: a job of a running run, or one that was begun, whose pause is over."""
    job = state.job
    if job is None or state.computations[DISTILLER] is not None:
        return
    if job.state is not JobState.RUNNING and state.run.state is not RunState.RUNNING:
        return
    if job.state is JobState.RUNNING and _is_quarantined(job.num_deaths, setup):
        if state.run.state is RunState.RUNNING:
            yield Step("begin_job", None, "quarantined"), _run(state, RunState.PAUSED)
        return
    if job.pauses:
        return
    if job.state is JobState.QUEUED:
        _moved(tables.DistillationJob, job.state, JobState.RUNNING)
    begun = job._replace(state=JobState.RUNNING, pauses=True, num_deaths=_one_more(job.num_deaths, setup))
    reading = state.with_computation(DISTILLER, Computation(job.round_number, has_read=True))._replace(job=begun)
    yield Step("begin_job"), reading.reads(DISTILLER)


def complete_job(state: State, setup: Setup) -> Successors:
    """`aggregator.distillation._publish`: weights, round and job in one transaction. The run may be paused."""
    if state.computations[DISTILLER] is None:
        return
    if state.job is None:
        raise Violation("a computation whose job has ended would publish")
    number = state.job.round_number
    done = _end_job(state, JobState.COMPLETED)
    if not number:
        yield Step("complete_job"), done._replace(run=done.run.without_tries(is_prepared=True))
        return
    if state.unclosed is None or (state.unclosed.number, state.unclosed.state) != (number, RoundState.DISTILLING):
        raise Violation("a job is unfinished, and its round is not distilling")
    for detail, closed in _new_weights(state, done, DISTILLER, setup):
        yield Step("complete_job", None, detail), closed


def job_fails(state: State, setup: Setup) -> Successors:
    """`jobs.service.record_failure`: a temporary error. The job is retried after a pause."""
    if state.computations[DISTILLER] is not None and state.job is not None:
        job = state.job._replace(pauses=True, num_deaths=0)
        yield Step("job_fails"), state.with_computation(DISTILLER, None)._replace(job=job)


def job_is_impossible(state: State, setup: Setup) -> Successors:
    """`aggregator.distillation._fail`: an error that ends job and run."""
    if state.computations[DISTILLER] is not None and state.job is not None:
        yield Step("job_is_impossible"), _end_run(_end_job(state, JobState.FAILED), Outcome.FAILED)


def distiller_dies(state: State, setup: Setup) -> Successors:
    """Kill the distiller: its lock is released, and the try that it began counts."""
    if state.computations[DISTILLER] is not None:
        yield Step("distiller_dies"), state.with_computation(DISTILLER, None)


def distiller_leaves(state: State, setup: Setup) -> Successors:
    """`jobs.service.record_departure`: the process ends cleanly, and another may resume the job at once."""
    if state.computations[DISTILLER] is not None and state.job is not None:
        yield (
            Step("distiller_leaves"),
            state.with_computation(DISTILLER, None)._replace(job=state.job._replace(pauses=False, num_deaths=0)),
        )


# What the clock does


def lease_ends(state: State, setup: Setup) -> Successors:
    """Let a lease run out, because no heartbeat came within it."""
    for index, member in enumerate(state.members):
        if member.assignment is AssignmentState.LEASED and not member.waits:
            yield Step("lease_ends", index), state.with_member(index, member._replace(waits=True))


def deadline_passes(state: State, setup: Setup) -> Successors:
    """Let the round's deadline pass."""
    if state.round is not None and state.is_open and not state.round.is_overdue:
        yield Step("deadline_passes"), state._replace(round=state.round._replace(is_overdue=True))


def pause_ends(state: State, setup: Setup) -> Successors:
    """End the pause of a client that declined, of a failed computation, or of a failed job."""
    for index, member in enumerate(state.members):
        if member.assignment is AssignmentState.OFFERED and member.waits:
            yield Step("pause_ends", index), state.with_member(index, member._replace(waits=False))
    if state.run.pauses:
        yield Step("pause_ends", None, "of the run"), state._replace(run=state.run._replace(pauses=False))
    if state.job is not None and state.job.pauses and state.computations[DISTILLER] is None:
        yield Step("pause_ends", None, "of the job"), state._replace(job=state.job._replace(pauses=False))


HEALTHY: tuple[Action, ...] = (
    start,
    resume,
    claim,
    submit,
    sweep,
    read_updates,
    publish,
    begin_job,
    complete_job,
    pause_ends,
)
"""The steps of parts that all do their work, while messages are lost: no other may be needed for a run to end."""

TIME: tuple[Action, ...] = (lease_ends, deadline_passes, pause_ends)

ALWAYS: tuple[Action, ...] = (*HEALTHY, next_step, stop, heartbeat, aggregator_dies, *TIME)

OPTIONAL: dict[str, tuple[Action, ...]] = {
    "pauses": (pause, cancel_job),
    "revocations": (revoke,),
    "declines": (decline,),
    "restarts": (register,),
    "policies": (register,),
    "failures": (aggregation_fails, job_fails, distiller_dies, distiller_leaves),
    "losses": (update_is_damaged, update_is_lost),
    "useless updates": (updates_are_useless,),
    "runs taken up": (take_up,),
    "final failures": (aggregation_is_impossible, job_is_impossible),
}


def actions(setup: Setup) -> tuple[Action, ...]:
    """Return all actions that may be taken in this exploration."""
    chosen = itertools.chain.from_iterable(OPTIONAL[name] for name in sorted(setup.events))
    return tuple(dict.fromkeys((*ALWAYS, *chosen)))


def needs_attention(state: State) -> bool:
    """`rounds.repository.needing_attention`."""
    if state.run.state is not RunState.RUNNING or state.run.pauses:
        return False
    is_open = state.is_open
    in_progress = is_open and not state.round.is_overdue and any(member.is_live for member in state.members)  # type: ignore[union-attr]
    lost = is_open and any(_is_lost(member) for member in state.members)
    enough = is_open and state.has_enough
    return not (in_progress or state.job is not None) or lost or enough


# Parts of `next_step`


def _next(state: State, setup: Setup, process: int) -> Branches:
    if not state.run.is_prepared:
        if setup.distils_first:
            yield "queue the first job", _queue(state, 0)
        else:
            yield from _begun(state, setup, process, 0)
        return
    current = state.unclosed
    if current is None:
        if state.run.rounds_closed >= setup.num_rounds:
            yield "complete", _end_run(state, Outcome.COMPLETED)
        else:
            yield from _opened(state, setup)
    elif current.state is RoundState.AGGREGATING:
        yield from _begun(state, setup, process, current.number)
    elif current.state is RoundState.DISTILLING:
        yield "queue a job", _queue(state, current.number)
    else:
        yield _checked(state, setup, current)


def _begun(state: State, setup: Setup, process: int, number: int) -> Branches:
    """`_begin`: a try is counted, with the pause that follows if its process dies."""
    if _is_quarantined(state.run.num_deaths, setup):
        yield f"quarantine {number}", _run(state, RunState.PAUSED)
    elif not state.run.pauses:
        tried = state.run._replace(pauses=True, was_tried=True, num_deaths=_one_more(state.run.num_deaths, setup))
        begun = state._replace(run=tried)
        yield f"begin {number}", begun.with_computation(process, Computation(number, has_read=False))


def _queue(state: State, number: int) -> State:
    return state if state.job is not None else state._replace(job=Job(JobState.QUEUED, number))


def _opened(state: State, setup: Setup) -> Branches:
    """`_open`: for every cohort that the seed may choose."""
    cohort = setup.cohort
    able = [index for index, member in enumerate(state.members) if member.is_eligible and not member.refuses]
    num_wanted = cohort.num_wanted(len(able))
    if len(able) < cohort.min_clients or num_wanted < (cohort.min_updates or 0):
        return  # the run waits for clients
    num_asked = cohort.num_asked(len(able))
    number = state.run.rounds_closed + 1
    opened = Round(number, RoundState.OPEN, num_wanted=num_wanted if num_asked > num_wanted else None)
    for chosen in itertools.combinations(able, num_asked):
        members = tuple(
            _offered(_without_assignment(member)) if index in chosen else _without_assignment(member)
            for index, member in enumerate(state.members)
        )
        run = state.run.without_tries()
        yield f"open round {number} to {list(chosen)}", state._replace(run=run, round=opened, members=members)


def _checked(state: State, setup: Setup, current: Round) -> tuple[str, State]:
    """`_check_open_round`."""
    cohort = setup.cohort
    is_over = current.is_overdue or state.has_enough
    members = tuple(_checked_member(member, offer_again=not is_over) for member in state.members)
    if any(member.is_live for member in members) and not is_over:
        return "check", state._replace(members=members, run=state.run.without_tries())
    members = tuple(_expired(member) if member.is_live else member for member in members)
    state = state._replace(members=members)
    asked = [member for member in members if member.assignment is not None]
    missing = [member for member in asked if not member.is_accepted and member.is_eligible]
    num_awaited = sum(not member.refuses for member in missing)
    num_accepted = len(state.accepted)
    quorum = cohort.min_updates
    if quorum is None:
        num_possible = num_accepted + num_awaited
        quorum = max(1, num_possible if current.num_wanted is None else min(num_possible, current.num_wanted))
    if num_accepted >= quorum:
        state = _round(state, RoundState.AGGREGATING)
        if setup.distils_rounds:
            return "distil", _queue(_round(state, RoundState.DISTILLING), current.number)
        return "aggregate", state
    if missing and _CHECKS_INPUTS and state.run.pauses:
        return "wait", state
    is_free = _CHECKS_INPUTS and state.run.was_tried  # the coordinator was at fault until now
    if missing and (is_free or current.attempt < cohort.max_attempts):
        again = tuple(
            _offered(member, waits=member.assignment is AssignmentState.DECLINED and not is_free)
            if member.assignment is not None and not member.is_accepted and member.is_eligible
            else member
            for member in members
        )
        offered = current._replace(attempt=current.attempt + (not is_free), is_overdue=False)
        run = state.run.without_tries() if is_free else state.run
        return "offer again", state._replace(run=run, round=offered, members=again)
    return "give up", _without_result(state, setup)


def _without_result(state: State, setup: Setup) -> State:
    """`_without_quorum`: the round closes as skipped, or the run ends."""
    if setup.cohort.without_quorum != "skip":
        return _end_run(state, Outcome.FAILED)
    state = _closed(state, Verdict.SKIPPED)
    return state._replace(run=state.run._replace(rounds_closed=state.run.rounds_closed + 1))


def _checked_member(member: Member, *, offer_again: bool) -> Member:
    """`_end_lost`, for one client."""
    if not _is_lost(member):
        return member
    expired = _expired(member)
    return _offered(expired) if offer_again and not member.is_revoked else expired


def _is_lost(member: Member) -> bool:
    ran_out = member.assignment is AssignmentState.LEASED and member.waits
    return ran_out or (member.is_live and member.is_revoked)


# Parts of several actions


def _aggregations(state: State) -> Iterator[tuple[int, Computation]]:
    for process, computation in enumerate(state.computations):
        if process != DISTILLER and computation is not None:
            yield process, computation


def _is_still_due(state: State, computation: Computation) -> bool:
    """`aggregator.rounds._still_due`."""
    expected = (computation.round_number, RoundState.AGGREGATING)
    return state.unclosed is not None and (state.unclosed.number, state.unclosed.state) == expected


def _has_changed(state: State, process: int) -> bool:
    """`aggregator.rounds._are_accepted` is false: another process has lost an update in the meantime."""
    read = {index for index, member in enumerate(state.members) if process in member.read_by}
    return (_ASKS_AGAIN or _TAKES_UP) and read != state.accepted


def _asked_again(done: State, process: int, before: State) -> State:
    """`rounds.reopening.ask_again`: the round is open again, with its whole time, and no attempt is counted."""
    opened = _round(done, RoundState.OPEN)
    assert opened.round is not None
    members = tuple(
        _offered(_expired(after)._replace(last_accepted=after.used))
        if process in was.read_by and was.is_damaged
        else after
        for was, after in zip(before.members, opened.members, strict=True)
    )
    run = opened.run.without_tries()
    return opened._replace(run=run, round=opened.round._replace(is_overdue=False), members=members)


def _taken_up(member: Member) -> Member:
    """`rounds.reopening._reopen`, for one client of the round: accepted updates count, the others are asked again."""
    if member.assignment is None:
        return member
    if member.is_accepted and (member.is_damaged or not member.is_eligible):
        member = _expired(member)._replace(last_accepted=member.used)
    is_asked = not member.is_accepted and member.is_eligible and not member.refuses
    return _offered(member) if is_asked else member


def _is_quarantined(num_deaths: int, setup: Setup) -> bool:
    """`retries.is_quarantined`."""
    return _QUARANTINES and num_deaths >= setup.most_deaths


def _one_more(num_deaths: int, setup: Setup) -> int:
    """Count a try that may end its process. Beyond the limit the number changes nothing."""
    return min(num_deaths + 1, setup.most_deaths) if _QUARANTINES else 0


def _new_weights(state: State, done: State, process: int, setup: Setup) -> Branches:
    """`aggregator.rounds.publish_next`: the round closes with the weights of the updates that the process has read."""
    assert state.round is not None
    used = {index for index, member in enumerate(state.members) if process in member.read_by}
    if used != state.accepted:
        raise Violation(f"accepted are {sorted(state.accepted)}, and the weights contain {sorted(used)}")
    for num_rejected in range(len(used) if _REJECTS and setup.rejects_updates else 1):
        for rejected in map(set, itertools.combinations(sorted(used), num_rejected)):
            yield _label(rejected), _with_weights(state, done, used - rejected, rejected)


def _label(rejected: set[int]) -> str:
    return f"without {sorted(rejected)}" if rejected else ""


def _with_weights(state: State, done: State, used: set[int], rejected: set[int]) -> State:
    assert state.round is not None
    members = []
    for index, member in enumerate(done.members):
        if index in rejected:
            member = _assigned(member, AssignmentState.REJECTED)._replace(last_accepted=member.used)
        elif index in used:
            member = member._replace(used=state.round.number)
        members.append(member)
    cohort_size = sum(member.assignment is not None for member in members)
    is_whole = len(used) >= (state.round.num_wanted or cohort_size)
    done = _closed(done._replace(members=tuple(members)), Verdict.AGGREGATED if is_whole else Verdict.PARTIAL)
    return done._replace(run=done.run.without_tries(rounds_closed=done.run.rounds_closed + 1))


def _end_run(state: State, outcome: Outcome) -> State:
    """`rounds.closing.end_run`: the job, the round and the run."""
    if state.job is not None:
        state = _end_job(state, JobState.CANCELLED)
    if state.unclosed is not None:
        state = _closed(state, Verdict.FAILED)
    return _run(state, RunState.FINISHED, outcome=outcome)


def _end_job(state: State, after: JobState) -> State:
    """`jobs.service.end`: from now on `still_running` refuses everything that the distiller would write for the job."""
    assert state.job is not None
    _moved(tables.DistillationJob, state.job.state, after)
    return state.with_computation(DISTILLER, None)._replace(job=None)


def _closed(state: State, verdict: Verdict) -> State:
    """`rounds.closing.close_round`: the live assignments end. A skipped round's updates are not the clients' states."""
    members = tuple(_expired(member) if member.is_live else member for member in state.members)
    if verdict is Verdict.SKIPPED:
        members = tuple(member._replace(last_accepted=member.used) for member in members)
    closed = _round(state._replace(members=members), RoundState.CLOSED)
    assert closed.round is not None
    return closed._replace(round=closed.round._replace(verdict=verdict))


def _run(state: State, after: RunState, **values: object) -> State:
    run: Run = state.run._replace(state=_moved(tables.Run, state.run.state, after), **values)  # type: ignore[arg-type]
    return state._replace(run=run)


def _round(state: State, after: RoundState) -> State:
    assert state.round is not None
    return state._replace(round=state.round._replace(state=_moved(tables.Round, state.round.state, after)))


def _offered(member: Member, *, waits: bool = False) -> Member:
    """`rounds.repository.offer`: a new row. Postgres refuses a second live one, and a second accepted one later."""
    if member.is_live or member.is_accepted:
        raise Violation(f"offered to a client whose assignment is {member.assignment}")
    return member._replace(assignment=AssignmentState.OFFERED, waits=waits, is_damaged=False, read_by=frozenset())


def _expired(member: Member) -> Member:
    return _assigned(member, AssignmentState.EXPIRED)


def _assigned(member: Member, after: AssignmentState) -> Member:
    assert member.assignment is not None
    return member._replace(assignment=_moved(tables.Assignment, member.assignment, after), waits=False)


def _without_assignment(member: Member) -> Member:
    """Return the client without its assignment, because a new round begins."""
    return member._replace(assignment=None, waits=False, is_damaged=False)


def _state_is_right(member: Member) -> None:
    if member.last_accepted != member.used:
        raise Violation(f"a client's state is of round {member.last_accepted}; the weights have {member.used}")


def _moved(table: type, before: S, after: S) -> S:
    """Return `after`. Raises Violation if the code's table does not have the transition."""
    if not allows(table, before, after):
        raise Violation(f"{table.__name__}: {before} -> {after} is not in TRANSITIONS")
    taken.add((table, str(before), str(after)))
    return after
