"""Opens the next round of a run, or records what it waits for."""

from collections.abc import Sequence

from sqlalchemy.orm import Session

from fedssl.errors import SpecError
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.secure_work import SecureMember
from fedssl.protocol.states import Outcome
from fedssl.protocol.training import CohortConfig
from fedssl.secure_aggregation import RoundContext
from fedssl.secure_aggregation.round_context import round_context
from fedssl.seeding import asked_cohort
from fedssl.wording import plural
from fedssl_coordinator.core import enqueue
from fedssl_coordinator.core.audit import record
from fedssl_coordinator.core.models import Run
from fedssl_coordinator.core.run_documents import plan_of
from fedssl_coordinator.federation import retries, run_rows
from fedssl_coordinator.federation.dimensions import service as dimensions
from fedssl_coordinator.federation.evaluations import service as evaluations
from fedssl_coordinator.federation.rounds import closing, fitness, policies, repository
from fedssl_coordinator.federation.rounds.fitness import shortened
from fedssl_coordinator.federation.rounds.steps import NextVector, Step
from fedssl_coordinator.federation.secure_rounds import service as secure_rounds
from fedssl_coordinator.identity import clients


def open_next(session: Session, run: Run, spec: RunSpec, vector: NextVector | None) -> Step:
    """Open the run's next round if it has enough clients, and return the caller's next step."""
    cohort = spec.cohort
    eligible = clients.eligible(session, run.project, cohort.clients)
    refused = policies.refusals(session, run, spec, eligible)
    unfit = fitness.unfit(session, spec, run.method_version, eligible)
    left_out = unfit | refused
    eligible = [name for name in eligible if name not in left_out]
    if (message := _waits_for_clients(cohort, len(eligible))) is not None:
        return _wait(session, run, message + (f" and may take part; {shortened(left_out)}" if left_out else ""))
    try:
        members = dimensions.owners(session, run.id, spec, eligible)
    except SpecError as error:
        closing.end_run(session, run, Outcome.FAILED, str(error))
        return Step.WAIT
    if (message := _waits_for_clients(cohort, len(members))) is not None:
        return _wait(session, run, f"{message} and own dimensions of the embedding")
    run_rows.set_reason(session, run, None)
    retries.reset(session, run)  # a failure here does not affect the next computation
    number = run.rounds_closed + 1
    chosen = asked_cohort(members, cohort, spec.seed, number)
    num_wanted = cohort.num_wanted(len(members))
    more = len(chosen) > num_wanted
    assert run.broadcast is not None, "a prepared run has a broadcast"
    context = None
    if spec.secure_aggregation is not None:
        try:
            context = _secure_context(session, run, spec, number, vector, chosen)
        except ValueError as error:
            return _wait(session, run, f"waiting for clients: the cohort has no secure sum: {error}")
    seconds = cohort.deadline_seconds
    opened = repository.open_round(session, run, run.broadcast, chosen, seconds, num_wanted if more else None)
    if spec.secure_aggregation is not None and context is not None:
        secure_rounds.begin(session, opened, context, spec.secure_aggregation.phase_seconds)
    offered = f"round {number} of {run.num_rounds} offered to {plural(len(chosen), 'client')}"
    record(
        session,
        "round.opened",
        offered + (f"; the first {num_wanted} updates count" if more else ""),
        run_id=run.id,
        round_number=number,
        data={"cohort": chosen, "broadcast": run.broadcast},
    )
    if refused:
        message = f"not offered to {shortened(refused)}"
        record(session, "policy.refuses", message, run_id=run.id, round_number=number, data={"clients": refused})
    fitness.record_left_out(session, run, number, unfit)
    if number == 1:
        evaluations.ask_sites_before_training(session, run, spec)
    enqueue.wake_workers(session)
    enqueue.wake_watchers(session)
    return Step.WAIT


def _secure_context(
    session: Session, run: Run, spec: RunSpec, number: int, vector: NextVector | None, chosen: Sequence[str]
) -> RoundContext:
    """Return the context of a secure round. Raises ValueError if these clients cannot have a secure round."""
    assert vector is not None, "counted before"
    assert run.broadcast is not None, "a prepared run has a broadcast"
    identities = clients.identities(session, chosen)
    return round_context(
        str(run.id),
        number,
        spec=spec,
        plan=plan_of(run),
        broadcast=run.broadcast,
        frozen=run.frozen,
        num_words=vector.num_words,
        total_bits=vector.total_bits,
        cohort=[SecureMember(client=name, identity=identities[name][0] or "") for name in chosen],
    )


def _wait(session: Session, run: Run, message: str) -> Step:
    if run.reason != message:
        run_rows.set_reason(session, run, message)
        record(session, "run.waiting", message, run_id=run.id)
        enqueue.wake_watchers(session)
    return Step.WAIT


def _waits_for_clients(cohort: CohortConfig, num_eligible: int) -> str | None:
    """Return why no round can be opened yet, or None if one can."""
    if num_eligible < cohort.min_clients:
        return f"waiting for clients: {num_eligible} of {cohort.min_clients} have registered"
    num_wanted = cohort.num_wanted(num_eligible)
    if cohort.min_updates is not None and num_wanted < cohort.min_updates:
        return (
            f"waiting for clients: cohort.min_updates asks for {cohort.min_updates} updates, but a cohort is only "
            f"{num_wanted} of {num_eligible} registered clients"
        )
    return None
