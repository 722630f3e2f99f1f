"""Postgres and Redis stop for a while, refuse connections, or lose everything."""

import random

from fault import audit, specs
from fault.federation import POSTGRES, VALKEY, FaultFederation
from fault.points import Round, until_open, without_nudges

FAULT_CLASS = "servers away"

MINUTE = 60.0


def test_a_run_completes_although_postgres_refuses_connections_for_a_minute(
    federation: FaultFederation, rng: random.Random
) -> None:
    spec = specs.spec(rng.choice(specs.METHODS), num_rounds=2)
    run_id = federation.begin(spec)
    until_open(federation, Round(run_id, 1))
    with federation.refusing_connections(MINUTE):
        pass
    audit.completed(federation, run_id, spec)


def test_a_run_completes_although_postgres_is_shut_down(federation: FaultFederation, rng: random.Random) -> None:
    """The server stops in both rounds, the second time for longer than a lease."""
    spec = specs.spec(rng.choice(specs.METHODS), num_rounds=2)
    run_id = federation.begin(spec)
    for number, seconds in ((1, 3.0), (2, 12.0)):
        until_open(federation, Round(run_id, number))
        with federation.switched_off(POSTGRES, seconds):
            pass
    audit.completed(federation, run_id, spec)


def test_a_run_completes_although_postgres_is_read_only_for_a_while(federation: FaultFederation) -> None:
    """This happens in a round and in a distillation, as after a failover to a standby that is promoted later."""
    spec = specs.spec("flesd", num_rounds=2)
    run_id = federation.begin(spec)
    running = "SELECT 1 FROM distillation_jobs WHERE run_id = %s AND round_number = 2 AND state = 'running'"
    until_open(federation, Round(run_id, 1))
    with federation.read_only(5.0):
        pass
    federation.until(lambda: federation.query(running, run_id), "a distillation")
    with federation.read_only(5.0):
        pass
    audit.completed(federation, run_id, spec)


def test_a_run_completes_although_redis_loses_all_messages(federation: FaultFederation, rng: random.Random) -> None:
    """Redis loses the messages while the aggregator is stopped, and the sweep finds the work that they were about."""
    spec = specs.spec(rng.choice(specs.METHODS), num_rounds=2)
    run_id = federation.begin(spec)
    for number in range(1, spec.num_rounds + 1):
        at = Round(run_id, number)
        until_open(federation, at)
        without_nudges(federation, at)
    audit.completed(federation, run_id, spec)


def test_a_run_completes_after_redis_was_unreachable(federation: FaultFederation, rng: random.Random) -> None:
    """Nothing is aggregated meanwhile, and nothing is lost: the run continues when Redis is reachable again."""
    spec = specs.spec(rng.choice(specs.METHODS), num_rounds=2)
    run_id = federation.begin(spec)
    until_open(federation, Round(run_id, 1))
    with federation.switched_off(VALKEY, 8.0):
        pass
    audit.completed(federation, run_id, spec)
