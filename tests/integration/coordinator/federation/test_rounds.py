"""Rounds: when they close, with what verdict, and which runs the sweep finds."""

from pathlib import Path

import pytest

from fedssl.client import Conflict, NotFound
from fedssl.protocol.states import Outcome, RoundState, RunState, Verdict
from support.coordinator import Coordinator
from support.federation import tiny_spec
from support.scenario import MakeScenario, Scenario
from support.tables import Tables


def test_a_round_with_a_quorum_closes_at_its_deadline(make_scenario: MakeScenario) -> None:
    scenario = make_scenario("abcd", cohort={"min_updates": 2}, num_rounds=2)
    scenario.work("a", "b")
    scenario.claim("c")
    scenario.advance()
    assert scenario.round.state == RoundState.OPEN  # the quorum does not end it while others are still training
    scenario.pass_deadline()
    assert scenario.needs_attention()
    scenario.advance()
    first, second = scenario.rounds
    assert (first.verdict, first.reason, first.state) == (Verdict.PARTIAL, "2 of 4 updates", RoundState.CLOSED)
    reason = "the round's deadline has passed"
    assert scenario.events("round.closed")[0].data == {
        "verdict": "partial",
        "clients": {"a": "accepted", "b": "accepted", "c": reason, "d": reason},
    }
    assert scenario.events("round.aggregating")[0].message == "aggregating 2 of 4 updates"
    assert [event.message for event in scenario.events("assignment.expired")] == [f"c: {reason}", f"d: {reason}"]
    assert [a.client_id for a in second.assignments] == list("abcd")  # slow clients take part again
    assert scenario.run.rounds_closed == 1


def test_a_quorum_without_open_assignments_closes_before_the_deadline(make_scenario: MakeScenario) -> None:
    scenario = make_scenario(cohort={"min_updates": 1}, num_rounds=1)
    scenario.work("a")
    scenario.workers["b"].decline(scenario.claim("b").assignment_id, "cannot")
    assert scenario.needs_attention()
    scenario.advance()
    assert (scenario.round.verdict, scenario.run.outcome) == (Verdict.PARTIAL, Outcome.COMPLETED)


def test_quorum_failure_reoffers_missing_assignments_until_the_run_fails(
    make_scenario: MakeScenario,
) -> None:
    scenario = make_scenario("abc", cohort={"max_attempts": 3})
    scenario.work("b")
    kept = scenario.round.assignments[1].update
    for attempt in (2, 3):
        scenario.pass_deadline()
        scenario.advance()
        current = scenario.round
        assert (current.number, current.attempt, current.state) == (1, attempt, RoundState.OPEN)
        assert not scenario.needs_attention()  # the attempt has its own deadline
        live = [(a.client_id, a.attempt) for a in current.assignments if a.state == "offered"]
        assert live == [("a", attempt), ("c", attempt)]
        assert [a.update for a in current.assignments if a.client_id == "b"] == [kept]
    scenario.work("a")
    scenario.workers["c"].decline(scenario.claim("c").assignment_id, "no images")
    scenario.advance()
    run = scenario.run
    assert (run.state, run.outcome) == (RunState.FINISHED, Outcome.FAILED)
    assert run.reason == "round 1: too few updates after 3 attempts: c: no images"
    assert (scenario.round.verdict, scenario.round.state) == (Verdict.FAILED, RoundState.CLOSED)
    assert run.rounds_closed == 0
    assert scenario.events("round.closed")[0].data["clients"] == {"a": "accepted", "b": "accepted", "c": "no images"}
    assert run.model == run.initial_model  # the current weights are kept


def test_without_a_quorum_a_round_is_skipped_if_the_spec_asks_for_it(make_scenario: MakeScenario) -> None:
    scenario = make_scenario(cohort={"max_attempts": 1, "without_quorum": "skip"}, num_rounds=2)
    scenario.work("a")
    scenario.pass_deadline()
    scenario.advance()
    first, second = scenario.rounds
    assert (first.verdict, second.number, second.state) == (Verdict.SKIPPED, 2, RoundState.OPEN)
    assert first.reason == "too few updates after 1 attempt: b: the round's deadline has passed"
    assert second.broadcast == first.broadcast  # no client's update was used
    assert scenario.run.rounds_closed == 1
    scenario.work("a", "b")
    scenario.advance()
    assert scenario.run.outcome == Outcome.COMPLETED
    assert scenario.run.reason == "all 2 rounds are closed, 1 of them without new weights (1 skipped)"


def test_clients_do_not_continue_from_a_skipped_round(make_scenario: MakeScenario) -> None:
    """The weights of the next round do not depend on it."""
    scenario = make_scenario(cohort={"max_attempts": 1, "without_quorum": "skip", "min_updates": 2}, num_rounds=3)
    scenario.work("a", "b")
    scenario.advance()
    scenario.work("a")
    scenario.pass_deadline()
    scenario.advance()
    assert [each.verdict for each in scenario.rounds[:2]] == [Verdict.AGGREGATED, Verdict.SKIPPED]
    last = scenario.claim("a").last_accepted
    assert last is not None
    assert last.round_number == 1


def test_the_last_round_may_be_skipped(make_scenario: MakeScenario) -> None:
    scenario = make_scenario(cohort={"max_attempts": 1, "without_quorum": "skip"}, num_rounds=1)
    scenario.pass_deadline()
    scenario.advance()
    assert scenario.run.outcome == Outcome.COMPLETED
    assert scenario.round.verdict == Verdict.SKIPPED
    assert scenario.run.reason == "the only round is closed, without new weights (1 skipped)"


def test_an_update_that_arrives_after_the_deadline_but_before_the_check_counts(make_scenario: MakeScenario) -> None:
    """No aggregator has checked the round yet."""
    scenario = make_scenario(num_rounds=1)
    scenario.work("a")
    scenario.claim("b")
    scenario.pass_deadline()
    scenario.deliver("b")
    scenario.advance()
    assert scenario.round.verdict == Verdict.AGGREGATED


def test_a_sampled_cohort_follows_from_the_spec_the_seed_and_the_round(make_scenario: MakeScenario) -> None:
    from fedssl.seeding import sample_cohort

    scenario = make_scenario("abcdef", cohort={"fraction": 0.5}, seed=3)
    spec = scenario.run.spec
    for number in (1, 2):
        chosen = [a.client_id for a in scenario.round.assignments]
        assert chosen == sample_cohort("abcdef", spec.cohort, 3, number)
        assert len(chosen) == 3
        scenario.work(*chosen)
        scenario.advance()
    assert scenario.run.outcome == Outcome.COMPLETED


@pytest.mark.parametrize("state", ["created", "unprepared", "waiting", "open", "leased", "aggregating", "paused"])
def test_a_run_can_be_stopped_in_every_state(
    coordinator: Coordinator, tables: Tables, make_scenario: MakeScenario, state: str
) -> None:
    if state in ("created", "unprepared", "waiting"):
        run = coordinator.client.create_run(tiny_spec(), start=state != "created")
        if state == "waiting":
            coordinator.advance(run.id)
        run_id = run.id
    else:
        scenario = make_scenario("a")
        run_id = scenario.id
        if state in ("leased", "paused"):
            scenario.claim("a")
        if state == "paused":
            coordinator.client.pause(run_id)
        if state == "aggregating":
            tables.execute("UPDATE rounds SET state = 'aggregating'")
    stopped = coordinator.client.stop(run_id)
    assert (stopped.state, stopped.outcome) == (RunState.FINISHED, Outcome.STOPPED)
    assert stopped.reason == "stopped by an operator"
    coordinator.advance(run_id)  # the run stays stopped
    assert tables.query("SELECT state, verdict, reason FROM rounds") in (
        [],
        [("closed", "failed", "stopped by an operator")],
    )
    assert tables.one("SELECT count(*) FROM assignments WHERE state IN ('offered', 'leased', 'submitted')") == 0
    kinds = [event.kind for event in coordinator.client.event_log(run_id)]
    assert kinds[-1] == "run.finished"
    assert kinds.count("run.finished") == 1
    assert (
        coordinator.client.stop(run_id).finished_at == stopped.finished_at
    )  # a second time changes nothing, and is not an error
    assert [event.kind for event in coordinator.client.event_log(run_id)] == kinds


VERBS: dict[str, dict[str, RunState | None]] = {
    # verb -> state before -> state after (None if refused)
    "start": {"created": RunState.RUNNING, "running": RunState.RUNNING, "paused": None, "stopped": None},
    "pause": {"created": None, "running": RunState.PAUSED, "paused": RunState.PAUSED, "stopped": None},
    "resume": {"created": None, "running": RunState.RUNNING, "paused": RunState.RUNNING, "stopped": None},
    "stop": dict.fromkeys(("created", "running", "paused", "stopped"), RunState.FINISHED),
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("before", ["created", "running", "paused", "stopped"])
def test_each_state_allows_only_its_verbs(shared_coordinator: Coordinator, verb: str, before: str) -> None:
    run = shared_coordinator.client.create_run(tiny_spec(), start=before != "created")
    if before == "paused":
        shared_coordinator.client.pause(run.id)
    if before == "stopped":
        shared_coordinator.client.stop(run.id)
    earlier = len(list(shared_coordinator.client.event_log(run.id)))
    wanted = VERBS[verb][before]
    call = getattr(shared_coordinator.client, verb)
    if wanted is None:
        with pytest.raises(Conflict, match=f"it cannot {verb}, (only|it stays)"):
            call(run.id)
        assert len(list(shared_coordinator.client.event_log(run.id))) == earlier
    else:
        assert call(run.id).state == wanted
        same = before in (wanted.value, "stopped")
        assert len(list(shared_coordinator.client.event_log(run.id))) == earlier + (not same)


def test_an_unknown_run_is_not_found(shared_coordinator: Coordinator) -> None:
    from uuid import UUID

    nothing = UUID(int=1)
    for call in ("run", "start", "pause", "resume", "stop"):
        with pytest.raises(NotFound, match=f"no run {nothing}"):
            getattr(shared_coordinator.client, call)(nothing)
    for pages in ("rounds", "metrics", "event_log"):
        with pytest.raises(NotFound, match=f"no run {nothing}"):
            list(getattr(shared_coordinator.client, pages)(nothing))


@pytest.mark.changes_states
def test_the_sweep_finds_exactly_the_runs_that_wait_for_an_aggregator(
    coordinator: Coordinator, tables: Tables, make_scenario: MakeScenario
) -> None:
    from fedssl_coordinator.core.db import transaction
    from fedssl_coordinator.federation.rounds import repository

    def found() -> set[str]:
        with transaction() as session:
            runs = set(repository.needing_attention(session))
        return {name for name, run_id in names.items() if run_id in runs}

    create = coordinator.client.create_run
    names = {
        "created": create(tiny_spec(), start=False).id,
        "unprepared": create(tiny_spec()).id,
        "waiting": create(tiny_spec(cohort={"min_clients": 9})).id,
        "paused": create(tiny_spec()).id,
        "stopped": create(tiny_spec()).id,
    }
    coordinator.advance(names["waiting"])
    coordinator.client.pause(names["paused"])
    coordinator.client.stop(names["stopped"])
    assert found() == {"unprepared", "waiting"}

    scenarios = {
        name: make_scenario("abc") for name in ("offered", "lapsed", "overdue", "declined", "complete", "aggregating")
    }
    scenarios["finished"] = make_scenario("abc", num_rounds=1)
    names = {name: scenario.id for name, scenario in scenarios.items()}
    assert found() == set()
    tables.execute("UPDATE assignments SET state = 'offered'")
    _hold(tables, scenarios["lapsed"], "a")
    scenarios["lapsed"].expire_lease("a")
    scenarios["overdue"].pass_deadline()
    tables.execute("UPDATE assignments SET state = 'declined' WHERE run_id = %s", names["declined"])
    assert found() == {"lapsed", "overdue", "declined"}
    tables.execute("UPDATE rounds SET state = 'aggregating' WHERE run_id = %s", names["aggregating"])
    tables.execute("UPDATE assignments SET state = 'expired' WHERE run_id = %s", names["complete"])
    assert found() == {"lapsed", "overdue", "declined", "aggregating", "complete"}
    coordinator.client.stop(names["aggregating"])
    coordinator.client.pause(names["lapsed"])
    assert found() == {"overdue", "declined", "complete"}
    # A failed computation is not repeated until its pause is over.
    tables.execute("UPDATE runs SET retry_at = now() + interval '1 minute' WHERE id = %s", names["overdue"])
    assert found() == {"declined", "complete"}
    tables.execute("UPDATE runs SET retry_at = now() - interval '1 second' WHERE id = %s", names["overdue"])
    assert found() == {"overdue", "declined", "complete"}


def _hold(tables: Tables, scenario: Scenario, name: str) -> None:
    tables.execute(
        "UPDATE assignments SET state = 'leased', leased_at = now(), lease_expires_at = now() + interval '1 minute' "
        "WHERE run_id = %s AND client_id = %s",
        scenario.id,
        name,
    )


def test_a_registration_wakes_only_the_runs_that_wait_for_clients(
    coordinator: Coordinator, make_scenario: MakeScenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedssl_coordinator.core import enqueue

    busy = make_scenario("a")
    waiting = coordinator.client.create_run(tiny_spec(cohort={"min_clients": 2}))
    coordinator.client.create_run(tiny_spec(cohort={"min_clients": 9}))  # a second client is not enough for this run
    nudged: list[object] = []
    monkeypatch.setattr(enqueue, "_send_task", lambda name, run_id: nudged.append(run_id))
    coordinator.worker("late")
    assert nudged == [str(waiting.id)]
    assert str(busy.id) not in nudged


def test_a_round_waits_until_its_cohort_can_reach_min_updates(coordinator: Coordinator) -> None:
    """The number was agreed on, perhaps for privacy: it is neither lowered nor ignored."""
    coordinator.worker("a")
    run = coordinator.client.create_run(tiny_spec(cohort={"min_updates": 2}))
    for _ in range(2):
        coordinator.advance(run.id)
    waiting = coordinator.client.run(run.id)
    assert waiting.current_round is None
    assert waiting.reason == (
        "waiting for clients: cohort.min_updates asks for 2 updates, but a cohort is only 1 of 1 registered clients"
    )
    assert [event.kind for event in coordinator.client.event_log(run.id)].count("run.waiting") == 1
    coordinator.worker("b")
    coordinator.advance(run.id)
    opened = coordinator.client.run(run.id)
    assert opened.reason is None
    assert opened.current_round is not None
    assert len(opened.current_round.assignments) == 2


def test_a_quorum_that_no_cohort_can_reach_is_refused() -> None:
    cohort = {"clients": ["a", "b", "c", "d"], "fraction": 0.5}
    assert tiny_spec(cohort={**cohort, "min_updates": 2}).cohort.min_updates == 2
    with pytest.raises(ValueError, match=r"min_updates is 3, but a round wants 2 of the 4 clients .* lower it"):
        tiny_spec(cohort={**cohort, "min_updates": 3})


def test_metrics_of_an_older_version_that_are_not_finite_are_left_out(
    coordinator: Coordinator, tables: Tables, tmp_path: Path
) -> None:
    """JSON has no such numbers: the whole list would be unreadable."""
    scenario = Scenario(coordinator, tables, tmp_path, "ab")
    scenario.work("a", "b", value=1.0)
    tables.execute("UPDATE metrics SET value = 1.7e308 WHERE client_id = 'a'")
    scenario.advance()  # the mean of these is infinite
    insert = "INSERT INTO metrics (run_id, round_number, client_id, name, value) VALUES (%s, 1, 'a', %s, %s::float8)"
    for number, value in enumerate(("NaN", "Infinity", "-Infinity")):
        tables.execute(insert, scenario.id, f"odd{number}", value)
    assert scenario.rounds[0].verdict == "aggregated"
    losses = {metric.client_id: metric.value for metric in coordinator.client.metrics(scenario.id, "loss")}
    assert losses == {"a": 1.7e308, "b": 1.0}
    assert not [metric for metric in coordinator.client.metrics(scenario.id) if metric.name.startswith("odd")]
