"""Moves an open secure round forward."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import func
from sqlalchemy.orm import Session

from fedssl.protocol.secure_aggregation import SecureAggregationConfig
from fedssl.protocol.secure_work import OUT_OF_RANGE
from fedssl.protocol.states import AssignmentState, RoundState
from fedssl_coordinator.core import enqueue
from fedssl_coordinator.core.models import Round, Run
from fedssl_coordinator.federation.rounds import closing, repository
from fedssl_coordinator.federation.rounds.assignments import expire, reasons_of
from fedssl_coordinator.federation.rounds.fitness import shortened
from fedssl_coordinator.federation.rounds.steps import Step
from fedssl_coordinator.federation.secure_rounds import service as secure_rounds
from fedssl_coordinator.federation.transitions import Passed, transition


def check_secure_round(session: Session, run: Run, current: Round, config: SecureAggregationConfig) -> Step:
    """Move an open secure round forward. It has one attempt: nothing is offered again."""
    answered = secure_rounds.vectors(session, current.id)
    for assignment, is_revoked in repository.lost(session, current.id):
        if assignment.client_id not in answered:  # otherwise its vector is in the sum, whether or not it returns
            expire(session, assignment, "the client was revoked" if is_revoked else "no heartbeat within the lease")
    rows = repository.assignments(session, [current.id])
    out_of_range = [row for row in rows if row.reason is not None and row.reason.startswith(OUT_OF_RANGE)]
    if out_of_range and secure_rounds.context_of(session, run.id, current.number).total_bits is not None:
        # Honest values may exceed words of 32 bits. The round after a skipped one has words of 64 bits, and leaves out
        # a client whose values do not fit these either, so that no client can end all rounds.
        closing.skip_round(session, run, current, shortened(reasons_of(out_of_range)))
        return Step.CHECK_AGAIN
    is_overdue = repository.is_overdue(session, current.id)
    found = secure_rounds.advance(session, current, config.phase_seconds, is_overdue=is_overdue)
    for row in repository.locked_live(session, round_id=current.id) if found.left_out else ():
        if row.client_id in found.left_out:
            expire(session, row, found.left_out[row.client_id])
    if not found.is_over:
        return Step.WAIT
    if not found.survivors:
        ended = [row for row in rows if row.state in (AssignmentState.DECLINED, AssignmentState.EXPIRED)]
        lost = f" ({shortened(reasons_of(ended))})" if ended else ""
        closing.skip_round(session, run, current, f"no secure sum: {found.why}{lost}")
        return Step.CHECK_AGAIN
    accepted = _accept_survivors(session, current, found.survivors)
    message = f"aggregating {len(accepted)} of {len(rows)} updates"
    if others := sorted(set(found.survivors).difference(accepted)):
        message += f"; the sum also has that of {', '.join(others)}"
    transition(session, current, RoundState.AGGREGATING, message)
    enqueue.wake_watchers(session)
    return Step.CHECK_AGAIN


def _accept_survivors(session: Session, current: Round, survivors: Sequence[str]) -> list[str]:
    """Accept the masked vectors that are in the sum, and end the other assignments. Returns whose were accepted.

    A client that has declined since it sent its vector is in the sum, so its state advances as well: otherwise
    SCAFFOLD's global variate would no longer be the mean of the clients' ones. A revoked client never returns.
    """
    vectors, accepted = secure_rounds.vectors(session, current.id), []
    can_count = (AssignmentState.LEASED, AssignmentState.DECLINED)
    for row in repository.locked_live(session, round_id=current.id, also=AssignmentState.DECLINED):
        if row.client_id in survivors and row.state in can_count:
            data = {"update_digest": vectors[row.client_id]}
            submitted = Passed(AssignmentState.SUBMITTED, f"{row.client_id}: masked vector submitted", data)
            message = f"{row.client_id}: masked vector accepted"
            values: dict[str, Any] = {"update_digest": vectors[row.client_id], "closed_at": func.now()}
            values |= {"reason": None, "cause": None}
            transition(session, row, AssignmentState.ACCEPTED, message, via=submitted, **values)
            accepted.append(row.client_id)
        elif row.state != AssignmentState.DECLINED:
            expire(session, row, "the sum is complete without this client")
    return accepted
