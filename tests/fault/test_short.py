"""The suite's short form: one federation, one run and the most difficult points of a round, in seconds."""

import random

import pytest

from fault import audit, specs
from fault.arena import Arena
from fault.fault_network import bad_network
from fault.points import SENDER, Round, before_closing, before_nudge, mid_upload, until_open

pytestmark = pytest.mark.full


FAULT_CLASS = "short form"


def test_a_run_completes_despite_faults_at_the_most_difficult_points(arena: Arena, rng: random.Random) -> None:
    """BYOL's target network never leaves the client: a state that is lost or promoted twice would change the
    weights."""
    spec = specs.spec("fedbyol", num_rounds=3)
    run_id = arena.begin(spec)
    first, second, third = (Round(run_id, number) for number in (1, 2, 3))
    with bad_network(arena, rng, 6):
        until_open(arena, first)
        before_nudge(arena, first, "api")
        until_open(arena, second)
        before_closing(arena, second, "aggregator")
    until_open(arena, third)
    mid_upload(arena, third, SENDER)
    with arena.refusing_connections(1.0):
        arena.crash_and_revive("beat")
    audit.completed(arena, run_id, spec)
