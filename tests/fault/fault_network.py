"""A network that drops, delays, duplicates and truncates: requests of every kind, drawn at random."""

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from fault import audit, specs
from fault.arena import Arena
from fault.proxy import ACTIONS, Action, Request

SHARE = 0.5
_CHANCE = 0.4  # of a request to be hit


@contextmanager
def bad_network(arena: Arena, rng: random.Random, num_faults: int) -> Iterator[list[Action]]:
    """So many requests go wrong; yields what is still to come."""
    coming: list[Action] = [rng.choice(ACTIONS) for _ in range(num_faults)]

    def choose(request: Request) -> Action | None:
        if rng.random() < _CHANCE and coming:
            return coming.pop()
        return None

    arena.proxy.choose = choose
    try:
        yield coming
    finally:
        arena.proxy.choose = lambda request: None


@pytest.mark.parametrize("method", specs.METHODS)
def test_requests_at_random(method: str, arena: Arena, rng: random.Random, num_faults: int) -> None:
    spec = specs.spec(method, num_rounds=3)
    with bad_network(arena, rng, math.ceil(num_faults * SHARE / len(specs.METHODS))) as coming:
        while coming:
            audit.completed(arena, arena.begin(spec), spec)


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("path", ["^GET /v1/artifacts/", "^PUT /v1/artifacts/", "^POST /v1/work/submit"])
def test_every_transfer_and_submission(path: str, action: Action, arena: Arena, rng: random.Random) -> None:
    """The first two of a kind, each of which is the whole of a round for its client."""
    spec = specs.spec(rng.choice(specs.METHODS), num_rounds=1)
    rule = arena.proxy.once(path, action, times=2)
    audit.completed(arena, arena.begin(spec), spec)
    assert rule.times <= 0, f"there were not two {path}"
