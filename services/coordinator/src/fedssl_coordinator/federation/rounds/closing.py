"""Ends rounds and runs. The caller holds the run's lock."""

from typing import Any

from sqlalchemy import func
from sqlalchemy.orm import Session

from fedssl.protocol.states import Outcome, RoundState, RunState, Verdict
from fedssl.protocol.training import CohortConfig
from fedssl_coordinator.core import enqueue
from fedssl_coordinator.core.models import Round, Run
from fedssl_coordinator.core.problems import printable
from fedssl_coordinator.federation import run_rows
from fedssl_coordinator.federation.distillation import service as distillation
from fedssl_coordinator.federation.evaluations import service as evaluations
from fedssl_coordinator.federation.rounds import repository
from fedssl_coordinator.federation.rounds.assignments import end_live, reasons_of
from fedssl_coordinator.federation.secure_rounds import service as secure_rounds
from fedssl_coordinator.federation.transitions import transition


def end_run(session: Session, run: Run, outcome: Outcome, reason: str) -> None:
    """End the run and its round in progress. The caller holds the run's lock."""
    reason = printable(reason)
    distillation.end_unfinished(session, run, f"run {outcome}: {reason}")
    current = repository.unclosed(session, run.id)
    if current is not None:
        close_round(session, current, Verdict.FAILED, reason)
    values: dict[str, Any] = {"outcome": outcome, "reason": reason, "finished_at": func.now()}
    won = transition(session, run, RunState.FINISHED, f"{outcome}: {reason}", data={"outcome": outcome}, **values)
    assert won, "the run is locked"
    enqueue.wake_watchers(session)


def close_round(session: Session, current: Round, verdict: Verdict, reason: str) -> None:
    """Close the round with a verdict, and end its live assignments. The caller holds the run's lock."""
    if run_rows.get_one(session, current.run_id).spec.get("secure_aggregation"):
        secure_rounds.close(session, current, has_sum=verdict in (Verdict.AGGREGATED, Verdict.PARTIAL))
    end_live(session, current, f"round closed: {reason}")
    won = transition(
        session,
        current,
        RoundState.CLOSED,
        f"{verdict}: {reason}",
        data={"verdict": verdict, "clients": reasons_of(repository.assignments(session, [current.id]))},
        verdict=verdict,
        reason=reason,
        closed_at=func.now(),
    )
    assert won, "the run is locked, and its rounds with it"
    enqueue.wake_watchers(session)


def end_without_result(session: Session, run: Run, current: Round, cohort: CohortConfig, reason: str) -> None:
    """Close a round that gives no new weights as skipped, or end the whole run: the spec chooses. The caller holds the
    run's lock."""
    if cohort.without_quorum != "skip":
        end_run(session, run, Outcome.FAILED, f"round {current.number}: {reason}")
        return
    skip_round(session, run, current, reason)


def skip_round(session: Session, run: Run, current: Round, reason: str) -> None:
    """Close a round without new weights, and continue with the next one. The caller holds the run's lock."""
    close_round(session, current, Verdict.SKIPPED, reason)
    count_without_weights(session, run)


def count_without_weights(session: Session, run: Run) -> None:
    """Count a closed round that gave no new weights. The caller holds the run's lock."""
    run_rows.count_round(session, run)
    if run.rounds_closed == run.num_rounds:  # the last round is evaluated even if it did not change the weights
        evaluations.queue_due(session, run, run.num_rounds)
