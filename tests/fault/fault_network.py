"""A network that drops, delays, duplicates and truncates requests of every kind, drawn at random."""

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from fault import audit, specs
from fault.federation import FaultFederation
from fault.proxy import ACTIONS, Action, Request

FAULT_CLASS = "network"

SHARE = 0.5
_CHANCE = 0.4  # of a request to be hit
_MOST_RUNS = 5  # of four rounds; only some workers send their updates with the request that is disturbed


@contextmanager
def bad_network(federation: FaultFederation, rng: random.Random, num_faults: int) -> Iterator[list[Action]]:
    """Let this many requests fail. Yields the faults that have not happened yet."""
    coming: list[Action] = [rng.choice(ACTIONS) for _ in range(num_faults)]

    def choose(request: Request) -> Action | None:
        if rng.random() < _CHANCE and coming:
            return coming.pop()
        return None

    federation.proxy.choose = choose
    try:
        yield coming
    finally:
        federation.proxy.choose = lambda request: None


@pytest.mark.parametrize("method", specs.METHODS)
def test_runs_complete_despite_random_network_faults(
    method: str, federation: FaultFederation, rng: random.Random, num_faults: int
) -> None:
    spec = specs.spec(method, num_rounds=3)
    with bad_network(federation, rng, math.ceil(num_faults * SHARE / len(specs.METHODS))) as coming:
        while coming:
            audit.completed(federation, federation.begin(spec), spec)


@pytest.mark.parametrize(
    "path", ["^GET /v1/artifacts/", "^PUT /v1/artifacts/", "^POST /v1/work/deliver", "^POST /v1/work/(submit|claim)"]
)
def test_runs_complete_despite_every_fault_of_one_kind_of_request(
    path: str, federation: FaultFederation, rng: random.Random
) -> None:
    """Each fault hits the request, one after another: a request that is sent again meets the next fault."""
    rules = [federation.proxy.once(path, action, times=2) for action in rng.sample(ACTIONS, k=len(ACTIONS))]
    for _ in range(_MOST_RUNS):
        # Because of the other seed, no broadcast is known yet.
        spec = specs.spec(rng.choice(specs.METHODS), num_rounds=4, seed=rng.randrange(10**6))
        audit.completed(federation, federation.begin(spec), spec)
        if not any(rule.times > 0 for rule in rules):
            break
    assert [rule.action for rule in rules if rule.times > 0] == []
