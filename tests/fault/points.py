"""The named points of a round, and how a fault is caused at exactly that point without a hook in the product."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from uuid import UUID

from fault.federation import POSTGRES, VALKEY, FaultFederation
from fault.gates import artifacts_held, commits_held, jobs_held
from fault.patience import scaled_timeout
from fault.proxy import Held

UPLOAD = "^(PUT /v1/artifacts/|POST /v1/work/deliver)"
SUBMIT = "^POST /v1/work/(submit|deliver)"
SENDER = "sender"  # the worker that has sent the request
_SPIN_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Round:
    """A round of a run in which a fault is caused."""

    run_id: UUID
    number: int


Point = Callable[[FaultFederation, Round, str], None]


def mid_upload(federation: FaultFederation, at: Round, victim: str) -> None:
    """Kill the victim when half of the update's bytes have been passed on."""
    with federation.proxy.holding(UPLOAD, "hold-body") as held:
        _crash_holder(federation, held, victim, "mid-upload")


def stored_without_row(federation: FaultFederation, at: Round, victim: str) -> None:
    """Kill the victim when the store has the update but no row records it."""
    with artifacts_held(federation) as until_blocked:
        until_blocked("an upload's row")
        federation.crash(victim, "between storing an update and its row")
    federation.revive(victim)


def before_submission(federation: FaultFederation, at: Round, victim: str) -> None:
    """Kill the victim when the update is uploaded but not submitted."""
    with federation.proxy.holding(SUBMIT) as held:
        _crash_holder(federation, held, victim, "between upload and commit")


def before_acceptance(federation: FaultFederation, at: Round, victim: str) -> None:
    """Kill the victim when the submission is written but not committed."""
    with federation.proxy.holding(SUBMIT) as held:
        held.wait_until_there()
        with commits_held(federation, at.run_id) as gate:
            held.release()
            gate.wait("a submission's commit")
            victim = _named(federation, held, victim)
            federation.crash(victim, "at the submission's commit")
    federation.revive(victim)


def before_nudge(federation: FaultFederation, at: Round, victim: str) -> None:
    """Kill the victim when the submission is committed. Redis does not answer, so neither message nor answer is
    sent."""
    with federation.proxy.holding(SUBMIT) as held:
        held.wait_until_there()
        with federation.stopped(VALKEY, "between commit and nudge"):
            before = num_accepted(federation, at)
            held.release()
            federation.until(lambda: num_accepted(federation, at) > before, "the submission's commit")
            federation.crash(victim, "between commit and nudge")
    federation.revive(victim)


def before_the_worker_knows(federation: FaultFederation, at: Round, victim: str) -> None:
    """Kill the worker when its update is accepted, so that the stored state is the client's, and the answer is lost."""
    held = federation.proxy.once(SUBMIT, "hold-answer").held
    held.wait_until_there()
    _crash_holder(federation, held, victim, "between acceptance and its answer")


def before_aggregating(federation: FaultFederation, at: Round, victim: str) -> None:
    """Kill the victim when all updates are accepted, but the change to aggregating is not committed."""
    _crash_at_gate(federation, at, victim, 0, "before the round aggregates")


def mid_aggregation(federation: FaultFederation, at: Round, victim: str) -> None:
    """Kill the victim when the sums are computed and in the store, but no row records them."""
    with ExitStack() as stack:
        with aggregator_waits(federation, at):
            until_blocked = stack.enter_context(artifacts_held(federation))
        until_blocked("the rows of the new weights")
        federation.crash(victim, "mid-aggregation")
    federation.revive(victim)


def before_closing(federation: FaultFederation, at: Round, victim: str) -> None:
    """Kill the victim when the transaction that publishes the next broadcast and closes the round is not committed."""
    _crash_at_gate(federation, at, victim, 1, "between publishing and closing")


def mid_distillation(federation: FaultFederation, at: Round, victim: str) -> None:
    """Kill the victim when some epochs are done and a checkpoint is written."""
    epochs = "SELECT 1 FROM distillation_jobs WHERE run_id = %s AND round_number = %s AND checkpoint IS NOT NULL"
    federation.until(lambda: federation.query(epochs, at.run_id, at.number), "a checkpoint", 90)
    with jobs_held(federation) as until_blocked:
        until_blocked("the next checkpoint's row")
        federation.crash(victim, "mid-distillation")
    federation.revive(victim)


def before_the_student(federation: FaultFederation, at: Round, victim: str) -> None:
    """Kill the victim when the student is in the store, but the transaction that publishes it is not committed."""
    running = "SELECT 1 FROM distillation_jobs WHERE run_id = %s AND round_number = %s AND state = 'running'"
    federation.until(lambda: federation.query(running, at.run_id, at.number), "a distillation", 90)
    with commits_held(federation, at.run_id) as gate:
        gate.wait("the student's commit")
        federation.crash(victim, "between distilling and closing")
    federation.revive(victim)


def mid_promotion(federation: FaultFederation, at: Round, victim: str) -> None:
    """Kill the worker while it writes its update and next state into a folder that does not have its final name yet.

    Writing takes milliseconds. A kill that comes too late counts as one after the promotion.
    """
    run = federation.state(victim) / "runs" / str(at.run_id)
    end = time.monotonic() + scaled_timeout(_SPIN_SECONDS)
    while not any(run.glob("incoming-*")) and not any(run.glob(f"{at.number:06d}-*")):
        assert time.monotonic() < end, f"{victim} wrote no state\n{federation.logs()}"
    federation.kill(victim)
    when = "mid-promotion" if any(run.glob("incoming-*")) else "just after the promotion"
    federation.injected.note("SIGKILL", victim, f"{when} of client state")
    federation.revive(victim)


def without_nudges(federation: FaultFederation, at: Round) -> None:
    """Delete every message of the round from Redis before it is received, so that only the sweep can advance the
    run."""
    with aggregator_waits(federation, at), federation.stopped("distiller", "before a distillation"):
        federation.forget_messages("with the round's nudges in it")


POINTS: tuple[tuple[Point, tuple[str, ...]], ...] = (
    (mid_upload, (SENDER, "api")),
    (stored_without_row, ("api", POSTGRES)),
    (before_submission, (SENDER, "api", POSTGRES, VALKEY)),
    (before_acceptance, ("api", POSTGRES, SENDER)),
    (before_nudge, ("api", VALKEY)),
    (before_the_worker_knows, (SENDER,)),
    (before_aggregating, ("aggregator", POSTGRES)),
    (mid_aggregation, ("aggregator", POSTGRES)),
    (before_closing, ("aggregator", POSTGRES)),
    (mid_distillation, ("distiller", POSTGRES)),
    (before_the_student, ("distiller", POSTGRES)),
    (mid_promotion, ("client-0", "client-1")),
)
"""Each point, with the processes that are killed there."""

AGGREGATING = (before_aggregating, mid_aggregation, before_closing)
"""Points of a round that is aggregated rather than distilled."""

DISTILLING = (mid_distillation, before_the_student)


def _crash_holder(federation: FaultFederation, held: Held, victim: str, point: str) -> None:
    """Crash a process while a request is held, release the request, and restart the process."""
    held.wait_until_there()
    victim = _named(federation, held, victim)
    federation.crash(victim, point)
    held.release()
    federation.revive(victim)


def _named(federation: FaultFederation, held: Held, victim: str) -> str:
    return federation.owner(held.token) if victim == SENDER else victim


@contextmanager
def aggregator_waits(federation: FaultFederation, at: Round) -> Iterator[None]:
    """Stop the aggregator until the end of the block, which begins when all updates are accepted."""
    with federation.stopped("aggregator", "before an aggregation"):
        federation.until(lambda: num_accepted(federation, at) == len(federation.clients), "all updates")
        yield


def _crash_at_gate(federation: FaultFederation, at: Round, victim: str, num_commits: int, point: str) -> None:
    with ExitStack() as stack:
        with aggregator_waits(federation, at):
            gate = stack.enter_context(commits_held(federation, at.run_id))
        for _ in range(num_commits):
            gate.wait("an earlier commit")
            gate.let_one_pass()
        gate.wait("the commit")
        federation.crash(victim, point)
    federation.revive(victim)


def until_open(federation: FaultFederation, at: Round) -> None:
    """Wait until the round exists. If a clock has jumped, a client that is not drawn may pause for a minute first."""
    statement = "SELECT 1 FROM rounds WHERE run_id = %s AND number = %s"
    federation.until(lambda: federation.query(statement, at.run_id, at.number), f"round {at.number}", 120)


def num_accepted(federation: FaultFederation, at: Round) -> int:
    statement = "SELECT count(*)::int FROM assignments WHERE run_id = %s AND round_number = %s AND state = 'accepted'"
    [(number,)] = federation.query(statement, at.run_id, at.number)
    return int(number)
