"""Postgres and Redis stop for a while, refuse connections, or lose everything."""

import random

from fault import audit, specs
from fault.arena import POSTGRES, VALKEY, Arena
from fault.points import Round, until_open, without_nudges

FAULT_CLASS = "servers away"

MINUTE = 60.0


def test_a_run_completes_although_postgres_refuses_connections_for_a_minute(arena: Arena, rng: random.Random) -> None:
    spec = specs.spec(rng.choice(specs.METHODS), num_rounds=2)
    run_id = arena.begin(spec)
    until_open(arena, Round(run_id, 1))
    with arena.refusing_connections(MINUTE):
        pass
    audit.completed(arena, run_id, spec)


def test_a_run_completes_although_postgres_is_shut_down(arena: Arena, rng: random.Random) -> None:
    """The server stops in both rounds, the second time for longer than a lease."""
    spec = specs.spec(rng.choice(specs.METHODS), num_rounds=2)
    run_id = arena.begin(spec)
    for number, seconds in ((1, 3.0), (2, 12.0)):
        until_open(arena, Round(run_id, number))
        with arena.switched_off(POSTGRES, seconds):
            pass
    audit.completed(arena, run_id, spec)


def test_a_run_completes_although_postgres_is_read_only_for_a_while(arena: Arena) -> None:
    """This happens in a round and in a distillation, as after a failover to a standby that is promoted later."""
    spec = specs.spec("flesd", num_rounds=2)
    run_id = arena.begin(spec)
    running = "SELECT 1 FROM distillation_jobs WHERE run_id = %s AND round_number = 2 AND state = 'running'"
    until_open(arena, Round(run_id, 1))
    with arena.read_only(5.0):
        pass
    arena.until(lambda: arena.query(running, run_id), "a distillation")
    with arena.read_only(5.0):
        pass
    audit.completed(arena, run_id, spec)


def test_a_run_completes_although_redis_loses_all_messages(arena: Arena, rng: random.Random) -> None:
    """Redis loses the messages while the aggregator is stopped, and the sweep finds the work that they were about."""
    spec = specs.spec(rng.choice(specs.METHODS), num_rounds=2)
    run_id = arena.begin(spec)
    for number in range(1, spec.num_rounds + 1):
        at = Round(run_id, number)
        until_open(arena, at)
        without_nudges(arena, at)
    audit.completed(arena, run_id, spec)


def test_a_run_completes_after_redis_was_unreachable(arena: Arena, rng: random.Random) -> None:
    """Nothing is aggregated meanwhile, and nothing is lost: the run continues when Redis is reachable again."""
    spec = specs.spec(rng.choice(specs.METHODS), num_rounds=2)
    run_id = arena.begin(spec)
    until_open(arena, Round(run_id, 1))
    with arena.switched_off(VALKEY, 8.0):
        pass
    audit.completed(arena, run_id, spec)
