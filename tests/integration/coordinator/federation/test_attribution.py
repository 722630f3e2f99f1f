"""Causes of declined work: the coordinator's fault costs no attempt, a client's own does, whatever cause it sends."""

from pathlib import Path

import pytest

from fedssl.protocol.states import Cause, Outcome, RunState, Verdict
from support.cast import Cast, MakeCast
from support.coordinator import Coordinator


def _broadcast(cast: Cast) -> Path:
    digest = cast.round.broadcast
    return cast.coordinator.store / digest[:2] / digest[2:4] / digest


def _pause_over(cast: Cast) -> None:
    cast.tables.execute("UPDATE runs SET retry_at = now() - interval '1 second' WHERE retry_at IS NOT NULL")


def _decline(cast: Cast, name: str, cause: Cause | None = None, reason: str = "no artifact is stored") -> None:
    cast.workers[name].decline(cast.claim(name).assignment_id, reason, cause)


def _causes(cast: Cast) -> list[tuple[str, int, str | None]]:
    return [(a.client_id, a.attempt, a.cause) for a in cast.round.assignments]


@pytest.mark.full(but=1)
@pytest.mark.parametrize("cause", [Cause.COORDINATOR, None], ids=["attributed", "by an older worker"])
@pytest.mark.parametrize("damage", ["missing", "damaged"])
def test_a_missing_or_damaged_broadcast_stalls_the_run_until_it_is_restored(
    make_cast: MakeCast, damage: str, cause: Cause | None
) -> None:
    cast = make_cast(cohort={"max_attempts": 1}, num_rounds=1)
    path, whole = _broadcast(cast), _broadcast(cast).read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    for _ in range(3):
        for name in "ab":
            if cast.tables.one("SELECT count(*) FROM assignments WHERE client_id = %s AND state = 'offered'", name):
                _decline(cast, name, cause)
        _pause_over(cast)
        cast.advance()
    run = cast.run
    assert (run.state, cast.round.attempt) == (RunState.RUNNING, 1)
    what = "is missing" if damage == "missing" else "has other bytes"
    assert run.reason == (
        f"round 1 waits for the coordinator: the broadcast {path.name} {what}; put it back into the store; "
        "it is tried again"
    )
    assert cast.events("run.stalled")[0].message == f"try 1: {run.reason}"
    assert not cast.awaits_attention()  # there is a pause between two checks
    path.write_bytes(whole)
    _pause_over(cast)
    assert cast.awaits_attention()
    cast.advance()
    assert cast.round.attempt == 1
    assert "waits for the coordinator" not in (cast.run.reason or "")
    cast.work("a", "b")
    cast.advance()
    assert cast.run.outcome == Outcome.COMPLETED


def test_a_missing_broadcast_is_reported_while_other_clients_still_train(make_cast: MakeCast) -> None:
    cast = make_cast(cohort={"max_attempts": 1}, num_rounds=1)
    cast.claim("a")
    path, whole = _broadcast(cast), _broadcast(cast).read_bytes()
    path.unlink()
    _decline(cast, "b", Cause.COORDINATOR)
    cast.advance()
    assert f"the broadcast {path.name} is missing" in (cast.run.reason or "")
    path.write_bytes(whole)
    _pause_over(cast)
    assert cast.awaits_attention()
    cast.advance()
    assert "waits for the coordinator" not in (cast.run.reason or "")
    assert cast.states() == [("a", 1, "leased"), ("b", 1, "declined"), ("b", 2, "offered")]
    cast.deliver("a")
    cast.work("b")
    cast.advance()
    assert cast.run.outcome == Outcome.COMPLETED


def test_a_deadline_that_passes_while_the_broadcast_is_missing_costs_no_attempt(make_cast: MakeCast) -> None:
    cast = make_cast(cohort={"max_attempts": 1}, num_rounds=1)
    path, whole = _broadcast(cast), _broadcast(cast).read_bytes()
    path.unlink()
    cast.pass_deadline()
    cast.advance()
    assert "waits for the coordinator" in (cast.run.reason or "")
    path.write_bytes(whole)
    _pause_over(cast)
    cast.advance()
    assert (cast.run.state, cast.round.attempt) == (RunState.RUNNING, 1)
    assert [state for *_, state in cast.states()] == ["expired", "offered", "expired", "offered"]


def test_missing_public_images_and_a_plan_of_another_version_stall_the_run(make_cast: MakeCast) -> None:
    cast = make_cast(cohort={"max_attempts": 1}, num_rounds=1)
    public = '{"dataset": "scans", "num_images": 8, "digest": "' + "5" * 64 + '"}'
    cast.tables.execute("UPDATE runs SET spec = jsonb_set(spec, '{public_data}', %s::jsonb)", public)
    for name in "ab":
        _decline(cast, name, Cause.COORDINATOR)
    cast.tables.execute("UPDATE runs SET plan = jsonb_set(plan, '{update}', '[]')")
    cast.advance()
    assert "the run's artifact plan was made by another version than this coordinator's" in (cast.run.reason or "")
    assert f"the public images {'5' * 64} is missing" in (cast.run.reason or "")


def test_a_client_that_falsely_blames_the_coordinator_uses_up_its_own_attempts(make_cast: MakeCast) -> None:
    """Its first claim costs nothing, because the file may have been restored. Later ones count against the client."""
    cast = make_cast("abc", cohort={"max_attempts": 2}, num_rounds=1)
    cast.work("a", "b")
    _decline(cast, "c", Cause.COORDINATOR)
    cast.advance()
    assert _causes(cast)[2:] == [("c", 1, Cause.COORDINATOR), ("c", 2, None)]
    assert cast.round.attempt == 1
    claims = 1
    while cast.run.state == RunState.RUNNING:
        cast.tables.execute("UPDATE assignments SET offered_at = now() WHERE state = 'offered'")
        _decline(cast, "c", Cause.COORDINATOR)
        claims += 1
        cast.advance()
    assert claims == 3  # one costs nothing, and then one per attempt
    assert cast.run.outcome == Outcome.FAILED
    assert "the coordinator has it, undamaged" in (cast.run.reason or "")
    assert [cause for _, _, cause in _causes(cast)[2:]] == [
        Cause.COORDINATOR,
        Cause.CLIENT_MACHINE,
        Cause.CLIENT_MACHINE,
    ]
    refuted = cast.events("decline.refuted")
    assert [event.client_id for event in refuted] == ["c", "c"]
    assert "the coordinator has it, undamaged" in refuted[0].message


def test_a_second_false_claim_is_refuted_while_another_client_still_trains(make_cast: MakeCast) -> None:
    cast = make_cast(num_rounds=1)
    cast.claim("a")
    for _ in range(2):
        _decline(cast, "b", Cause.COORDINATOR)
        cast.advance()
    assert _causes(cast) == [("a", 1, None), ("b", 1, Cause.COORDINATOR), ("b", 2, Cause.CLIENT_MACHINE)]
    assert [event.client_id for event in cast.events("decline.refuted")] == ["b"]


def test_causes_of_declines_are_stored_and_shown(make_cast: MakeCast) -> None:
    cast = make_cast(cohort={"max_attempts": 1}, num_rounds=1)
    _decline(cast, "a", Cause.CLIENT_DATA, "no images")
    _decline(cast, "b", None, "an older worker gives no cause")
    assert _causes(cast) == [("a", 1, Cause.CLIENT_DATA), ("b", 1, None)]
    assert [event.data.get("cause") for event in cast.events("assignment.declined")] == ["client-data", None]
    cast.advance()
    assert cast.run.outcome == Outcome.FAILED


# Resuming a failed run


def _failed(make_cast: MakeCast) -> Cast:
    """Return a run that failed in its second round, in which `a` delivered and `b` declined."""
    cast = make_cast(cohort={"max_attempts": 1}, num_rounds=3)
    cast.work("a", "b")
    cast.advance()
    cast.work("a", value=2.0)
    _decline(cast, "b", Cause.CLIENT_MACHINE, "out of memory")
    cast.advance()
    assert (cast.run.outcome, cast.run.rounds_closed) == (Outcome.FAILED, 1)
    return cast


def test_a_failed_run_is_resumed_after_its_last_closed_round(make_cast: MakeCast) -> None:
    cast = _failed(make_cast)
    why = cast.run.reason
    run = cast.coordinator.client.resume(cast.id)
    assert (run.state, run.outcome, run.finished_at) == (RunState.RUNNING, None, None)
    [event] = cast.events("run.resumed")
    assert event.data == {"outcome": "failed", "reason": why, "rounds_closed": 1}
    assert cast.states() == [("a", 1, "accepted"), ("b", 1, "declined"), ("b", 2, "offered")]
    assert [event.round_number for event in cast.events("round.reopened")] == [2]
    cast.work("b")
    cast.advance()
    assert [(one.number, one.verdict) for one in cast.rounds] == [
        (1, Verdict.AGGREGATED),
        (2, Verdict.AGGREGATED),
        (3, None),
    ]
    cast.work("a", "b")
    cast.advance()
    assert cast.run.outcome == Outcome.COMPLETED
    assert [event.message.partition(":")[0] for event in cast.events("run.finished")] == ["failed", "completed"]
    followed = list(cast.coordinator.client.events(cast.id))
    assert [event.kind for event in followed].count("run.finished") == 2  # the first one does not end the stream


def test_a_failed_run_can_fail_and_be_resumed_repeatedly(make_cast: MakeCast) -> None:
    cast = _failed(make_cast)
    for _ in range(2):
        cast.coordinator.client.resume(cast.id)
        _decline(cast, "b", Cause.CLIENT_MACHINE, "out of memory")
        cast.advance()
        assert cast.run.outcome == Outcome.FAILED
    assert len(cast.events("run.resumed")) == 2


def test_resuming_asks_again_for_an_update_that_was_removed_meanwhile(make_cast: MakeCast) -> None:
    cast = _failed(make_cast)
    digest = next(a.update for a in cast.round.assignments if a.client_id == "a")
    cast.tables.execute("UPDATE artifacts SET collected_at = now() WHERE digest = %s", digest)
    cast.coordinator.client.resume(cast.id)
    assert cast.states() == [("a", 1, "expired"), ("a", 2, "offered"), ("b", 1, "declined"), ("b", 2, "offered")]
    item = cast.claim("a")
    assert item.last_accepted is not None
    assert item.last_accepted.round_number == 1


def test_resuming_leaves_out_a_client_that_was_revoked_meanwhile(make_cast: MakeCast) -> None:
    cast = _failed(make_cast)
    cast.coordinator.client.revoke_client("a")
    cast.coordinator.client.resume(cast.id)
    assert cast.states() == [("a", 1, "expired"), ("b", 1, "declined"), ("b", 2, "offered")]
    cast.work("b")
    cast.advance()
    assert cast.rounds[1].reason == "1 of 2 updates"


def test_a_run_whose_weights_were_removed_cannot_be_resumed(make_cast: MakeCast) -> None:
    from fedssl.client import Conflict

    cast = _failed(make_cast)
    cast.tables.execute("UPDATE artifacts SET collected_at = now() WHERE digest = %s", cast.run.model)
    with pytest.raises(Conflict, match=r"its weights, artifact [0-9a-f]{64}, were removed from the store"):
        cast.coordinator.client.resume(cast.id)


def test_completed_and_stopped_runs_cannot_be_resumed(make_cast: MakeCast) -> None:
    from fedssl.client import Conflict

    stopped, completed = make_cast(), make_cast("cd", num_rounds=1)
    stopped.coordinator.client.stop(stopped.id)
    completed.work("c", "d")
    completed.advance()
    for cast in (stopped, completed):
        with pytest.raises(Conflict, match="it stays as it is"):
            cast.coordinator.client.resume(cast.id)


# No aggregator


def _a_minute_ago(cast: Cast) -> None:
    cast.tables.execute(
        "UPDATE assignments SET closed_at = closed_at - interval '70 seconds' WHERE run_id = %s", cast.id
    )
    cast.tables.execute(
        "UPDATE rounds SET closed_at = closed_at - interval '70 seconds', deadline = deadline - interval '70 seconds' "
        "WHERE run_id = %s",
        cast.id,
    )
    cast.tables.execute("UPDATE runs SET started_at = started_at - interval '70 seconds' WHERE id = %s", cast.id)


def test_a_round_that_no_aggregator_takes_up_shows_why_it_waits(make_cast: MakeCast) -> None:
    cast = make_cast()
    assert cast.run.reason is None
    cast.work("a")
    _a_minute_ago(cast)
    assert cast.run.reason is None  # `b` is still training
    cast.work("b")
    assert cast.run.reason is None  # not yet long enough
    _a_minute_ago(cast)
    reason = cast.run.reason
    assert reason is not None
    assert reason.startswith("waiting for an aggregator: none has taken up round 1 for more than 60 s; start one")
    [listed] = cast.coordinator.client.runs()
    assert listed.reason == reason
    cast.advance()
    assert (cast.run.reason, cast.run.rounds_closed) == (None, 1)


def test_a_run_that_no_aggregator_prepares_shows_why_it_waits(make_cast: MakeCast, coordinator: Coordinator) -> None:
    from support.federation import tiny_spec

    cast = make_cast()
    waiting = coordinator.client.create_run(tiny_spec())
    cast.tables.execute("UPDATE runs SET started_at = now() - interval '5 minutes' WHERE id = %s", waiting.id)
    assert "none has taken up the run for more than 4 min" in (coordinator.client.run(waiting.id).reason or "")


def test_a_run_that_an_aggregator_works_on_is_not_reported_as_waiting(make_cast: MakeCast) -> None:
    from fedssl_coordinator.core.db import exclusive

    cast = make_cast()
    cast.work("a", "b")
    _a_minute_ago(cast)
    with exclusive(f"run/{cast.id}"):
        assert cast.run.reason is None
    assert "waiting for an aggregator" in (cast.run.reason or "")
