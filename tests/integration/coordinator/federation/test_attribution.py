"""Causes of declined work: the coordinator's fault costs no attempt, a client's own does, whatever cause it sends."""

from pathlib import Path

import pytest

from fedssl.protocol.states import Cause, Outcome, RunState, Verdict
from support.coordinator import Coordinator
from support.scenario import MakeScenario, Scenario


def _broadcast(scenario: Scenario) -> Path:
    digest = scenario.round.broadcast
    return scenario.coordinator.store / digest[:2] / digest[2:4] / digest


def _pause_over(scenario: Scenario) -> None:
    scenario.tables.execute("UPDATE runs SET retry_at = now() - interval '1 second' WHERE retry_at IS NOT NULL")


def _decline(scenario: Scenario, name: str, cause: Cause | None = None, reason: str = "no artifact is stored") -> None:
    scenario.workers[name].decline(scenario.claim(name).assignment_id, reason, cause)


def _causes(scenario: Scenario) -> list[tuple[str, int, str | None]]:
    return [(a.client_id, a.attempt, a.cause) for a in scenario.round.assignments]


@pytest.mark.full(but=1)
@pytest.mark.parametrize("cause", [Cause.COORDINATOR, None], ids=["attributed", "by an older worker"])
@pytest.mark.parametrize("damage", ["missing", "damaged"])
def test_a_missing_or_damaged_broadcast_stalls_the_run_until_it_is_restored(
    make_scenario: MakeScenario, damage: str, cause: Cause | None
) -> None:
    scenario = make_scenario(cohort={"max_attempts": 1}, num_rounds=1)
    path, whole = _broadcast(scenario), _broadcast(scenario).read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    for _ in range(3):
        for name in "ab":
            if scenario.tables.one("SELECT count(*) FROM assignments WHERE client_id = %s AND state = 'offered'", name):
                _decline(scenario, name, cause)
        _pause_over(scenario)
        scenario.advance()
    run = scenario.run
    assert (run.state, scenario.round.attempt) == (RunState.RUNNING, 1)
    what = "is missing" if damage == "missing" else "has other bytes"
    assert run.reason == (
        f"round 1 waits for the coordinator: the broadcast {path.name} {what}; put it back into the store; "
        "it is tried again"
    )
    assert scenario.events("run.stalled")[0].message == f"try 1: {run.reason}"
    assert not scenario.needs_attention()  # there is a pause between two checks
    path.write_bytes(whole)
    _pause_over(scenario)
    assert scenario.needs_attention()
    scenario.advance()
    assert scenario.round.attempt == 1
    assert "waits for the coordinator" not in (scenario.run.reason or "")
    scenario.work("a", "b")
    scenario.advance()
    assert scenario.run.outcome == Outcome.COMPLETED


def test_a_missing_broadcast_is_reported_while_other_clients_still_train(make_scenario: MakeScenario) -> None:
    scenario = make_scenario(cohort={"max_attempts": 1}, num_rounds=1)
    scenario.claim("a")
    path, whole = _broadcast(scenario), _broadcast(scenario).read_bytes()
    path.unlink()
    _decline(scenario, "b", Cause.COORDINATOR)
    scenario.advance()
    assert f"the broadcast {path.name} is missing" in (scenario.run.reason or "")
    path.write_bytes(whole)
    _pause_over(scenario)
    assert scenario.needs_attention()
    scenario.advance()
    assert "waits for the coordinator" not in (scenario.run.reason or "")
    assert scenario.states() == [("a", 1, "leased"), ("b", 1, "declined"), ("b", 2, "offered")]
    scenario.deliver("a")
    scenario.work("b")
    scenario.advance()
    assert scenario.run.outcome == Outcome.COMPLETED


def test_a_deadline_that_passes_while_the_broadcast_is_missing_costs_no_attempt(make_scenario: MakeScenario) -> None:
    scenario = make_scenario(cohort={"max_attempts": 1}, num_rounds=1)
    path, whole = _broadcast(scenario), _broadcast(scenario).read_bytes()
    path.unlink()
    scenario.pass_deadline()
    scenario.advance()
    assert "waits for the coordinator" in (scenario.run.reason or "")
    path.write_bytes(whole)
    _pause_over(scenario)
    scenario.advance()
    assert (scenario.run.state, scenario.round.attempt) == (RunState.RUNNING, 1)
    assert [state for *_, state in scenario.states()] == ["expired", "offered", "expired", "offered"]


def test_missing_public_images_and_a_plan_of_another_version_stall_the_run(make_scenario: MakeScenario) -> None:
    scenario = make_scenario(cohort={"max_attempts": 1}, num_rounds=1)
    public = '{"dataset": "scans", "num_images": 8, "digest": "' + "5" * 64 + '"}'
    scenario.tables.execute("UPDATE runs SET spec = jsonb_set(spec, '{public_data}', %s::jsonb)", public)
    for name in "ab":
        _decline(scenario, name, Cause.COORDINATOR)
    scenario.tables.execute("UPDATE runs SET plan = jsonb_set(plan, '{update}', '[]')")
    scenario.advance()
    assert "the run's artifact plan was made by another version than this coordinator's" in (scenario.run.reason or "")
    assert f"the public images {'5' * 64} is missing" in (scenario.run.reason or "")


def test_a_client_that_falsely_blames_the_coordinator_uses_up_its_own_attempts(make_scenario: MakeScenario) -> None:
    """Its first claim costs nothing, because the file may have been restored. Later ones count against the client."""
    scenario = make_scenario("abc", cohort={"max_attempts": 2}, num_rounds=1)
    scenario.work("a", "b")
    _decline(scenario, "c", Cause.COORDINATOR)
    scenario.advance()
    assert _causes(scenario)[2:] == [("c", 1, Cause.COORDINATOR), ("c", 2, None)]
    assert scenario.round.attempt == 1
    claims = 1
    while scenario.run.state == RunState.RUNNING:
        scenario.tables.execute("UPDATE assignments SET offered_at = now() WHERE state = 'offered'")
        _decline(scenario, "c", Cause.COORDINATOR)
        claims += 1
        scenario.advance()
    assert claims == 3  # one costs nothing, and then one per attempt
    assert scenario.run.outcome == Outcome.FAILED
    assert "the coordinator has it, undamaged" in (scenario.run.reason or "")
    assert [cause for _, _, cause in _causes(scenario)[2:]] == [
        Cause.COORDINATOR,
        Cause.CLIENT_MACHINE,
        Cause.CLIENT_MACHINE,
    ]
    refuted = scenario.events("decline.refuted")
    assert [event.client_id for event in refuted] == ["c", "c"]
    assert "the coordinator has it, undamaged" in refuted[0].message


def test_a_second_false_claim_is_refuted_while_another_client_still_trains(make_scenario: MakeScenario) -> None:
    scenario = make_scenario(num_rounds=1)
    scenario.claim("a")
    for _ in range(2):
        _decline(scenario, "b", Cause.COORDINATOR)
        scenario.advance()
    assert _causes(scenario) == [("a", 1, None), ("b", 1, Cause.COORDINATOR), ("b", 2, Cause.CLIENT_MACHINE)]
    assert [event.client_id for event in scenario.events("decline.refuted")] == ["b"]


def test_causes_of_declines_are_stored_and_shown(make_scenario: MakeScenario) -> None:
    scenario = make_scenario(cohort={"max_attempts": 1}, num_rounds=1)
    _decline(scenario, "a", Cause.CLIENT_DATA, "no images")
    _decline(scenario, "b", None, "an older worker gives no cause")
    assert _causes(scenario) == [("a", 1, Cause.CLIENT_DATA), ("b", 1, None)]
    assert [event.data.get("cause") for event in scenario.events("assignment.declined")] == ["client-data", None]
    scenario.advance()
    assert scenario.run.outcome == Outcome.FAILED


# Resuming a failed run


def _failed(make_scenario: MakeScenario) -> Scenario:
    """Return a run that failed in its second round, in which `a` delivered and `b` declined."""
    scenario = make_scenario(cohort={"max_attempts": 1}, num_rounds=3)
    scenario.work("a", "b")
    scenario.advance()
    scenario.work("a", value=2.0)
    _decline(scenario, "b", Cause.CLIENT_MACHINE, "out of memory")
    scenario.advance()
    assert (scenario.run.outcome, scenario.run.rounds_closed) == (Outcome.FAILED, 1)
    return scenario


def test_a_failed_run_is_resumed_after_its_last_closed_round(make_scenario: MakeScenario) -> None:
    scenario = _failed(make_scenario)
    why = scenario.run.reason
    run = scenario.coordinator.client.resume(scenario.id)
    assert (run.state, run.outcome, run.finished_at) == (RunState.RUNNING, None, None)
    [event] = scenario.events("run.resumed")
    assert event.data == {"outcome": "failed", "reason": why, "rounds_closed": 1}
    assert scenario.states() == [("a", 1, "accepted"), ("b", 1, "declined"), ("b", 2, "offered")]
    assert [event.round_number for event in scenario.events("round.reopened")] == [2]
    scenario.work("b")
    scenario.advance()
    assert [(one.number, one.verdict) for one in scenario.rounds] == [
        (1, Verdict.AGGREGATED),
        (2, Verdict.AGGREGATED),
        (3, None),
    ]
    scenario.work("a", "b")
    scenario.advance()
    assert scenario.run.outcome == Outcome.COMPLETED
    assert [event.message.partition(":")[0] for event in scenario.events("run.finished")] == ["failed", "completed"]
    followed = list(scenario.coordinator.client.events(scenario.id))
    assert [event.kind for event in followed].count("run.finished") == 2  # the first one does not end the stream


def test_a_failed_run_can_fail_and_be_resumed_repeatedly(make_scenario: MakeScenario) -> None:
    scenario = _failed(make_scenario)
    for _ in range(2):
        scenario.coordinator.client.resume(scenario.id)
        _decline(scenario, "b", Cause.CLIENT_MACHINE, "out of memory")
        scenario.advance()
        assert scenario.run.outcome == Outcome.FAILED
    assert len(scenario.events("run.resumed")) == 2


def test_resuming_asks_again_for_an_update_that_was_removed_meanwhile(make_scenario: MakeScenario) -> None:
    scenario = _failed(make_scenario)
    digest = next(a.update for a in scenario.round.assignments if a.client_id == "a")
    scenario.tables.execute("UPDATE artifacts SET collected_at = now() WHERE digest = %s", digest)
    scenario.coordinator.client.resume(scenario.id)
    assert scenario.states() == [("a", 1, "expired"), ("a", 2, "offered"), ("b", 1, "declined"), ("b", 2, "offered")]
    item = scenario.claim("a")
    assert item.last_accepted is not None
    assert item.last_accepted.round_number == 1


def test_resuming_leaves_out_a_client_that_was_revoked_meanwhile(make_scenario: MakeScenario) -> None:
    scenario = _failed(make_scenario)
    scenario.coordinator.client.revoke_client("a")
    scenario.coordinator.client.resume(scenario.id)
    assert scenario.states() == [("a", 1, "expired"), ("b", 1, "declined"), ("b", 2, "offered")]
    scenario.work("b")
    scenario.advance()
    assert scenario.rounds[1].reason == "1 of 2 updates"


def test_a_run_whose_weights_were_removed_cannot_be_resumed(make_scenario: MakeScenario) -> None:
    from fedssl.client import Conflict

    scenario = _failed(make_scenario)
    scenario.tables.execute("UPDATE artifacts SET collected_at = now() WHERE digest = %s", scenario.run.model)
    with pytest.raises(Conflict, match=r"its weights, artifact [0-9a-f]{64}, were removed from the store"):
        scenario.coordinator.client.resume(scenario.id)


def test_completed_and_stopped_runs_cannot_be_resumed(make_scenario: MakeScenario) -> None:
    from fedssl.client import Conflict

    stopped, completed = make_scenario(), make_scenario("cd", num_rounds=1)
    stopped.coordinator.client.stop(stopped.id)
    completed.work("c", "d")
    completed.advance()
    for scenario in (stopped, completed):
        with pytest.raises(Conflict, match="it stays as it is"):
            scenario.coordinator.client.resume(scenario.id)


# No aggregator


def _a_minute_ago(scenario: Scenario) -> None:
    scenario.tables.execute(
        "UPDATE assignments SET closed_at = closed_at - interval '70 seconds' WHERE run_id = %s", scenario.id
    )
    scenario.tables.execute(
        "UPDATE rounds SET closed_at = closed_at - interval '70 seconds', deadline = deadline - interval '70 seconds' "
        "WHERE run_id = %s",
        scenario.id,
    )
    scenario.tables.execute(
        "UPDATE runs SET started_at = started_at - interval '70 seconds' WHERE id = %s", scenario.id
    )


def test_a_round_that_no_aggregator_takes_up_shows_why_it_waits(make_scenario: MakeScenario) -> None:
    scenario = make_scenario()
    assert scenario.run.reason is None
    scenario.work("a")
    _a_minute_ago(scenario)
    assert scenario.run.reason is None  # `b` is still training
    scenario.work("b")
    assert scenario.run.reason is None  # not yet long enough
    _a_minute_ago(scenario)
    reason = scenario.run.reason
    assert reason is not None
    assert reason.startswith("waiting for an aggregator: none has taken up round 1 for more than 60 s; start one")
    [listed] = scenario.coordinator.client.runs()
    assert listed.reason == reason
    scenario.advance()
    assert (scenario.run.reason, scenario.run.rounds_closed) == (None, 1)


def test_a_run_that_no_aggregator_prepares_shows_why_it_waits(
    make_scenario: MakeScenario, coordinator: Coordinator
) -> None:
    from support.federation import tiny_spec

    scenario = make_scenario()
    waiting = coordinator.client.create_run(tiny_spec())
    scenario.tables.execute("UPDATE runs SET started_at = now() - interval '5 minutes' WHERE id = %s", waiting.id)
    assert "none has taken up the run for more than 4 min" in (coordinator.client.run(waiting.id).reason or "")


def test_a_run_that_an_aggregator_works_on_is_not_reported_as_waiting(make_scenario: MakeScenario) -> None:
    from fedssl_coordinator.core.db import exclusive

    scenario = make_scenario()
    scenario.work("a", "b")
    _a_minute_ago(scenario)
    with exclusive(f"run/{scenario.id}"):
        assert scenario.run.reason is None
    assert "waiting for an aggregator" in (scenario.run.reason or "")
