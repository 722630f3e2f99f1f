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
from support.cast import Cast
from support.coordinator import Coordinator
from support.federation import tiny_spec
from support.tables import Tables


@pytest.fixture
def cast(coordinator: Coordinator, tables: Tables, tmp_path: Path) -> Cast:
    return Cast(coordinator, tables, tmp_path, num_rounds=1)


def _lease_end(cast: Cast, name: str) -> datetime:
    end = cast.tables.one("SELECT lease_expires_at FROM assignments WHERE client_id = %s AND state = 'leased'", name)
    assert isinstance(end, datetime)
    return end


def test_a_restarted_worker_gets_its_own_lease_back(cast: Cast) -> None:
    first = cast.claim("a")
    cast.lapse("a")  # also after the lease has expired, until a sweep finds it
    again = cast.claim("a")
    assert again == first
    assert _lease_end(cast, "a") > datetime.now(UTC) + timedelta(seconds=50)
    assert [event.message for event in cast.events("assignment.leased")] == ["a has claimed the assignment"]
    assert [event.message for event in cast.events("assignment.resumed")] == ["a has resumed the assignment"]
    assert cast.states() == [("a", 1, "leased"), ("b", 1, "offered")]


def test_an_offer_far_in_the_future_can_be_claimed_at_once(cast: Cast) -> None:
    """The database's clock was set back by a day after the round had opened."""
    cast.tables.execute("UPDATE assignments SET offered_at = now() + interval '299 seconds'")
    assert cast.workers["a"].claim(0) is None  # the round's own pause
    cast.tables.execute("UPDATE assignments SET offered_at = now() + interval '1 day'")
    assert cast.workers["a"].claim(0) is not None


@pytest.fixture
def rare_polls(monkeypatch: pytest.MonkeyPatch) -> float:
    """Make coordinators that start later poll every 20 s, and return this interval.

    Even a busy machine wakes a waiting claim sooner.
    """
    monkeypatch.setattr(waiting_claims, "POLL_SECONDS", seconds := 20.0)
    return seconds


def test_a_waiting_claim_is_woken_when_work_appears(
    rare_polls: float, cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis wakes the claim at once, and the claim holds no connection of the pool while it waits."""
    cast.work("a")
    cast.claim("b")
    with ThreadPoolExecutor(40) as pool:
        waiting = [pool.submit(cast.workers["a"].claim, 30) for _ in range(40)]
        time.sleep(0.5)
        started = time.monotonic()
        cast.lapse("b")
        cast.advance()
        assert cast.workers["b"].claim(20) is not None
        assert time.monotonic() - started < rare_polls / 2
        assert not any(claim.done() for claim in waiting)
        cast.workers["b"].decline(cast.round.assignments[-1].id, "no")
        monkeypatch.setattr(waiting_claims, "POLL_SECONDS", 0.2)  # a claim that finds the row locked checks again then
        cast.coordinator.client.create_run(tiny_spec(cohort={"clients": ["a"]}))
        started = time.monotonic()
        for run in cast.coordinator.client.runs():
            cast.coordinator.advance(run.id)
        items = {item.assignment_id for claim in waiting if (item := claim.result()) is not None}
        assert len(items) == 1
        assert time.monotonic() - started < 3 * POLL_SECONDS


def test_a_claim_without_work_returns_nothing(cast: Cast) -> None:
    cast.work("a")
    started = time.monotonic()
    assert cast.workers["a"].claim(0.3) is None
    assert 0.3 <= time.monotonic() - started < 1.5


def test_a_heartbeat_renews_the_lease_and_reports_progress(cast: Cast) -> None:
    item = cast.claim("a")
    cast.lapse("a")
    progress = Progress(phase="training", epoch=1, num_epochs=2, step=3, num_steps=4, loss=0.5, images_per_second=6)
    reply = cast.workers["a"].heartbeat(item.assignment_id, progress)
    assert reply.carry_on
    assert _lease_end(cast, "a") > datetime.now(UTC) + timedelta(seconds=50)
    assert cast.round.assignments[0].progress == progress
    cast.workers["a"].heartbeat(item.assignment_id)  # without new values the last ones stay
    assert cast.round.assignments[0].progress == progress
    cast.advance()
    assert cast.states() == [("a", 1, "leased"), ("b", 1, "offered")]


def test_a_heartbeat_reports_the_resources_of_the_worker(cast: Cast) -> None:
    item = cast.claim("a")
    assert cast.workers["a"].takes_resources
    held = Resources(memory_bytes=1_500_000_000, gpu_memory_bytes=3_000_000_000, gpu_utilisation=0.5)
    cast.workers["a"].heartbeat(item.assignment_id, resources=held)
    cast.workers["a"].heartbeat(item.assignment_id)  # without new values the last ones stay
    first, other = cast.round.assignments
    reported = [(one.memory_bytes, one.gpu_memory_bytes, one.gpu_utilisation) for one in (first, other)]
    assert reported == [(1_500_000_000, 3_000_000_000, 0.5), (None, None, None)]


@pytest.mark.parametrize("value", [-1, 2**60, 1.5, "much"])
def test_an_invalid_memory_size_is_refused(cast: Cast, value: object) -> None:
    item = cast.claim("a")
    with cast.coordinator.http(cast.coordinator.worker_token("a")) as http:
        body = {"assignment_id": str(item.assignment_id), "resources": {"memory_bytes": value}}
        answer = http.post("/v1/work/heartbeat", json=body)
    assert answer.status_code == 422
    assert "memory_bytes" in answer.text


def test_a_claim_announces_that_resources_are_read(cast: Cast) -> None:
    with cast.coordinator.http(cast.coordinator.worker_token("a")) as http:
        assert RESOURCES_HEADER in http.post("/v1/work/claim", json={"wait_seconds": 0}).headers


def test_a_heartbeat_without_an_assignment_updates_last_seen(cast: Cast) -> None:
    cast.tables.execute("UPDATE clients SET last_seen_at = NULL")
    assert cast.workers["a"].heartbeat().carry_on
    seen = cast.coordinator.client.client("a").last_seen_at
    assert seen is not None
    assert cast.coordinator.client.client("b").last_seen_at is None


@pytest.mark.parametrize("what", ["heartbeat", "submit", "decline"])
def test_a_request_for_an_assignment_that_is_being_deleted_finds_none(
    cast: Cast, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    from fedssl_coordinator.federation.work import repository

    item, worker = cast.claim("a"), cast.workers["a"]
    first = "renew" if what == "heartbeat" else "locked"
    read = getattr(repository, first)
    cast.coordinator.client.stop(cast.id)

    def delete_before(*arguments: Any) -> Any:
        monkeypatch.undo()
        cast.coordinator.client.delete_run(cast.id)
        return read(*arguments)

    monkeypatch.setattr(repository, first, delete_before)
    asked: dict[str, Callable[[], Any]] = {
        "heartbeat": lambda: worker.heartbeat(item.assignment_id),
        "submit": lambda: worker.submit(Submit(assignment_id=item.assignment_id, update="ab" * 32, num_examples=1)),
        "decline": lambda: worker.decline(item.assignment_id, "no"),
    }
    with pytest.raises(NotFound, match="has no assignment"):
        asked[what]()


def test_an_expired_lease_is_offered_again_before_the_deadline(cast: Cast) -> None:
    for attempt in (1, 2, 3):
        cast.claim("a")
        cast.lapse("a")
        assert cast.awaits_attention()
        cast.advance()
        assert cast.states()[attempt - 1 : attempt + 1] == [("a", attempt, "expired"), ("a", attempt + 1, "offered")]
        assert not cast.awaits_attention()
        reply = cast.workers["a"].heartbeat(cast.item("a").assignment_id)
        assert (reply.carry_on, reply.reason) == (False, "no heartbeat within the lease")
    events = cast.events("assignment.expired")
    assert [event.message for event in events] == ["a: no heartbeat within the lease; offered again"] * 3
    assert cast.round.attempt == 1  # the round's own attempt continues
    cast.work("a")
    assert not cast.is_complete()
    cast.work("b")
    assert cast.is_complete()
    cast.advance()
    assert cast.round.verdict == Verdict.AGGREGATED


def test_an_expired_lease_is_not_offered_again_in_this_attempt_after_the_deadline(cast: Cast) -> None:
    cast.work("b")
    cast.claim("a")
    cast.lapse("a")
    cast.pass_deadline()
    cast.advance()
    assert cast.events("assignment.expired")[0].message == "a: no heartbeat within the lease"
    assert cast.states() == [("a", 1, "expired"), ("a", 2, "offered"), ("b", 1, "accepted")]
    assert cast.round.attempt == 2


def test_a_declined_assignment_waits_for_the_others_before_it_is_offered_again(cast: Cast) -> None:
    cast.workers["a"].decline(cast.claim("a").assignment_id, "no disk space")
    cast.claim("b")
    cast.advance()
    assert cast.states() == [("a", 1, "declined"), ("b", 1, "leased")]
    assert cast.workers["a"].claim(0) is None
    cast.deliver("b")
    cast.advance()
    assert cast.states() == [("a", 1, "declined"), ("a", 2, "offered"), ("b", 1, "accepted")]
    [event] = cast.events("round.reoffered")
    assert event.message == "attempt 2 of 3, offered again: a: no disk space"
    assert event.data == {"clients": {"a": "no disk space"}}


def test_a_client_that_declined_is_asked_again_after_a_pause_or_a_new_registration(cast: Cast) -> None:
    """If it were asked again at once, it would quickly use up the round's attempts."""
    cast.workers["a"].decline(cast.claim("a").assignment_id, "no disk space")
    cast.work("b")
    cast.advance()
    assert cast.states() == [("a", 1, "declined"), ("a", 2, "offered"), ("b", 1, "accepted")]
    assert cast.workers["a"].claim(0) is None
    offered = cast.tables.one("SELECT offered_at - now() FROM assignments WHERE state = 'offered'")
    assert timedelta(seconds=290) < offered < timedelta(seconds=300)
    assert not cast.awaits_attention()
    cast.workers["a"] = cast.coordinator.worker("a")  # it registers again
    cast.work("a")
    cast.advance()
    assert cast.round.verdict == Verdict.AGGREGATED


def test_declining_twice_gets_the_same_answer(cast: Cast) -> None:
    item = cast.claim("a")
    first = cast.workers["a"].decline(item.assignment_id, "no disk space")
    assert cast.workers["a"].decline(item.assignment_id, "something else") == first
    assert cast.round.assignments[0].reason == "no disk space"
    assert len(cast.events("assignment.declined")) == 1


def test_a_claim_returns_the_clients_own_lease_first_and_then_the_oldest_offer(
    coordinator: Coordinator, tables: Tables, tmp_path: Path
) -> None:
    older = Cast(coordinator, tables, tmp_path, "a")
    newer = Cast(coordinator, tables, tmp_path, "a")
    assert older.claim("a").run_id == older.id
    assert newer.claim("a").run_id == older.id  # the lease that the client holds
    older.deliver("a")
    assert newer.claim("a").run_id == newer.id


def test_a_claim_names_the_last_accepted_update(cast: Cast, coordinator: Coordinator, tmp_path: Path) -> None:
    two = Cast(coordinator, cast.tables, tmp_path, "cd", num_rounds=2)
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


def test_a_pause_keeps_leases_and_offers(cast: Cast) -> None:
    item = cast.claim("a")
    cast.coordinator.client.pause(cast.id)
    assert cast.workers["b"].claim(0) is None
    assert cast.workers["a"].claim(0) is None
    assert cast.workers["a"].heartbeat(item.assignment_id).carry_on
    cast.lapse("a")
    cast.pass_deadline()
    cast.advance()  # a paused run does not change
    assert not cast.awaits_attention()
    assert cast.states() == [("a", 1, "leased"), ("b", 1, "offered")]
    cast.deliver("a")  # an update in training may still be delivered
    deadline = cast.coordinator.client.resume(cast.id).current_round
    assert deadline is not None
    assert deadline.deadline > datetime.now(UTC) + timedelta(seconds=3000)  # the pause does not count
    cast.work("b")
    cast.advance()
    assert cast.run.outcome == Outcome.COMPLETED


def test_a_revoked_client_loses_its_lease_and_is_not_waited_for(cast: Cast) -> None:
    cast.claim("a")
    cast.work("b")
    cast.coordinator.client.revoke_client("a")
    with pytest.raises(NotAuthenticated):
        cast.workers["a"].heartbeat()
    assert cast.states() == [("a", 1, "expired"), ("b", 1, "accepted")]
    assert [event.message for event in cast.events("assignment.expired")] == ["a: the client was revoked"]
    assert cast.awaits_attention()
    cast.advance()
    assert (cast.round.verdict, cast.run.outcome) == (Verdict.PARTIAL, Outcome.COMPLETED)
    assert cast.events("round.closed")[0].data["clients"] == {"a": "the client was revoked", "b": "accepted"}


def test_an_update_from_before_the_revocation_counts(cast: Cast) -> None:
    cast.work("a", "b")
    cast.coordinator.client.revoke_client("a")
    cast.advance()
    assert cast.round.verdict == Verdict.AGGREGATED


def test_a_round_whose_clients_were_all_revoked_fails_at_once(cast: Cast) -> None:
    for name in "ab":
        cast.coordinator.client.revoke_client(name)
    cast.advance()
    run = cast.run
    assert (run.state, run.outcome) == (RunState.FINISHED, Outcome.FAILED)
    assert run.reason == ("round 1: too few updates after 1 attempt: a, b: the client was revoked")


def test_a_run_fails_if_a_revocation_makes_its_quorum_impossible(
    coordinator: Coordinator, tables: Tables, tmp_path: Path
) -> None:
    """A quorum in the spec is a promise, for example of privacy, and does not shrink with the cohort."""
    cast = Cast(coordinator, tables, tmp_path, "ab", cohort={"min_updates": 2})
    cast.work("b")
    coordinator.client.revoke_client("a")
    cast.advance()
    assert cast.run.outcome == Outcome.FAILED
    assert "a: the client was revoked" in str(cast.run.reason)


def test_the_sweep_finds_a_client_that_was_revoked_just_before_its_offer(cast: Cast) -> None:
    """The aggregator chose the client before the revocation was committed."""
    cast.tables.execute("UPDATE clients SET revoked_at = now() WHERE id = 'a'")
    assert cast.awaits_attention()
    cast.work("b")
    cast.advance()
    assert cast.round.verdict == Verdict.PARTIAL
    assert [event.message for event in cast.events("assignment.expired")] == ["a: the client was revoked"]
