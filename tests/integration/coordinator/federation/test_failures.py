"""An aggregator that fails or dies: the run reports it, other runs continue, and the bits stay the same."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from fedssl.errors import MethodError
from fedssl.protocol.states import Outcome, RunState, Verdict
from support.coordinator import Coordinator
from support.federation import tiny_spec
from support.scenario import Scenario
from support.tables import Tables


class Killed(BaseException):
    """Stands for the end of the process: no handler gets to run."""


@pytest.fixture
def scenario(coordinator: Coordinator, tables: Tables, tmp_path: Path) -> Scenario:
    return Scenario(coordinator, tables, tmp_path, num_rounds=2)


def _files(store: Path) -> set[str]:
    return {path.name for path in store.rglob("*") if path.is_file()}


def _hold_pause(tables: Tables) -> None:
    """Lengthen the pause that follows a failed try, so that a slow machine does not see its end."""
    tables.execute("UPDATE runs SET retry_at = now() + interval '200 seconds' WHERE retry_at IS NOT NULL")


def _pause_over(tables: Tables) -> None:
    """End the pause that follows a failed try."""
    tables.execute("UPDATE runs SET retry_at = now() - interval '1 second' WHERE retry_at IS NOT NULL")


@pytest.mark.parametrize("where", ["fedssl_coordinator.federation.rounds.closing.close_round", "after"])
def test_a_round_is_closed_with_the_same_bits_after_its_aggregator_died(
    scenario: Scenario,
    coordinator: Coordinator,
    tables: Tables,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
) -> None:
    """It dies between storing the new weights and closing the round, or just before the transaction commits."""
    twin = Scenario(coordinator, tables, tmp_path, num_rounds=2)
    for one in (scenario, twin):
        one.claim("a")
        one.deliver("a", 0.1, 7)
        one.claim("b")
        one.deliver("b", 0.2, 11)
    twin.advance()
    before = _files(coordinator.store)

    def die(*_: object, **__: object) -> None:
        raise Killed

    target = "fedssl_coordinator.federation.rounds.round_metrics.replace" if where == "after" else where
    with monkeypatch.context() as patch:
        patch.setattr(target, die)
        with pytest.raises(Killed):
            scenario.advance()
    assert scenario.run.rounds_closed == 0
    assert _files(coordinator.store) == before  # the twin has already stored the same bits
    _hold_pause(tables)
    assert not scenario.needs_attention()  # a try that ends its process is not repeated at once
    scenario.advance()
    assert scenario.run.rounds_closed == 0
    _pause_over(tables)
    assert scenario.needs_attention()
    scenario.advance()
    run = scenario.run
    assert (run.rounds_closed, run.model) == (1, twin.run.model)
    assert scenario.rounds[0].verdict == Verdict.AGGREGATED
    assert len(scenario.events("round.closed")) == 1
    [event] = scenario.events("run.stalled")
    assert event.message.startswith("try 1: the aggregator ended while it computed")
    assert (run.reason, tables.query("SELECT num_tries, retry_at FROM runs WHERE id = %s", run.id)) == (
        None,
        [(0, None)],
    )


def test_a_failure_is_forgotten_once_a_later_check_succeeds(scenario: Scenario, tables: Tables) -> None:
    """It is forgotten before the round closes, which may take hours."""
    tables.execute("UPDATE runs SET num_tries = 1, retry_at = now(), reason = 'ValueError: no; it is tried again'")
    scenario.advance()
    assert scenario.run.reason is None
    assert tables.query("SELECT num_tries, retry_at FROM runs") == [(0, None)]


def test_a_run_is_prepared_again_after_its_aggregator_died_with_the_first_weights(
    coordinator: Coordinator, tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator.worker("a")
    run = coordinator.client.create_run(tiny_spec(seed=5))

    def die(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("fedssl_coordinator.federation.run_rows.set_first_weights", die)
        with pytest.raises(Killed):
            coordinator.advance(run.id)
    [stored] = _files(coordinator.store)
    _pause_over(tables)
    coordinator.advance(run.id)
    after = coordinator.client.run(run.id)
    assert (after.model, after.initial_model) == (stored, stored)
    assert after.current_round is not None


@pytest.fixture
def one_is_too_large(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Make runs named `too-large` fail for lack of memory at their start. Return a function that ends this."""
    from fedssl_coordinator.aggregator import rounds

    start_run = rounds.start_run
    is_short = True

    def start(method: Any, ctx: Any, **rest: Any) -> Any:
        if is_short and ctx.spec.name == "too-large":
            raise MemoryError("no room for 154 GB")
        return start_run(method, ctx, **rest)

    def relieve() -> None:
        nonlocal is_short
        is_short = False

    monkeypatch.setattr(rounds, "start_run", start)
    return relieve


_IN = "SELECT now() + %s * interval '1 second'"


def _sweep(monkeypatch: pytest.MonkeyPatch) -> list[UUID]:
    """Run the sweep, and advance each requested run in turn, as a single aggregator would. Return their ids."""
    from fedssl_coordinator.aggregator import tasks

    asked: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(tasks.advance_run, "delay", asked.append)
        tasks.sweep()
    for run_id in asked:
        tasks.advance_run(run_id)
    return [UUID(run_id) for run_id in asked]


def test_a_run_that_cannot_start_delays_no_other_and_its_retries_become_rarer(
    coordinator: Coordinator,
    tables: Tables,
    monkeypatch: pytest.MonkeyPatch,
    one_is_too_large: Callable[[], None],
) -> None:
    coordinator.worker("a")
    bad = coordinator.client.create_run(tiny_spec(name="too-large")).id
    good = coordinator.client.create_run(tiny_spec()).id
    assert _sweep(monkeypatch) == [bad, good]
    assert coordinator.client.run(good).current_round is not None
    stalled = coordinator.client.run(bad)
    assert stalled.state == RunState.RUNNING
    assert stalled.reason == "MemoryError: no room for 154 GB; it is tried again"
    for tries in range(2, 22):
        _pause_over(tables)
        pause = min(2**tries, 300)
        soonest = tables.one(_IN, pause)
        assert _sweep(monkeypatch) == [bad]
        again_at, latest = tables.one("SELECT retry_at FROM runs WHERE id = %s", bad), tables.one(_IN, pause)
        assert soonest <= again_at <= latest
        if pause > 60:
            assert _sweep(monkeypatch) == []  # not retried for a while
    stalls = [event for event in coordinator.client.event_log(bad) if event.kind == "run.stalled"]
    assert [event.data["num_tries"] for event in stalls] == [1, 2, 4, 8, 16]
    assert stalls[0].message == "try 1: MemoryError: no room for 154 GB; it is tried again"
    one_is_too_large()
    _pause_over(tables)
    assert _sweep(monkeypatch) == [bad]
    recovered = coordinator.client.run(bad)
    assert (recovered.reason, recovered.current_round is not None) == (None, True)
    assert tables.query("SELECT num_tries, retry_at FROM runs WHERE id = %s", bad) == [(0, None)]


@contextmanager
def _no_rounds(tables: Tables) -> Iterator[None]:
    """Make Postgres refuse every new round during the block, with the code of an exceeded limit."""
    tables.execute(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE 'too much' USING ERRCODE = 'program_limit_exceeded'; END $$"
    )
    tables.execute("CREATE TRIGGER refuse BEFORE INSERT ON rounds EXECUTE FUNCTION refuse()")
    try:
        yield
    finally:
        tables.execute("DROP FUNCTION refuse CASCADE")


def test_a_value_that_postgres_refuses_is_reported_like_any_failure(
    coordinator: Coordinator, tables: Tables, tmp_path: Path
) -> None:
    """The driver reports the refusal like an outage. The next computation is not reported as a failed try."""
    with _no_rounds(tables):
        scenario = Scenario(coordinator, tables, tmp_path, num_rounds=2)
    assert scenario.run.state == RunState.RUNNING
    assert "too much" in (scenario.run.reason or "")
    _pause_over(tables)
    scenario.advance()
    assert (scenario.run.reason, scenario.round.number) == (None, 1)
    scenario.work("a", "b")
    scenario.advance()
    assert scenario.run.rounds_closed == 1
    assert ["too much" in event.message for event in scenario.events("run.stalled")] == [True]


@pytest.mark.full
def test_a_run_can_have_more_clients_than_a_statement_has_parameters(coordinator: Coordinator, tables: Tables) -> None:
    tables.execute("INSERT INTO clients (id, registered_at) SELECT 'c' || i, now() FROM generate_series(1, 70000) i")
    run = coordinator.client.create_run(tiny_spec(cohort={"fraction": 0.0001})).id
    coordinator.advance(run)
    coordinator.advance(run)
    opened = coordinator.client.run(run).current_round
    assert opened is not None
    assert len(opened.assignments) == 7


def test_a_stalled_run_is_retried_at_once_when_it_is_resumed(
    coordinator: Coordinator, tables: Tables, one_is_too_large: Callable[[], None]
) -> None:
    coordinator.worker("a")
    run = coordinator.client.create_run(tiny_spec(name="too-large")).id
    coordinator.advance(run)
    one_is_too_large()
    coordinator.advance(run)
    assert coordinator.client.run(run).current_round is None
    coordinator.client.pause(run)
    coordinator.client.resume(run)
    coordinator.advance(run)
    assert coordinator.client.run(run).current_round is not None


def test_a_stalled_run_can_be_stopped(
    coordinator: Coordinator, tables: Tables, one_is_too_large: Callable[[], None]
) -> None:
    run = coordinator.client.create_run(tiny_spec(name="too-large")).id
    coordinator.advance(run)
    assert coordinator.client.stop(run).reason == "stopped by an operator"


def test_a_spec_that_this_version_cannot_read_stalls_only_its_own_run(
    coordinator: Coordinator, scenario: Scenario, tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    newer = Scenario(coordinator, tables, scenario.coordinator.store.parent, "c")
    tables.execute("UPDATE runs SET spec = jsonb_set(spec, '{seed}', '\"newer\"') WHERE id = %s", newer.id)
    newer.pass_deadline()
    scenario.work("a", "b")
    assert _sweep(monkeypatch) == [scenario.id, newer.id]
    assert scenario.run.rounds_closed == 1
    message = tables.one("SELECT message FROM events WHERE run_id = %s AND kind = 'run.stalled'", newer.id)
    assert "does not understand the spec of run" in message
    assert "upgrade the coordinator" in message
    assert "seed" in message
    assert _sweep(monkeypatch) == []


def test_a_method_error_at_the_start_fails_the_run(coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise MethodError("this method needs what the spec does not give")

    monkeypatch.setattr("fedssl_coordinator.aggregator.rounds.start_run", refuse)
    run = coordinator.client.create_run(tiny_spec())
    coordinator.advance(run.id)
    ended = coordinator.client.run(run.id)
    assert (ended.state, ended.outcome) == (RunState.FINISHED, Outcome.FAILED)
    assert ended.reason == "this method needs what the spec does not give"


def test_updates_that_cannot_be_aggregated_fail_the_run(scenario: Scenario, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise MethodError("the updates cannot be aggregated: \x00 odd")

    monkeypatch.setattr("fedssl_coordinator.aggregator.rounds.run_aggregation", refuse)
    scenario.work("a", "b")
    scenario.advance()
    assert scenario.run.outcome == Outcome.FAILED
    assert scenario.run.reason == "round 1: the updates cannot be aggregated: \\x00 odd"
    assert scenario.round.verdict == Verdict.FAILED
    assert scenario.events("round.closed")[0].data["clients"] == {"a": "accepted", "b": "accepted"}


@pytest.mark.full(but=2)
@pytest.mark.parametrize("damage", ["gone", "cut", "empty", "no header"])
def test_a_run_continues_after_the_store_has_lost_or_damaged_an_update(scenario: Scenario, damage: str) -> None:
    """The client still has its update, and the run may have trained for weeks."""
    scenario.work("a", value=1.0)
    scenario.work("b", value=2.0)
    digest = str(scenario.round.assignments[0].update)
    path = scenario.coordinator.store / digest[:2] / digest[2:4] / digest
    whole = path.read_bytes()
    match damage:
        case "gone":
            path.unlink()
        case "empty":
            path.write_bytes(b"")
        case "cut":
            path.write_bytes(whole[: len(whole) // 2])
        case "no header":
            path.write_bytes(b"\xff" * len(whole))
    if damage != "gone":
        os.utime(path, (0, 0))  # damage on the disk does not change the time
    scenario.advance()
    run = scenario.run
    assert (run.state, run.rounds_closed) == (RunState.RUNNING, 0), run.reason
    assert len(scenario.events("round.reopened")) == 1
    scenario.work("a", value=1.0)
    assert path.read_bytes() == whole
    scenario.advance()
    assert scenario.run.rounds_closed == 1


def test_an_update_of_one_run_never_counts_in_another(
    scenario: Scenario, coordinator: Coordinator, tables: Tables, tmp_path: Path
) -> None:
    """This holds even for the same client and the same bytes."""
    other = Scenario(coordinator, tables, tmp_path, num_rounds=2)
    scenario.work("a", "b", value=1.0)
    scenario.advance()
    assert (scenario.run.rounds_closed, other.run.rounds_closed) == (1, 0)
    assert other.states() == [("a", 1, "offered"), ("b", 1, "offered")]
