"""A process is killed in the rounds of the exact probe, of sums and of counts: the classifier keeps its bits."""

import random
from collections.abc import Iterator

import pytest

from fault import audit, specs
from fault.arena import POSTGRES, VALKEY, Arena
from fault.injected import Injected
from fault.points import DISTILLING, POINTS, SENDER, Point, Round, mid_promotion, until_open

FAULT_CLASS = "rounds of the probe"


@pytest.fixture(scope="module")
def arena(injected: Injected, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    """A federation whose sites have labels."""

    def labels(name: str) -> dict[str, str]:
        return {"FEDSSL_WORKER_LABELS": "own"} if name in specs.CLIENTS else {}

    with Arena(tmp_path_factory.mktemp("probe"), injected, environment_of=labels) as running:
        yield running


def _points(victim: str) -> list[Point]:
    """Return the points of a round at which this process can be killed. The probe keeps no state on clients."""
    return [point for point, victims in POINTS if victim in victims and point not in (*DISTILLING, mid_promotion)]


@pytest.mark.parametrize("victim", [SENDER, "api", "aggregator", POSTGRES, VALKEY])
def test_killed_in_every_round(victim: str, arena: Arena, rng: random.Random) -> None:
    """One point per round, in an order that is drawn: the first round has the sums, the later ones the counts."""
    points = _points(victim)
    points += rng.sample(points, max(0, 2 - len(points)))  # both kinds of rounds
    spec = specs.spec("ridge-probe", num_rounds=len(points), seed=rng.randrange(2**32))
    run_id = arena.begin(spec)
    for number, point in enumerate(rng.sample(points, len(points)), start=1):
        at = Round(run_id, number)
        until_open(arena, at)
        point(arena, at, victim)
    audit.completed(arena, run_id, spec)
