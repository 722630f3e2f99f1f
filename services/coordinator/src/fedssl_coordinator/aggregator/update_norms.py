"""Records what was measured of a round's updates when the round closes, and what was done about them."""

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import func
from sqlalchemy.orm import Session

from fedssl.engine.norm_bounding import Norms
from fedssl.engine.unusual_updates import MOST_ROUNDS, NUM_EXAMPLES, find_unusual
from fedssl.methods.api import Metrics
from fedssl.protocol.measures import MEASURES, UPDATE_NORM
from fedssl.protocol.states import AssignmentState
from fedssl_coordinator.core.audit import record
from fedssl_coordinator.core.models import Assignment, Run
from fedssl_coordinator.federation.rounds import repository, round_metrics
from fedssl_coordinator.federation.transitions import transition


def record_norms(session: Session, run: Run, round_number: int, accepted: Sequence[Assignment], norms: Norms) -> None:
    """Record the metrics of each client, an event per update that was clipped or is unusual, and reject the assignments
    whose updates were left out: their clients continue from the state before this round."""
    alarms = find_unusual(_numbers(norms, accepted), _history(session, run, round_number, accepted))
    if norms.measures:
        round_metrics.add(session, run.id, round_number, MEASURES, norms.measures)
    rows = {row.client_id: row for row in accepted}
    for client_id, why in sorted(norms.clipped.items()):
        message = f"{client_id}: the update was scaled down: {why}"
        _record(session, "update.clipped", rows[client_id], message, _data(norms.measures[client_id]))
    for client_id, why in sorted(norms.rejected.items()):
        _reject(session, rows[client_id], why, norms.measures[client_id])
    for alarm in alarms:
        data = {**alarm.numbers, "findings": list(alarm.findings)}
        _record(session, "update.unusual", rows[alarm.client_id], str(alarm), data)


def describe(norms: Norms) -> str:
    """Return the clipped and rejected clients for the reason of the round's verdict."""
    rejected = f"; left out: {', '.join(sorted(norms.rejected))}" if norms.rejected else ""
    return rejected + (f"; clipped: {', '.join(sorted(norms.clipped))}" if norms.clipped else "")


def _reject(session: Session, row: Assignment, why: str, measures: Metrics) -> None:
    reason = f"the update was left out: {why}"
    message = f"{row.client_id}: {reason}"
    _record(session, "update.rejected", row, message, _data(measures))
    won = transition(session, row, AssignmentState.REJECTED, message, reason=reason, closed_at=func.now())
    assert won, "the run is locked, and an accepted assignment changes only with its round"


def _record(session: Session, kind: str, row: Assignment, message: str, data: Mapping[str, Any]) -> None:
    record(
        session,
        kind,
        message,
        run_id=row.run_id,
        round_number=row.round_number,
        client_id=row.client_id,
        data=dict(data),
    )


def _data(measures: Metrics) -> dict[str, float]:
    """Return an event's data. `norm` was the only key of earlier versions."""
    return {**measures, "norm": measures[UPDATE_NORM]} if UPDATE_NORM in measures else dict(measures)


def _numbers(norms: Norms, accepted: Sequence[Assignment]) -> dict[str, Metrics]:
    """Return the measurements of the updates that were used. No other update is compared with those left out."""
    return {
        row.client_id: {**norms.measures[row.client_id], NUM_EXAMPLES: float(row.num_examples or 0)}
        for row in accepted
        if row.client_id in norms.measures.keys() - norms.rejected.keys()
    }


def _history(
    session: Session, run: Run, round_number: int, accepted: Sequence[Assignment]
) -> dict[str, list[dict[str, float]]]:
    """Return what was measured of the clients' updates that were used in the last rounds before this one."""
    if round_number == 1:
        return {}
    clients = [row.client_id for row in accepted]
    first = round_number - MOST_ROUNDS
    by_round: dict[tuple[str, int], dict[str, float]] = {}
    for client_id, number, num_examples in repository.numbers_of_examples(
        session, run.id, first, round_number, clients
    ):
        by_round[client_id, number] = {NUM_EXAMPLES: float(num_examples)}
    for client_id, number, name, value in round_metrics.between(
        session, run.id, first, round_number, MEASURES, clients
    ):
        if (client_id, number) in by_round:  # otherwise the update was left out
            by_round[client_id, number][name] = value
    history: dict[str, list[dict[str, float]]] = {}
    for (client_id, _), numbers in by_round.items():
        history.setdefault(client_id, []).append(numbers)
    return history
