"""If a process is killed in a phase of a secure round, the weights have a simulation's bits, or the round is
skipped.

The points are the messages of the workers, each of which is sent after a worker's file was synchronised, and the
commits of the aggregator that end a phase. A message is held, so that its phase cannot end before the kill.
"""

import random
from collections.abc import Callable, Iterator
from typing import Any
from uuid import UUID

import pytest
import torch

from fault import audit
from fault.federation import POSTGRES, VALKEY, FaultFederation
from fault.gates import artifacts_held, commits_held
from fault.injected import SAME_BITS, Injected
from fault.points import SENDER, UPLOAD, Round, mid_promotion, until_open
from fault.proxy import Action, Held
from fedssl.artifacts.tensors import load_tensors
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.states import Outcome
from fedssl.simulation import simulate
from support import traces
from support.methods import method_spec, shards

FAULT_CLASS = "secure rounds"

SEND = "^POST /v1/work/secure/send"
PHASES = ("keys", "shares", "vectors", "confirmations", "reveals")
NUM_CLIENTS = 4
_SECURE = {"secure_aggregation": {"min_cohort": 3, "collusion": 0, "phase_seconds": 120}}


def _spec(num_rounds: int, *, is_secure: bool = True, **changes: Any) -> RunSpec:
    """Return a spec with four clients. A sum and a threshold need three of them."""
    return method_spec(
        "fedbyol",
        num_rounds=num_rounds,
        aggregation={"arithmetic": "fixed"},
        cohort={"min_clients": NUM_CLIENTS, "lease_seconds": 60},
        partition={"dataset": "digits", "num_clients": NUM_CLIENTS, "alpha": 1.0, "max_images": 160},
        training={"batch_size": 16, "local_epochs": 2},
        **(_SECURE if is_secure else {}),
        **changes,
    )


@pytest.fixture(scope="module")
def federation(injected: Injected, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultFederation]:
    """Yield a federation of four clients."""
    with FaultFederation(tmp_path_factory.mktemp("secure"), injected, images=shards(_spec(1))) as running:
        yield running


def _messages(federation: FaultFederation, action: Action) -> dict[str, Held]:
    """Hold the next message of each phase."""
    return {phase: federation.proxy.once(SEND, action, body=f'"phase": ?"{phase}"').held for phase in PHASES}


def _all_leased(federation: FaultFederation, run_id: UUID) -> None:
    leased = "SELECT 1 FROM assignments WHERE run_id = %s AND round_number = 1 AND state = 'leased'"
    federation.until(lambda: len(federation.query(leased, run_id)) == NUM_CLIENTS, "all leases")


def _crash_holder(federation: FaultFederation, held: Held, victim: str, point: str) -> None:
    held.wait_until_there()
    name = federation.owner(held.token) if victim == SENDER else victim
    federation.crash(name, point)
    held.release()
    federation.revive(name)


@pytest.mark.parametrize(
    ("victim", "action"),
    [(SENDER, "hold"), (SENDER, "hold-answer"), ("api", "hold-body"), ("api", "hold-answer"), (VALKEY, "hold")],
)
def test_a_secure_run_completes_after_a_kill_at_a_message_of_each_phase(
    victim: str, action: Action, federation: FaultFederation, rng: random.Random
) -> None:
    """The worker has written its file, and its message has either not been sent or has arrived without an answer."""
    spec = _spec(1, seed=rng.randrange(2**32))
    messages = _messages(federation, action)
    run_id = federation.begin(spec)
    for phase, held in messages.items():
        _crash_holder(federation, held, victim, f"at a message of the phase {phase}: {action}")
    _completed(federation, run_id, spec)


def test_a_secure_run_completes_after_kills_of_a_worker_that_stores_or_uploads(
    federation: FaultFederation, rng: random.Random
) -> None:
    """In the first round, the update and the next state are being written; in the second, half of the masked vector
    is sent."""
    spec = _spec(2, seed=rng.randrange(2**32))
    run_id = federation.begin(spec)
    until_open(federation, Round(run_id, 1))
    mid_promotion(federation, Round(run_id, 1), "client-0")
    until_open(federation, Round(run_id, 2))
    with federation.proxy.holding(UPLOAD, "hold-body") as held:
        _crash_holder(federation, held, SENDER, "while the masked vector is sent")
    _completed(federation, run_id, spec)


@pytest.mark.parametrize("victim", ["aggregator", POSTGRES])
def test_a_secure_run_completes_after_a_kill_at_the_end_of_each_phase(
    victim: str, federation: FaultFederation, rng: random.Random
) -> None:
    """The list that ends the phase is written but not committed."""
    spec = _spec(1, seed=rng.randrange(2**32))
    messages = _messages(federation, "hold")
    run_id = federation.begin(spec)
    _all_leased(federation, run_id)
    for phase, held in messages.items():
        held.wait_until_there()
        with commits_held(federation, run_id) as gate:
            held.release()
            gate.wait(f"the end of the phase {phase}")
            federation.crash(victim, f"at the end of the phase {phase}")
        federation.revive(victim)
    _completed(federation, run_id, spec)


def _while_unmasking(federation: FaultFederation, run_id: UUID, held: Held, victim: str) -> None:
    """Kill the victim when the sum is unmasked and its weights are in the store without a row."""
    with artifacts_held(federation) as until_blocked:
        held.release()
        until_blocked("the rows of the new weights")
        federation.crash(victim, "after the sum was unmasked")


def _before_closing(federation: FaultFederation, run_id: UUID, held: Held, victim: str) -> None:
    """Kill the victim when the deletion of shares and reveals is written but not committed."""
    with commits_held(federation, run_id) as gate:
        held.release()
        gate.wait("the end of the last phase")
        gate.let_one_pass()
        gate.wait("the end of the round")
        federation.crash(victim, "between the sum and the end of the round")


@pytest.mark.parametrize("victim", ["aggregator", POSTGRES])
@pytest.mark.parametrize("point", [_while_unmasking, _before_closing])
def test_a_secure_run_completes_after_a_kill_between_the_last_reveal_and_the_end(
    point: Callable[[FaultFederation, UUID, Held, str], None],
    victim: str,
    federation: FaultFederation,
    rng: random.Random,
) -> None:
    spec = _spec(1, seed=rng.randrange(2**32))
    held = federation.proxy.once(SEND, "hold", body='"phase": ?"reveals"').held
    run_id = federation.begin(spec)
    held.wait_until_there()
    point(federation, run_id, held, victim)
    federation.revive(victim)
    _completed(federation, run_id, spec)


def _completed(federation: FaultFederation, run_id: UUID, spec: RunSpec) -> None:
    """Wait for the run's end and check that its bits are those of the simulation without masks, with the survivors
    of each round, and that no shares, reveals or masked vectors are left."""
    run = federation.finished(run_id, 240)
    assert run.outcome == Outcome.COMPLETED, run.reason
    ended = list(federation.client.event_log(run_id, "secure_round.ended"))
    assert [event.round_number for event in ended] == list(range(1, spec.num_rounds + 1))
    survivors = {event.round_number: event.data["survivors"] for event in ended}
    rounds = federation.query("SELECT number, verdict, reason FROM rounds WHERE run_id = %s ORDER BY number", run_id)
    skipped = [(number, reason) for number, verdict, reason in rounds if verdict == "skipped"]
    assert [each for each in skipped if not each[1].startswith("no secure sum: ")] == []
    cohorts: dict[int, list[str]] = {
        number: [] if number in dict(skipped) else who for number, who in survivors.items()
    }
    path = federation.folder / "model.safetensors"
    federation.client.download_model(run_id, path)
    deployed = load_tensors(path)
    plain = _spec(spec.num_rounds, is_secure=False, seed=spec.seed)
    expected = simulate(plain, shards(plain), cohorts=cohorts).model
    assert deployed.keys() == expected.keys()
    assert [name for name, value in expected.items() if not torch.equal(deployed[name], value)] == []
    assert federation.query("SELECT 1 FROM secure_members") == []
    with federation.tables() as tables:
        traces.check(tables, run_id)
    audit.no_orphans(federation)
    audit.ledgers_hold(federation)
    federation.injected.settle("skipped with a reason" if skipped else SAME_BITS)
