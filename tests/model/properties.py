"""The promises, each of which must be true of every state and every step of the model."""

from fedssl.protocol.states import AssignmentState, JobState, Outcome, RoundState, RunState, Verdict
from model.actions import Violation
from model.states import NEW_WEIGHTS, Setup, State


def check(before: State, after: State, setup: Setup) -> None:
    """Raise Violation if a step breaks a promise."""
    _end_is_final(before, after)
    _rounds_are_counted(before, after, setup)
    _nothing_accepted_is_lost(before, after)
    _live_work_is_in_an_open_round(after)
    _a_finished_run_has_nothing_unfinished(after)
    _a_job_belongs_to_its_round(after)
    _weights_had_their_quorum(before, after, setup)


def _end_is_final(before: State, after: State) -> None:
    """Raise Violation if a run changes after a stop or a completion, even while a process still computes."""
    is_final = before.run.state is RunState.FINISHED and before.run.outcome is not Outcome.FAILED
    if is_final and _rows(before) != _rows(after):
        raise Violation(f"the run was {before.run.outcome}, and changed")


def _rows(state: State) -> tuple[object, ...]:
    """Return everything that is stored of the run, except for whether a pause is over."""
    members = [(member.assignment, member.used, member.last_accepted) for member in state.members]
    return state.run._replace(pauses=False), state.round, state.job, members


def _rounds_are_counted(before: State, after: State, setup: Setup) -> None:
    """Raise Violation unless each round that counts adds one to the closed rounds, and the numbers have no gap."""
    counted = after.run.rounds_closed - before.run.rounds_closed
    is_closed_now = before.unclosed is not None and after.unclosed is None
    verdict = after.round.verdict if is_closed_now and after.round is not None else None
    if counted != (verdict is not None and verdict is not Verdict.FAILED):
        raise Violation(f"rounds_closed grew by {counted} with the verdict {verdict}")
    if after.run.rounds_closed > setup.num_rounds:
        raise Violation("more rounds than the spec has")
    if after.unclosed is not None and after.unclosed.number != after.run.rounds_closed + 1:
        raise Violation(f"round {after.unclosed.number} is in progress after {after.run.rounds_closed} rounds")
    if before.unclosed is not None and after.unclosed is not None and before.unclosed.number != after.unclosed.number:
        raise Violation("a second round was opened while one is in progress")
    if after.run.outcome is Outcome.COMPLETED and after.run.rounds_closed != setup.num_rounds:
        raise Violation("completed before its last round")


def _nothing_accepted_is_lost(before: State, after: State) -> None:
    """Raise Violation unless a round's new weights contain every update that it accepted and did not reject by name."""
    if before.unclosed is None or after.round is None or after.round.verdict not in NEW_WEIGHTS:
        return
    if after.unclosed is None and before.round != after.round:
        for member in after.members:
            if member.is_accepted != (member.used == after.round.number):
                raise Violation(f"an update is {member.assignment}, and the newest weights with it are {member.used}")


def _live_work_is_in_an_open_round(after: State) -> None:
    live = any(member.is_live for member in after.members)
    if live and not after.is_open:
        raise Violation("work is live, and no round is open")


def _a_finished_run_has_nothing_unfinished(after: State) -> None:
    if after.run.state is RunState.FINISHED and (after.unclosed is not None or after.job is not None):
        raise Violation("the run has finished, and its round or its job has not")
    if (after.run.state is RunState.FINISHED) != (after.run.outcome is not None):
        raise Violation("a run has an outcome if it has finished, and only then")
    if after.run.state is RunState.CREATED and (after.round is not None or after.job is not None):
        raise Violation("a run that was not started has a round or a job")


def _a_job_belongs_to_its_round(after: State) -> None:
    job = after.job
    if job is None:
        return
    assert job.state in (JobState.QUEUED, JobState.RUNNING)
    if job.round_number == 0:
        if after.run.is_prepared:
            raise Violation("a prepared run has a job for its first weights")
    elif after.round is None or (after.round.number, after.round.state) != (job.round_number, RoundState.DISTILLING):
        raise Violation(f"a job for round {job.round_number} is unfinished, and the round is {after.round}")


def _weights_had_their_quorum(before: State, after: State, setup: Setup) -> None:
    """Raise Violation unless a round aggregates as many updates as the spec requires."""
    begins = before.is_open and after.unclosed is not None and after.unclosed.state is not RoundState.OPEN
    if not begins:
        return
    num_accepted = len(after.accepted)
    if num_accepted < (setup.cohort.min_updates or 1):
        raise Violation(f"a round aggregates {num_accepted} updates")
    if setup.cohort.min_updates is None and after.round is not None and after.round.num_wanted is None:
        missing = [
            member
            for member in after.members
            if member.assignment is not None and not member.is_accepted and member.is_eligible and not member.refuses
        ]
        if missing:
            raise Violation("a round that waits for all aggregates without a client that could take part")


def has_ended(state: State) -> bool:
    """Return whether the run has finished."""
    return state.run.state is RunState.FINISHED


def waits_for_clients(state: State, setup: Setup) -> bool:
    """Return whether no round can be opened, because fewer clients may take part than the spec requires."""
    able = sum(member.is_eligible and not member.refuses for member in state.members)
    too_few = able < setup.cohort.min_clients or setup.cohort.num_wanted(able) < (setup.cohort.min_updates or 0)
    return state.unclosed is None and state.run.is_prepared and too_few


def is_hopeless(state: State, setup: Setup) -> bool:
    """Return whether the run may end before its last round: a client cannot take part, or the last attempt failed."""
    if any(not member.is_eligible or member.refuses for member in state.members):
        return True
    last = state.is_open and state.round is not None and state.round.attempt >= setup.cohort.max_attempts
    ended = (AssignmentState.DECLINED, AssignmentState.EXPIRED, AssignmentState.REJECTED)
    failed = any(member.assignment in ended for member in state.members) or bool(state.round and state.round.is_overdue)
    return last and failed and setup.cohort.without_quorum == "fail"
