"""Claims of clients that were not drawn: the answer has the time of the next claim, and no connection stays open."""

from pathlib import Path

import pytest

from fedssl.protocol.work import LONGEST_PAUSE_SECONDS, PAUSE_HEADER
from support.coordinator import Coordinator
from support.federation import tiny_spec
from support.scenario import Scenario
from support.tables import Tables


@pytest.fixture
def scenario(coordinator: Coordinator, tables: Tables, tmp_path: Path) -> Scenario:
    return Scenario(coordinator, tables, tmp_path, num_rounds=9)


def _open_since(scenario: Scenario, seconds: float) -> None:
    scenario.tables.execute(
        "UPDATE rounds SET opened_at = now() - %s * interval '1 second' WHERE run_id = %s AND state <> 'closed'",
        seconds,
        scenario.id,
    )


def _pause(scenario: Scenario, name: str = "a") -> float:
    """Return the pause after a claim that finds no work."""
    assert scenario.workers[name].claim(0) is None
    return scenario.workers[name].pause_seconds


def test_a_client_returns_when_the_round_is_expected_to_end(scenario: Scenario) -> None:
    for seconds in (20, 50, 2000):  # their median is 50
        scenario.work("a", "b")
        scenario.advance()
        scenario.tables.execute(
            "UPDATE rounds SET opened_at = closed_at - %s * interval '1 second' WHERE number = "
            "(SELECT max(number) FROM rounds WHERE state = 'closed')",
            seconds,
        )
    scenario.work("a")
    _open_since(scenario, 10)
    pauses = {_pause(scenario) for _ in range(12)}
    assert min(pauses) >= 29  # a quarter of 40 s is the spread
    assert max(pauses) <= 40
    assert len(pauses) > 1
    _open_since(scenario, 45)  # the remaining time is too short for a pause
    assert _pause(scenario) == 0
    _open_since(scenario, 160)  # expected to take an eighth of its age longer: 20 s
    assert 15 <= _pause(scenario) <= 20
    _open_since(scenario, 4000)
    assert 45 <= _pause(scenario) <= LONGEST_PAUSE_SECONDS


def test_a_client_that_declined_gets_a_pause_and_one_with_a_later_offer_waits(scenario: Scenario) -> None:
    _open_since(scenario, 96)
    scenario.claim("a")
    scenario.workers["a"].decline(scenario.item("a").assignment_id, "busy")
    assert 9 <= _pause(scenario) <= 12  # in the first round, only the round's age is known
    scenario.tables.execute("UPDATE assignments SET offered_at = now() + interval '99 seconds' WHERE client_id = 'b'")
    assert _pause(scenario, "b") == 0


def test_claims_wait_if_a_round_may_open_at_any_moment(coordinator: Coordinator, scenario: Scenario) -> None:
    scenario.work("a")
    assert _pause(scenario) == 0  # the round has just been opened
    _open_since(scenario, 96)
    assert _pause(scenario) > 0
    others = coordinator.client.create_run(tiny_spec(cohort={"clients": ["c"]}))
    coordinator.advance(others.id)
    assert _pause(scenario) > 0  # this run is not for this client
    next_run = coordinator.client.create_run(tiny_spec(cohort={"min_clients": 3}))
    assert _pause(scenario) == 0
    coordinator.client.stop(next_run.id)
    assert _pause(scenario) > 0
    coordinator.client.pause(scenario.id)
    assert _pause(scenario) == 0


def test_only_workers_that_ask_for_a_pause_get_one(coordinator: Coordinator, scenario: Scenario) -> None:
    scenario.work("a")
    _open_since(scenario, 96)
    with coordinator.http(coordinator.worker_token("a")) as http:
        older = http.post("/v1/work/claim", json={"wait_seconds": 0.2})
        newer = http.post("/v1/work/claim", json={"wait_seconds": 60}, headers={PAUSE_HEADER: "1"})
    assert (older.status_code, "Retry-After" in older.headers) == (204, False)
    assert (newer.status_code, newer.content) == (204, b"")
    assert 9 <= int(newer.headers["Retry-After"]) <= 12
