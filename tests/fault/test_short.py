"""The suite's short form: one federation, one run and the most difficult points of a round, in seconds."""

import random

import pytest

from fault import audit, specs
from fault.fault_network import bad_network
from fault.federation import FaultFederation
from fault.points import SENDER, Round, before_closing, before_nudge, mid_upload, until_open

pytestmark = pytest.mark.full


FAULT_CLASS = "short form"


def test_a_run_completes_despite_faults_at_the_most_difficult_points(
    federation: FaultFederation, rng: random.Random
) -> None:
    """BYOL's target network never leaves the client: a state that is lost or promoted twice would change the
    weights."""
    spec = specs.spec("fedbyol", num_rounds=3)
    run_id = federation.begin(spec)
    first, second, third = (Round(run_id, number) for number in (1, 2, 3))
    with bad_network(federation, rng, 6):
        until_open(federation, first)
        before_nudge(federation, first, "api")
        until_open(federation, second)
        before_closing(federation, second, "aggregator")
    until_open(federation, third)
    mid_upload(federation, third, SENDER)
    with federation.refusing_connections(1.0):
        federation.crash_and_revive("beat")
    audit.completed(federation, run_id, spec)
