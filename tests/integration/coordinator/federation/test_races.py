"""Concurrent claims, submissions, aggregators and operators."""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import pytest

from fedssl.client import ApiError, ClientError, DuplicateUpdate, ServerError
from fedssl.protocol.states import AssignmentState, Outcome, RoundState, RunState, Verdict
from fedssl.protocol.work import Submit, Submitted, WorkItem
from support.coordinator import Coordinator
from support.federation import tensors_for, upload, upload_and_submit
from support.scenario import Scenario
from support.tables import Tables
from support.waiting import wait_until

T = TypeVar("T")


def _at_once(*calls: Callable[[], T]) -> list[T]:
    """Run every call in its own thread, and start all of them together."""
    start = threading.Barrier(len(calls))

    def run(call: Callable[[], T]) -> T:
        start.wait()
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(run, calls))


@pytest.fixture
def scenario(coordinator: Coordinator, tables: Tables, tmp_path: Path) -> Scenario:
    return Scenario(coordinator, tables, tmp_path, num_rounds=1)


def test_concurrent_claims_of_one_client_give_one_lease(
    scenario: Scenario, coordinator: Coordinator, tables: Tables, tmp_path: Path
) -> None:
    Scenario(coordinator, tables, tmp_path, "a")  # a second offer, which must not be taken besides the first
    items = _at_once(*[lambda: scenario.workers["a"].claim(0)] * 6)
    assert len({item.assignment_id for item in items if item is not None}) == 1
    assert None not in items
    assert tables.one("SELECT count(*) FROM assignments WHERE state = 'leased'") == 1


def test_concurrent_claims_of_several_clients_all_succeed(
    scenario: Scenario, coordinator: Coordinator, tables: Tables, tmp_path: Path
) -> None:
    many = Scenario(coordinator, tables, tmp_path, "cdefgh")
    items = _at_once(*[lambda worker=worker: worker.claim(0) for worker in many.workers.values()])  # type: ignore[misc]
    assert {item.client_id for item in items if item is not None} == set("cdefgh")


def test_concurrent_submissions_of_one_update_count_once(scenario: Scenario, tmp_path: Path, tables: Tables) -> None:
    item = scenario.claim("a")
    update = upload(scenario.workers["a"], item, tensors_for(item.plan.update, 1.0), tmp_path)
    submission = Submit(assignment_id=item.assignment_id, update=update, num_examples=5, metrics={"loss": 1.0})
    answers = _at_once(*[lambda: scenario.workers["a"].submit(submission)] * 8)
    assert answers == [Submitted(assignment_id=item.assignment_id, state=AssignmentState.ACCEPTED)] * 8
    assert len(scenario.events("assignment.accepted")) == 1
    assert tables.query("SELECT name, value FROM metrics") == [("loss", 1.0)]


def test_one_of_two_concurrently_submitted_updates_counts(scenario: Scenario, tmp_path: Path) -> None:
    item, worker = scenario.claim("a"), scenario.workers["a"]
    updates = [upload(worker, item, tensors_for(item.plan.update, value), tmp_path) for value in (1.0, 2.0)]

    def submit(update: str) -> str | None:
        try:
            worker.submit(Submit(assignment_id=item.assignment_id, update=update, num_examples=5))
        except DuplicateUpdate:
            return None
        return update

    accepted = [update for update in _at_once(*[lambda u=u: submit(u) for u in updates]) if update]  # type: ignore[misc]
    assert accepted == [scenario.round.assignments[0].update]


def test_two_concurrent_uploads_of_one_file_are_stored_once(scenario: Scenario, tmp_path: Path, tables: Tables) -> None:
    item = scenario.claim("a")
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
    tensors = tensors_for(item.plan.update, 1.0)
    digests = _at_once(
        *[lambda f=f: upload(scenario.workers["a"], item, tensors, tmp_path / f) for f in ("one", "two")]  # type: ignore[misc]
    )
    assert digests[0] == digests[1]
    assert tables.one("SELECT count(*) FROM uploads") == 1


def test_concurrent_aggregators_aggregate_once(scenario: Scenario) -> None:
    scenario.work("a", "b")
    _at_once(*[scenario.advance] * 3)
    scenario.advance()
    assert scenario.run.rounds_closed == 1
    assert len(scenario.events("round.aggregating")) == len(scenario.events("round.closed")) == 1
    assert len(scenario.events("run.finished")) == 1


@pytest.mark.changes_states
@pytest.mark.parametrize("num_rounds", [1, 2])
def test_two_aggregators_that_both_believe_to_hold_the_run_publish_once(
    coordinator: Coordinator, tables: Tables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_rounds: int
) -> None:
    """The connection of one aggregator broke, which freed its lock while it was still computing."""
    from fedssl_coordinator.aggregator import rounds, tasks

    @contextmanager
    def always_got(run_id: object) -> Iterator[bool]:
        yield True

    both, compute_alone = threading.Barrier(2, timeout=10), rounds.next_weights
    digests = []

    def together(*arguments: object) -> object:
        result = compute_alone(*arguments)  # type: ignore[arg-type]
        digests.append(result.broadcast.digest)
        end = time.monotonic() + 5
        if both.wait() == 0:  # this aggregator is slower: the other has continued with the next step
            while scenario.tables.one(on_its_way, scenario.id) and time.monotonic() < end:
                time.sleep(0.01)
        return result

    on_its_way = (
        "SELECT rounds_closed = 0 OR (state = 'running' AND NOT EXISTS "
        "(SELECT FROM rounds WHERE run_id = runs.id AND state = 'open')) FROM runs WHERE id = %s"
    )
    scenario = Scenario(coordinator, tables, tmp_path, num_rounds=num_rounds)
    scenario.work("a", "b")
    # Each of them sees the round before the other has closed it.
    tables.execute("UPDATE rounds SET state = 'aggregating'")
    monkeypatch.setattr(tasks, "exclusive", always_got)
    monkeypatch.setattr(rounds, "next_weights", together)
    monkeypatch.setattr("fedssl_coordinator.federation.retries.may_begin", lambda session, row: True)
    _at_once(scenario.advance, scenario.advance)
    assert len(digests) == 2
    assert len(set(digests)) == 1
    run = scenario.run
    assert (run.rounds_closed, run.model) == (1, digests[0])
    assert run.outcome == (Outcome.COMPLETED if num_rounds == 1 else None)
    assert len(scenario.events("round.closed")) == 1
    # The slower one must not mistake the next round, which the quicker one has opened, for its own.
    assert [r.state for r in scenario.rounds] == [RoundState.CLOSED, RoundState.OPEN][:num_rounds]


def test_an_aggregator_waits_while_an_operator_stops_the_run(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The aggregator must not move the round between the operator's check and the end of the run."""
    from fedssl_coordinator.federation.rounds import repository

    locked_live = repository.locked_live
    aggregator = threading.Thread(target=scenario.advance)

    def aggregate_meanwhile(session: object, **arguments: object) -> object:
        if not aggregator.ident:
            aggregator.start()
            aggregator.join(0.5)
            assert aggregator.is_alive()  # waits for the run
        return locked_live(session, **arguments)  # type: ignore[arg-type]

    scenario.work("a", "b")
    monkeypatch.setattr(repository, "locked_live", aggregate_meanwhile)
    assert scenario.coordinator.client.stop(scenario.id).outcome == Outcome.STOPPED
    aggregator.join(5)
    assert not aggregator.is_alive()
    assert (scenario.round.verdict, scenario.run.rounds_closed) == (Verdict.FAILED, 0)


def test_a_run_that_is_stopped_while_it_is_aggregated_gets_no_new_weights(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedssl_coordinator.aggregator import rounds

    aggregated = rounds.next_weights

    def stop_meanwhile(*arguments: object) -> object:
        scenario.coordinator.client.stop(scenario.id)
        return aggregated(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(rounds, "next_weights", stop_meanwhile)
    scenario.work("a", "b")
    scenario.advance()
    run = scenario.run
    assert (run.state, run.outcome, run.rounds_closed) == (RunState.FINISHED, Outcome.STOPPED, 0)
    assert run.model == run.initial_model
    assert (scenario.round.verdict, scenario.round.reason) == (Verdict.FAILED, "stopped by an operator")
    assert [event.kind for event in scenario.coordinator.client.event_log(scenario.id)][-1] == "run.finished"


def test_a_failing_round_ends_a_run_that_was_paused_meanwhile(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the round would end without its run, which would open the same round repeatedly."""
    from fedssl.errors import MethodError
    from fedssl_coordinator.aggregator import rounds

    def pause_and_fail(*_: object) -> object:
        scenario.coordinator.client.pause(scenario.id)
        raise MethodError("the updates cannot be aggregated: they disagree")

    monkeypatch.setattr(rounds, "next_weights", pause_and_fail)
    scenario.work("a", "b")
    scenario.advance()
    run = scenario.run
    assert (run.state, run.outcome) == (RunState.FINISHED, Outcome.FAILED)
    assert run.reason == "round 1: the updates cannot be aggregated: they disagree"


def test_a_run_that_is_stopped_while_it_is_prepared_gets_no_weights(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedssl_coordinator.aggregator import rounds
    from support.federation import tiny_spec

    start_run = rounds.start_run
    run = coordinator.client.create_run(tiny_spec())

    def stop_meanwhile(*arguments: Any, **rest: Any) -> object:
        coordinator.client.stop(run.id)
        return start_run(*arguments, **rest)

    monkeypatch.setattr(rounds, "start_run", stop_meanwhile)
    coordinator.advance(run.id)
    assert coordinator.client.run(run.id).initial_model is None
    assert [event.kind for event in coordinator.client.event_log(run.id)][-1] == "run.finished"


def test_a_lease_that_is_claimed_while_its_round_closes_ends_with_the_round(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the aggregator's check and the close of the round, an offer becomes a lease."""
    from fedssl_coordinator.federation.rounds import repository

    end_lost = repository.lost

    def claim_meanwhile(*arguments: object) -> object:
        scenario.claim("b")
        return end_lost(*arguments)  # type: ignore[arg-type]

    scenario.tables.execute("UPDATE runs SET spec = jsonb_set(spec, '{cohort,min_updates}', '1')")
    scenario.work("a")
    scenario.pass_deadline()
    monkeypatch.setattr(repository, "lost", claim_meanwhile)
    scenario.advance()
    assert scenario.states() == [("a", 1, "accepted"), ("b", 1, "expired")]
    assert scenario.run.outcome == Outcome.COMPLETED
    assert not scenario.workers["b"].heartbeat(scenario.item("b").assignment_id).carry_on


def test_an_update_accepted_between_the_check_and_the_verdict_counts(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The aggregator checked the round at its deadline. The update counts, and its assignment is not offered again."""
    from fedssl_coordinator.federation.rounds import repository

    locked_live = repository.locked_live

    def deliver_meanwhile(session: object, **arguments: object) -> object:
        if scenario.states()[1] == ("b", 1, "leased"):
            scenario.deliver("b")
        return locked_live(session, **arguments)  # type: ignore[arg-type]

    scenario.work("a")
    scenario.claim("b")
    scenario.pass_deadline()
    monkeypatch.setattr(repository, "locked_live", deliver_meanwhile)
    scenario.advance()
    assert scenario.states() == [("a", 1, "accepted"), ("b", 1, "accepted")]
    assert scenario.round.verdict == Verdict.AGGREGATED


@pytest.mark.full
def test_concurrent_clients_aggregators_and_operators_leave_nothing_inconsistent(
    coordinator: Coordinator, tables: Tables, tmp_path: Path
) -> None:
    """There is no deadlock, no 5xx and nothing half-done, in whatever order the requests arrive."""
    cohort = {"min_updates": 1, "max_attempts": 1000, "without_quorum": "skip"}
    scenarios = [Scenario(coordinator, tables, tmp_path, "abc", num_rounds=60, cohort=cohort) for _ in range(2)]
    workers = {name: scenarios[0].workers[name] for name in "abc"}
    over = threading.Event()
    failures: list[BaseException] = []
    done: Counter[str] = Counter()

    def loop(seed: int, act: Callable[[random.Random], object]) -> None:
        rng = random.Random(seed)
        while not over.is_set():
            try:
                act(rng)
                done[act.__name__] += 1
            except ServerError as error:
                failures.append(error)
            except ClientError as error:
                if not isinstance(error, ApiError):
                    failures.append(error)
            except BaseException as error:
                failures.append(error)
                raise

    def work(rng: random.Random) -> None:
        name = rng.choice("abc")
        item: WorkItem | None = workers[name].claim(0)
        if item is None:
            return
        chance = rng.random()
        folder = tmp_path / uuid4().hex
        folder.mkdir()
        if chance < 0.2:
            workers[name].decline(item.assignment_id, "not now")
        elif chance < 0.9:
            workers[name].heartbeat(item.assignment_id)
            upload_and_submit(workers[name], item, folder, rng.random())

    def aggregate(rng: random.Random) -> None:
        coordinator.advance(rng.choice(scenarios).id)

    def pass_time(rng: random.Random) -> None:
        scenario = rng.choice(scenarios)
        rng.choice([scenario.pass_deadline, lambda: scenario.expire_lease(rng.choice("abc"))])()
        over.wait(0.02)

    def operate(rng: random.Random) -> None:
        scenario = rng.choice(scenarios)
        coordinator.client.pause(scenario.id)
        list(coordinator.client.rounds(scenario.id))
        coordinator.client.resume(scenario.id)

    actions = [work, work, work, aggregate, aggregate, pass_time, operate]
    threads = [threading.Thread(target=loop, args=(seed, action)) for seed, action in enumerate(actions)]
    for thread in threads:
        thread.start()
    over.wait(5)
    try:
        wait_until(lambda: failures or min(done[act.__name__] for act in actions) > 3, seconds=60)
    finally:
        over.set()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert failures == []
    assert tables.one("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()") == 0
    for scenario in scenarios:
        coordinator.client.stop(scenario.id)
        closed = [r for r in scenario.rounds if r.verdict in (Verdict.AGGREGATED, Verdict.PARTIAL, Verdict.SKIPPED)]
        assert scenario.run.rounds_closed == len(closed)
        assert [r.number for r in scenario.rounds] == list(range(1, len(scenario.rounds) + 1))
    assert tables.one("SELECT count(*) FROM assignments WHERE state IN ('offered', 'leased', 'submitted')") == 0
    assert tables.one("SELECT count(*) FROM events WHERE kind = 'run.stalled'") == 0
