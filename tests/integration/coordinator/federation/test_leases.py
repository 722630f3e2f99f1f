"""Leases: granted, renewed, lost, and resumed."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from fedssl.client import NotAuthenticated, NotFound
from fedssl.protocol.states import Outcome, RunState, Verdict
from fedssl.protocol.work import RESOURCES_HEADER, Progress, Resources, Submit
from fedssl_coordinator.federation.work import waiting_claims
from fedssl_coordinator.federation.work.waiting_claims import POLL_SECONDS
from support.coordinator import Coordinator
from support.federation import tiny_spec
from support.scenario import Scenario
from support.tables import Tables


@pytest.fixture
def scenario(coordinator: Coordinator, tables: Tables, tmp_path: Path) -> Scenario:
    return Scenario(coordinator, tables, tmp_path, num_rounds=1)


def _lease_end(scenario: Scenario, name: str) -> datetime:
    end = scenario.tables.one(
        "SELECT lease_expires_at FROM assignments WHERE client_id = %s AND state = 'leased'", name
    )
    assert isinstance(end, datetime)
    return end


def test_a_restarted_worker_gets_its_own_lease_back(scenario: Scenario) -> None:
    first = scenario.claim("a")
    scenario.expire_lease("a")  # also after the lease has expired, until a sweep finds it
    again = scenario.claim("a")
    assert again == first
    assert _lease_end(scenario, "a") > datetime.now(UTC) + timedelta(seconds=50)
    assert [event.message for event in scenario.events("assignment.leased")] == ["a has claimed the assignment"]
    assert [event.message for event in scenario.events("assignment.resumed")] == ["a has resumed the assignment"]
    assert scenario.states() == [("a", 1, "leased"), ("b", 1, "offered")]


def test_an_offer_far_in_the_future_can_be_claimed_at_once(scenario: Scenario) -> None:
    """The database's clock was set back by a day after the round had opened."""
    scenario.tables.execute("UPDATE assignments SET offered_at = now() + interval '299 seconds'")
    assert scenario.workers["a"].claim(0) is None  # the round's own pause
    scenario.tables.execute("UPDATE assignments SET offered_at = now() + interval '1 day'")
    assert scenario.workers["a"].claim(0) is not None


@pytest.fixture
def rare_polls(monkeypatch: pytest.MonkeyPatch) -> float:
    """Make coordinators that start later poll every 20 s, and return this interval.

    Even a busy machine wakes a waiting claim sooner.
    """
    monkeypatch.setattr(waiting_claims, "POLL_SECONDS", seconds := 20.0)
    return seconds


def test_a_waiting_claim_is_woken_when_work_appears(
    rare_polls: float, scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis wakes the claim at once, and the claim holds no connection of the pool while it waits."""
    scenario.work("a")
    scenario.claim("b")
    with ThreadPoolExecutor(40) as pool:
        waiting = [pool.submit(scenario.workers["a"].claim, 30) for _ in range(40)]
        time.sleep(0.5)
        started = time.monotonic()
        scenario.expire_lease("b")
        scenario.advance()
        assert scenario.workers["b"].claim(20) is not None
        assert time.monotonic() - started < rare_polls / 2
        assert not any(claim.done() for claim in waiting)
        scenario.workers["b"].decline(scenario.round.assignments[-1].id, "no")
        monkeypatch.setattr(waiting_claims, "POLL_SECONDS", 0.2)  # a claim that finds the row locked checks again then
        scenario.coordinator.client.create_run(tiny_spec(cohort={"clients": ["a"]}))
        started = time.monotonic()
        for run in scenario.coordinator.client.runs():
            scenario.coordinator.advance(run.id)
        items = {item.assignment_id for claim in waiting if (item := claim.result()) is not None}
        assert len(items) == 1
        assert time.monotonic() - started < 3 * POLL_SECONDS


def test_a_claim_without_work_returns_nothing(scenario: Scenario) -> None:
    scenario.work("a")
    started = time.monotonic()
    assert scenario.workers["a"].claim(0.3) is None
    assert 0.3 <= time.monotonic() - started < 1.5


def test_a_heartbeat_renews_the_lease_and_reports_progress(scenario: Scenario) -> None:
    item = scenario.claim("a")
    scenario.expire_lease("a")
    progress = Progress(phase="training", epoch=1, num_epochs=2, step=3, num_steps=4, loss=0.5, images_per_second=6)
    reply = scenario.workers["a"].heartbeat(item.assignment_id, progress)
    assert reply.carry_on
    assert _lease_end(scenario, "a") > datetime.now(UTC) + timedelta(seconds=50)
    assert scenario.round.assignments[0].progress == progress
    scenario.workers["a"].heartbeat(item.assignment_id)  # without new values the last ones stay
    assert scenario.round.assignments[0].progress == progress
    scenario.advance()
    assert scenario.states() == [("a", 1, "leased"), ("b", 1, "offered")]


def test_a_heartbeat_reports_the_resources_of_the_worker(scenario: Scenario) -> None:
    item = scenario.claim("a")
    assert scenario.workers["a"].takes_resources
    held = Resources(memory_bytes=1_500_000_000, gpu_memory_bytes=3_000_000_000, gpu_utilisation=0.5)
    scenario.workers["a"].heartbeat(item.assignment_id, resources=held)
    scenario.workers["a"].heartbeat(item.assignment_id)  # without new values the last ones stay
    first, other = scenario.round.assignments
    reported = [(one.memory_bytes, one.gpu_memory_bytes, one.gpu_utilisation) for one in (first, other)]
    assert reported == [(1_500_000_000, 3_000_000_000, 0.5), (None, None, None)]


def test_an_invalid_memory_size_is_refused(scenario: Scenario) -> None:
    item = scenario.claim("a")
    with scenario.coordinator.http(scenario.coordinator.worker_token("a")) as http:
        for value in (-1, 2**60, 1.5, "much"):
            body = {"assignment_id": str(item.assignment_id), "resources": {"memory_bytes": value}}
            answer = http.post("/v1/work/heartbeat", json=body)
            assert answer.status_code == 422, value
            assert "memory_bytes" in answer.text


def test_a_claim_announces_that_resources_are_read(scenario: Scenario) -> None:
    with scenario.coordinator.http(scenario.coordinator.worker_token("a")) as http:
        assert RESOURCES_HEADER in http.post("/v1/work/claim", json={"wait_seconds": 0}).headers


def test_a_heartbeat_without_an_assignment_updates_last_seen(scenario: Scenario) -> None:
    scenario.tables.execute("UPDATE clients SET last_seen_at = NULL")
    assert scenario.workers["a"].heartbeat().carry_on
    seen = scenario.coordinator.client.client("a").last_seen_at
    assert seen is not None
    assert scenario.coordinator.client.client("b").last_seen_at is None


@pytest.mark.parametrize("what", ["heartbeat", "submit", "decline"])
def test_a_request_for_an_assignment_that_is_being_deleted_finds_none(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    from fedssl_coordinator.federation.work import repository

    item, worker = scenario.claim("a"), scenario.workers["a"]
    first = "renew" if what == "heartbeat" else "locked"
    read = getattr(repository, first)
    scenario.coordinator.client.stop(scenario.id)

    def delete_before(*arguments: Any) -> Any:
        monkeypatch.undo()
        scenario.coordinator.client.delete_run(scenario.id)
        return read(*arguments)

    monkeypatch.setattr(repository, first, delete_before)
    asked: dict[str, Callable[[], Any]] = {
        "heartbeat": lambda: worker.heartbeat(item.assignment_id),
        "submit": lambda: worker.submit(Submit(assignment_id=item.assignment_id, update="ab" * 32, num_examples=1)),
        "decline": lambda: worker.decline(item.assignment_id, "no"),
    }
    with pytest.raises(NotFound, match="has no assignment"):
        asked[what]()


def test_an_expired_lease_is_offered_again_before_the_deadline(scenario: Scenario) -> None:
    for attempt in (1, 2, 3):
        scenario.claim("a")
        scenario.expire_lease("a")
        assert scenario.needs_attention()
        scenario.advance()
        assert scenario.states()[attempt - 1 : attempt + 1] == [
            ("a", attempt, "expired"),
            ("a", attempt + 1, "offered"),
        ]
        assert not scenario.needs_attention()
        reply = scenario.workers["a"].heartbeat(scenario.item("a").assignment_id)
        assert (reply.carry_on, reply.reason) == (False, "no heartbeat within the lease")
    events = scenario.events("assignment.expired")
    assert [event.message for event in events] == ["a: no heartbeat within the lease; offered again"] * 3
    assert scenario.round.attempt == 1  # the round's own attempt continues
    scenario.work("a")
    assert not scenario.is_complete()
    scenario.work("b")
    assert scenario.is_complete()
    scenario.advance()
    assert scenario.round.verdict == Verdict.AGGREGATED


def test_an_expired_lease_is_not_offered_again_in_this_attempt_after_the_deadline(scenario: Scenario) -> None:
    scenario.work("b")
    scenario.claim("a")
    scenario.expire_lease("a")
    scenario.pass_deadline()
    scenario.advance()
    assert scenario.events("assignment.expired")[0].message == "a: no heartbeat within the lease"
    assert scenario.states() == [("a", 1, "expired"), ("a", 2, "offered"), ("b", 1, "accepted")]
    assert scenario.round.attempt == 2


def test_a_declined_assignment_waits_for_the_others_before_it_is_offered_again(scenario: Scenario) -> None:
    scenario.workers["a"].decline(scenario.claim("a").assignment_id, "no disk space")
    scenario.claim("b")
    scenario.advance()
    assert scenario.states() == [("a", 1, "declined"), ("b", 1, "leased")]
    assert scenario.workers["a"].claim(0) is None
    scenario.deliver("b")
    scenario.advance()
    assert scenario.states() == [("a", 1, "declined"), ("a", 2, "offered"), ("b", 1, "accepted")]
    [event] = scenario.events("round.reoffered")
    assert event.message == "attempt 2 of 3, offered again: a: no disk space"
    assert event.data == {"clients": {"a": "no disk space"}}


def test_a_client_that_declined_is_asked_again_after_a_pause_or_a_new_registration(scenario: Scenario) -> None:
    """If it were asked again at once, it would quickly use up the round's attempts."""
    scenario.workers["a"].decline(scenario.claim("a").assignment_id, "no disk space")
    scenario.work("b")
    scenario.advance()
    assert scenario.states() == [("a", 1, "declined"), ("a", 2, "offered"), ("b", 1, "accepted")]
    assert scenario.workers["a"].claim(0) is None
    offered = scenario.tables.one("SELECT offered_at - now() FROM assignments WHERE state = 'offered'")
    assert timedelta(seconds=290) < offered < timedelta(seconds=300)
    assert not scenario.needs_attention()
    scenario.workers["a"] = scenario.coordinator.worker("a")  # it registers again
    scenario.work("a")
    scenario.advance()
    assert scenario.round.verdict == Verdict.AGGREGATED


def test_declining_twice_gets_the_same_answer(scenario: Scenario) -> None:
    item = scenario.claim("a")
    first = scenario.workers["a"].decline(item.assignment_id, "no disk space")
    assert scenario.workers["a"].decline(item.assignment_id, "something else") == first
    assert scenario.round.assignments[0].reason == "no disk space"
    assert len(scenario.events("assignment.declined")) == 1


def test_a_claim_returns_the_clients_own_lease_first_and_then_the_oldest_offer(
    coordinator: Coordinator, tables: Tables, tmp_path: Path
) -> None:
    older = Scenario(coordinator, tables, tmp_path, "a")
    newer = Scenario(coordinator, tables, tmp_path, "a")
    assert older.claim("a").run_id == older.id
    assert newer.claim("a").run_id == older.id  # the lease that the client holds
    older.deliver("a")
    assert newer.claim("a").run_id == newer.id


def test_a_claim_names_the_last_accepted_update(scenario: Scenario, coordinator: Coordinator, tmp_path: Path) -> None:
    two = Scenario(coordinator, scenario.tables, tmp_path, "cd", num_rounds=2)
    first = two.claim("c")
    assert (first.last_accepted, first.frozen) == (None, None)
    two.deliver("c", 1.0)
    two.work("d", value=2.0)
    two.advance()
    for assignment in two.rounds[0].assignments:
        item = two.claim(assignment.client_id)
        assert item.last_accepted is not None
        assert (item.last_accepted.round_number, item.last_accepted.update) == (1, assignment.update)
        assert item.broadcast == two.run.model
    assert [each.client_id for each in coordinator.client.assignments(two.id, 1)] == ["c", "d"]


def test_a_pause_keeps_leases_and_offers(scenario: Scenario) -> None:
    item = scenario.claim("a")
    scenario.coordinator.client.pause(scenario.id)
    assert scenario.workers["b"].claim(0) is None
    assert scenario.workers["a"].claim(0) is None
    assert scenario.workers["a"].heartbeat(item.assignment_id).carry_on
    scenario.expire_lease("a")
    scenario.pass_deadline()
    scenario.advance()  # a paused run does not change
    assert not scenario.needs_attention()
    assert scenario.states() == [("a", 1, "leased"), ("b", 1, "offered")]
    scenario.deliver("a")  # an update in training may still be delivered
    deadline = scenario.coordinator.client.resume(scenario.id).current_round
    assert deadline is not None
    assert deadline.deadline > datetime.now(UTC) + timedelta(seconds=3000)  # the pause does not count
    scenario.work("b")
    scenario.advance()
    assert scenario.run.outcome == Outcome.COMPLETED


def test_a_revoked_client_loses_its_lease_and_is_not_waited_for(scenario: Scenario) -> None:
    scenario.claim("a")
    scenario.work("b")
    scenario.coordinator.client.revoke_client("a")
    with pytest.raises(NotAuthenticated):
        scenario.workers["a"].heartbeat()
    assert scenario.states() == [("a", 1, "expired"), ("b", 1, "accepted")]
    assert [event.message for event in scenario.events("assignment.expired")] == ["a: the client was revoked"]
    assert scenario.needs_attention()
    scenario.advance()
    assert (scenario.round.verdict, scenario.run.outcome) == (Verdict.PARTIAL, Outcome.COMPLETED)
    assert scenario.events("round.closed")[0].data["clients"] == {"a": "the client was revoked", "b": "accepted"}


def test_an_update_from_before_the_revocation_counts(scenario: Scenario) -> None:
    scenario.work("a", "b")
    scenario.coordinator.client.revoke_client("a")
    scenario.advance()
    assert scenario.round.verdict == Verdict.AGGREGATED


def test_a_round_whose_clients_were_all_revoked_fails_at_once(scenario: Scenario) -> None:
    for name in "ab":
        scenario.coordinator.client.revoke_client(name)
    scenario.advance()
    run = scenario.run
    assert (run.state, run.outcome) == (RunState.FINISHED, Outcome.FAILED)
    assert run.reason == ("round 1: too few updates after 1 attempt: a, b: the client was revoked")


def test_a_run_fails_if_a_revocation_makes_its_quorum_impossible(
    coordinator: Coordinator, tables: Tables, tmp_path: Path
) -> None:
    """A quorum in the spec is a promise, for example of privacy, and does not shrink with the cohort."""
    scenario = Scenario(coordinator, tables, tmp_path, "ab", cohort={"min_updates": 2})
    scenario.work("b")
    coordinator.client.revoke_client("a")
    scenario.advance()
    assert scenario.run.outcome == Outcome.FAILED
    assert "a: the client was revoked" in str(scenario.run.reason)


def test_the_sweep_finds_a_client_that_was_revoked_just_before_its_offer(scenario: Scenario) -> None:
    """The aggregator chose the client before the revocation was committed."""
    scenario.tables.execute("UPDATE clients SET revoked_at = now() WHERE id = 'a'")
    assert scenario.needs_attention()
    scenario.work("b")
    scenario.advance()
    assert scenario.round.verdict == Verdict.PARTIAL
    assert [event.message for event in scenario.events("assignment.expired")] == ["a: the client was revoked"]
