"""Kills at every named point of a round, of each process that could die there."""

import random

import pytest

from fault import audit, specs
from fault.federation import FaultFederation
from fault.points import AGGREGATING, DISTILLING, POINTS, Point, Round, until_open

FAULT_CLASS = "kills at named points"

_CASES = [
    pytest.param(point, victim, id=f"{point.__name__}-{victim}") for point, victims in POINTS for victim in victims
]


def _methods(point: Point) -> tuple[str, ...]:
    """Return the methods whose rounds reach this point."""
    if point in DISTILLING:
        return ("flesd",)
    return tuple(name for name in specs.METHODS if name != "flesd" or point not in AGGREGATING)


@pytest.mark.parametrize(("point", "victim"), _CASES)
def test_a_run_completes_after_a_kill_at_a_point(
    point: Point, victim: str, federation: FaultFederation, rng: random.Random
) -> None:
    """The process is killed in both rounds of a run."""
    spec = specs.spec(rng.choice(_methods(point)), num_rounds=2)
    run_id = federation.begin(spec)
    for number in range(1, spec.num_rounds + 1):
        at = Round(run_id, number)
        until_open(federation, at)
        point(federation, at, victim)
    audit.completed(federation, run_id, spec)
