"""If a worker or the API is killed while a site evaluates, the counts are still those of a simulation."""

import json
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from uuid import UUID

import pytest

from fault import audit, specs
from fault.federation import FaultFederation
from fault.gates import commits_held
from fault.injected import Injected
from fault.points import SENDER
from fault.proxy import Held
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.site_evaluation import SiteCounts
from fedssl.protocol.views import EventView
from fedssl.simulation import simulate
from fedssl_worker.disclosure.ledger import EVALUATION
from fedssl_worker.disclosure.ledger.verification import read_entries

FAULT_CLASS = "evaluations at the sites"

CLAIM = "^POST /v1/work/site-evaluations/claim"
ANSWER = "^POST /v1/work/site-evaluations/submit"
_CLASSES = [str(digit) for digit in range(10)]
_EVALUATION = {"at": "sites", "every": 1, "sites": {"classes": _CLASSES, "min_count": 2}}

Point = Callable[[FaultFederation, UUID, str], None]


@pytest.fixture(scope="module")
def federation(injected: Injected, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultFederation]:
    """Yield a federation whose sites have labels."""

    def labels(name: str) -> dict[str, str]:
        return {"FEDSSL_WORKER_LABELS": "own"} if name in specs.CLIENTS else {}

    with FaultFederation(tmp_path_factory.mktemp("sites"), injected, environment_of=labels) as running:
        yield running


def claimed(federation: FaultFederation, run_id: UUID, victim: str) -> None:
    """Kill the victim when the coordinator has answered the claim, but the site has not read the answer."""
    _crash_holder(
        federation, federation.proxy.once(CLAIM, "hold-answer").held, victim, "after the claim of an evaluation"
    )


def evaluated(federation: FaultFederation, run_id: UUID, victim: str) -> None:
    """Kill the victim when the site has counted and its ledger has the entry, but no count has been sent."""
    with federation.proxy.holding(ANSWER) as held:
        _crash_holder(federation, held, victim, "before the counts leave")


def sending(federation: FaultFederation, run_id: UUID, victim: str) -> None:
    """Kill the victim when half of the counts have been sent."""
    with federation.proxy.holding(ANSWER, "hold-body") as held:
        _crash_holder(federation, held, victim, "while the counts are sent")


def committing(federation: FaultFederation, run_id: UUID, victim: str) -> None:
    """Kill the victim when the counts are written but not committed."""
    with federation.proxy.holding(ANSWER) as held:
        held.wait_until_there()
        with commits_held(federation, run_id) as gate:
            held.release()
            gate.wait("the commit of the counts")
            name = federation.owner(held.token) if victim == SENDER else victim
            federation.crash(name, "at the commit of the counts")
    _revive(federation, name)


def answered(federation: FaultFederation, run_id: UUID, victim: str) -> None:
    """Kill the victim when the counts are stored, but the site has not read the answer."""
    _crash_holder(federation, federation.proxy.once(ANSWER, "hold-answer").held, victim, "after the counts were kept")


POINTS: tuple[Point, ...] = (claimed, evaluated, sending, committing, answered)


@pytest.mark.parametrize("victim", [SENDER, "api"])
def test_evaluations_complete_after_a_kill_at_every_point(
    victim: str, federation: FaultFederation, rng: random.Random
) -> None:
    """The points come one after another, in random order. Each site has more evaluations than there are points."""
    spec = specs.spec("fedbyol", num_rounds=len(POINTS), evaluation=_EVALUATION, seed=rng.randrange(2**32))
    run_id = federation.begin(spec)
    for point in rng.sample(POINTS, len(POINTS)):
        point(federation, run_id, victim)
    _all_answered(federation, run_id, spec)
    audit.completed(federation, run_id, spec)


def _crash_holder(federation: FaultFederation, held: Held, victim: str, point: str) -> None:
    held.wait_until_there()
    name = federation.owner(held.token) if victim == SENDER else victim
    federation.crash(name, point)
    held.release()
    _revive(federation, name)


def _revive(federation: FaultFederation, name: str) -> None:
    """Restart a process, and wait for the API: a request that no coordinator answers cannot be held halfway."""
    federation.revive(name)
    federation.until(federation.client.health, "the API")


def _all_answered(federation: FaultFederation, run_id: UUID, spec: RunSpec) -> None:
    """Assert that each site sent each round's counts once, as in the simulation, and that no others were ever sent."""
    expected = simulate(spec, specs.images()).site_evaluations
    assert expected.keys() == set(range(spec.num_rounds + 1))
    num_answers = len(expected) * len(specs.CLIENTS)
    statement = "SELECT round_number, client_id, counts FROM site_evaluations WHERE run_id = %s AND state = 'completed'"
    rows = federation.until(
        lambda: found if len(found := federation.query(statement, run_id)) == num_answers else None, "all answers", 120
    )
    counts = {(number, name): SiteCounts.model_validate_json(json.dumps(value)) for number, name, value in rows}
    assert counts == {(number, name): own for number, sites in expected.items() for name, own in sites.items()}
    kept = Counter((event.round_number, event.client_id) for event in _events(federation, run_id))
    assert kept == dict.fromkeys(counts, 1)
    digests = defaultdict(set)
    for name in specs.CLIENTS:
        for entry in read_entries(federation.state(name) / "ledger"):
            body = entry.body
            if body["kind"] == "intent" and body["artifact"] == [EVALUATION] and body["run"] == str(run_id):
                digests[body["round"], name].add(body["digest"])
    assert digests.keys() == counts.keys()
    assert {len(found) for found in digests.values()} == {1}


def _events(federation: FaultFederation, run_id: UUID) -> list[EventView]:
    return list(federation.client.event_log(run_id, "site_evaluation.completed"))
