"""Alerts about collapse and drift: metrics that cross a threshold when a round closes."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from sqlalchemy.orm import Session

from fedssl.evaluation.monitoring import describe, find_collapse_alerts, find_summed_alerts
from fedssl_coordinator.core.audit import record
from fedssl_coordinator.core.models import Round, Run
from fedssl_coordinator.core.run_documents import spec_of
from fedssl_coordinator.federation.rounds import round_metrics
from fedssl_coordinator.federation.transitions import pause


def raise_alerts(session: Session, run: Run, current: Round, used: Sequence[str], metrics: Mapping[str, float]) -> None:
    """Record the clients whose metrics crossed a threshold, and pause the run if its spec asks for that.

    `used`: the clients whose updates are in the result. In a secure round, the round's `metrics` state only how many
    clients crossed a threshold.

    Called once per round, in the transaction that closes it, by a caller that holds the run's lock. A run is not paused
    after its last round.
    """
    spec, number = spec_of(run), current.number
    watch = spec.watch
    alerts = (
        find_collapse_alerts(watch, number, round_metrics.by_client(session, run.id, number, used))
        if spec.secure_aggregation is None
        else find_summed_alerts(watch, metrics, len(used))
    )
    if not alerts:
        return
    message, data = describe(alerts), {"alarms": [asdict(alert) for alert in alerts]}
    record(session, "run.alarm", message, run_id=run.id, round_number=number, data=data)
    if watch.action != "pause" or number >= run.num_rounds:
        return
    reason = f"round {number}: {message}; resume the run to continue anyway"
    pause(session, run, reason)
