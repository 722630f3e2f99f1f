"""If a process is killed in rounds of the exact probe, of sums or of counts, the classifier has the same bits.

A site answers at once, because it takes no training step. So the point of a round is prepared before the round
opens: the run ends after each round and is continued, and the aggregator, which opens rounds, is stopped meanwhile.
"""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from uuid import UUID

import pytest

from fault import audit, specs
from fault.federation import POSTGRES, VALKEY, FaultFederation
from fault.injected import Injected
from fault.points import AGGREGATING, DISTILLING, POINTS, SENDER, SUBMIT, Point, Round, mid_promotion
from fedssl.protocol.runs import RunSpec

FAULT_CLASS = "rounds of the probe"
_LOCKED = "SELECT 1 FROM pg_locks WHERE relation = 'artifacts'::regclass AND mode = 'ShareLock' AND granted"


@pytest.fixture(scope="module")
def federation(injected: Injected, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultFederation]:
    """Yield a federation whose sites have labels."""

    def labels(name: str) -> dict[str, str]:
        return {"FEDSSL_WORKER_LABELS": "own"} if name in specs.CLIENTS else {}

    with FaultFederation(tmp_path_factory.mktemp("probe"), injected, environment_of=labels) as running:
        yield running


def _points(victim: str) -> list[Point]:
    """Return the points of a round at which this process can be killed. The probe keeps no state on clients."""
    return [point for point, victims in POINTS if victim in victims and point not in (*DISTILLING, mid_promotion)]


@pytest.mark.parametrize("victim", [SENDER, "api", "aggregator", POSTGRES, VALKEY])
def test_a_probe_completes_although_a_process_is_killed_in_every_round(
    victim: str, federation: FaultFederation, rng: random.Random
) -> None:
    """Each round has another point, in random order. The first round has the sums, the later ones the counts."""
    points = _points(victim)
    points += rng.sample(points, max(0, 2 - len(points)))  # so that there are both kinds of rounds
    spec = specs.spec("ridge-probe", num_rounds=1, seed=rng.randrange(2**32))
    run_id: UUID | None = None
    for number, point in enumerate(rng.sample(points, len(points)), start=1):
        run_id = _round(federation, spec, run_id, number, point, victim)
        federation.finished(run_id)
    assert run_id is not None
    audit.completed(federation, run_id, spec.continued(len(points)), times_finished=len(points))


def _round(
    federation: FaultFederation, spec: RunSpec, run_id: UUID | None, number: int, point: Point, victim: str
) -> UUID:
    """Run one round with a kill at the point, and return its run."""

    def opened() -> UUID:
        return federation.begin(spec) if run_id is None else federation.client.continue_run(run_id, number).id

    with ThreadPoolExecutor(1) as pool:
        if point in AGGREGATING:  # these stop the aggregator themselves, before the last update has arrived
            with federation.proxy.holding(SUBMIT) as held:
                run = opened()
                held.wait_until_there()
                struck = pool.submit(point, federation, Round(run, number), victim)
                federation.until(lambda: struck.done() or federation.is_stopped("aggregator"), "the aggregator's stop")
        else:
            with federation.stopped("aggregator", "before a round opens"):
                run = opened()
                struck = pool.submit(point, federation, Round(run, number), victim)
                federation.until(lambda: struck.done() or _is_prepared(federation), f"{point.__name__} to be prepared")
        struck.result()
    return run


def _is_prepared(federation: FaultFederation) -> bool:
    return federation.proxy.has_rules or bool(federation.query(_LOCKED))
