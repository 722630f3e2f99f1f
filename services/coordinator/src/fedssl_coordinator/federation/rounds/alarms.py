"""Watching a run for collapse and drift: what crosses a threshold when a round closes."""

from collections.abc import Sequence
from dataclasses import asdict

from sqlalchemy.orm import Session

from fedssl.evaluation.monitoring import describe, find_alarms
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.states import RunState
from fedssl_coordinator.core.audit import record
from fedssl_coordinator.core.models import Round, Run
from fedssl_coordinator.federation.rounds import repository
from fedssl_coordinator.federation.runs import repository as runs
from fedssl_coordinator.federation.transitions import transition


def raise_alarms(session: Session, run: Run, current: Round, accepted: Sequence[str]) -> None:
    """Tell of the accepted clients whose numbers crossed a threshold, and pause the run where its spec says so.

    Once for each round, in the transaction that closes it; the caller holds the run's lock. After the last round there
    is nothing to pause.
    """
    watch, number = RunSpec.model_validate(run.spec).watch, current.number
    alarms = find_alarms(watch, number, repository.metrics_by_client(session, run.id, number, accepted))
    if not alarms:
        return
    message, data = describe(alarms), {"alarms": [asdict(alarm) for alarm in alarms]}
    record(session, "run.alarm", message, run_id=run.id, round_number=number, data=data)
    if watch.action != "pause" or number >= run.num_rounds:
        return
    reason = f"round {number}: {message}; resume the run to go on all the same"
    if run.state == RunState.RUNNING:
        transition(session, run, RunState.PAUSED, reason, reason=reason)
    else:
        runs.set_reason(session, run, reason)
