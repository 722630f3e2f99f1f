"""Any process is killed at any moment and restarted a little later, or stopped for a while."""

import functools
import math
import random
import time
from uuid import UUID

import pytest

from fault import audit, specs
from fault.federation import FaultFederation

FAULT_CLASS = "kills at random"

ALL = (*specs.METHODS, *specs.OBJECTIVES)
SHARE = 0.2
"""The share of kills among all faults. It is small, because a process takes seconds to start again."""


@pytest.mark.parametrize("method", ALL)
def test_runs_complete_despite_random_kills_and_stops(
    method: str, federation: FaultFederation, rng: random.Random, num_faults: int
) -> None:
    left = math.ceil(num_faults * SHARE / len(ALL))
    spec = specs.spec(method, num_rounds=3)
    while left > 0:
        run_id = federation.begin(spec)
        while left > 0 and not _is_finished(federation, run_id):
            time.sleep(rng.uniform(0.1, 1.0))
            _disturb(federation, rng)
            left -= 1
        audit.completed(federation, run_id, spec)


def _disturb(federation: FaultFederation, rng: random.Random) -> None:
    name = rng.choice(federation.names)
    if rng.random() < 0.6:
        federation.crash_and_revive(name, away_seconds=rng.uniform(0.0, 1.0))
    else:
        with federation.stopped(name):
            time.sleep(rng.uniform(0.2, 2.0))


def _is_finished(federation: FaultFederation, run_id: UUID) -> bool:
    return bool(federation.query("SELECT 1 FROM runs WHERE id = %s AND state = 'finished'", run_id))


def test_a_run_completes_although_workers_sleep_longer_than_their_leases(
    federation: FaultFederation, rng: random.Random
) -> None:
    """The work is offered again, and the same worker does it with the same bits."""
    method = rng.choice(specs.METHODS)
    cohort = {**specs.COHORT, "lease_seconds": 2}
    spec = specs.spec(method, num_rounds=2, cohort=cohort)
    run_id = federation.begin(spec)
    for number in range(1, spec.num_rounds + 1):
        federation.until(functools.partial(_has_leased, federation, run_id, number), "a lease")
        with federation.stopped("client-0", "beyond its lease"), federation.stopped("client-1", "beyond its lease"):
            time.sleep(3.5)
    audit.completed(federation, run_id, spec)
    kinds = [event.kind for event in federation.client.event_log(run_id)]
    assert "assignment.expired" in kinds


def _has_leased(federation: FaultFederation, run_id: UUID, number: int) -> bool:
    statement = "SELECT 1 FROM assignments WHERE run_id = %s AND round_number = %s AND state = 'leased'"
    return bool(federation.query(statement, run_id, number))
