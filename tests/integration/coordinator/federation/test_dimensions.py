"""Dimension assignments (SSD): disjoint, kept for the whole run, and never given to another client."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy.exc import IntegrityError

from fedssl.dimensions import assign_dimensions
from fedssl.protocol.states import Outcome, RunState
from fedssl_coordinator.core.db import transaction
from fedssl_coordinator.federation.dimensions import repository
from support.coordinator import Coordinator
from support.federation import deliver, tiny_spec

WIDTH = 8
MODEL = {"encoder": {"widths": [4, WIDTH]}, "projector": {"hidden_dims": [8], "out_dim": WIDTH}}


def _ssd(num_clients: int | None = None, **changes: Any) -> Any:
    add_ons = [{"name": "dsr", "num_clients": num_clients}, {"name": "pd"}]
    return tiny_spec(model=MODEL, method={"name": "ssd", "add_ons": add_ons}, **changes)


def _shown(coordinator: Coordinator, run_id: UUID) -> dict[str, tuple[int, ...]]:
    answer = coordinator.http().get(f"/v1/runs/{run_id}/dimension-assignments")
    assert answer.status_code == 200
    return {item["client_id"]: tuple(item["dimensions"]) for item in answer.json()["items"]}


def test_the_first_clients_take_the_slots_in_the_order_of_their_names(coordinator: Coordinator) -> None:
    workers = {name: coordinator.worker(name) for name in ("b", "a")}
    run = coordinator.client.create_run(_ssd(cohort={"min_clients": 2}, seed=3))
    coordinator.advance(run.id)
    slots = assign_dimensions(3, WIDTH, 2)
    assert _shown(coordinator, run.id) == {"a": slots[0], "b": slots[1]}
    for name, worker in workers.items():
        item = worker.claim(0)
        assert item is not None
        assert item.dimensions == _shown(coordinator, run.id)[name]


def test_a_run_waits_for_clients_that_own_dimensions(coordinator: Coordinator, tmp_path: Path) -> None:
    """Clients that came too late for dimensions do not count towards the quorum."""
    workers = {name: coordinator.worker(name) for name in "ab"}
    cohort = {"min_clients": 2, "min_updates": 2, "without_quorum": "skip"}
    run = coordinator.client.create_run(_ssd(cohort=cohort, num_rounds=3))
    coordinator.advance(run.id)
    for name in "yz":
        coordinator.worker(name)
    for worker in workers.values():
        item = worker.claim(0)
        assert item is not None
        deliver(worker, item, tmp_path)
    coordinator.client.revoke_client("b")
    coordinator.advance(run.id)
    now = coordinator.client.run(run.id)
    assert (now.state, now.rounds_closed, now.current_round and now.current_round.number) == (RunState.RUNNING, 1, 1)
    assert now.reason == "waiting for clients: 1 of 2 have registered and own dimensions of the embedding"


def test_methods_without_separation_assign_no_dimensions(coordinator: Coordinator) -> None:
    worker = coordinator.worker("a")
    run = coordinator.client.create_run(tiny_spec())
    coordinator.advance(run.id)
    item = worker.claim(0)
    assert item is not None
    assert item.dimensions is None
    assert _shown(coordinator, run.id) == {}


def test_late_clients_take_free_slots_until_none_is_left(coordinator: Coordinator, tmp_path: Path) -> None:
    first = coordinator.worker("m")
    run = coordinator.client.create_run(_ssd(num_clients=2, num_rounds=3))
    coordinator.advance(run.id)
    before = _shown(coordinator, run.id)
    late = coordinator.worker("a")  # sorts before "m", which keeps its own dimensions
    coordinator.worker("z")
    item = first.claim(0)
    assert item is not None
    deliver(first, item, tmp_path)
    coordinator.advance(run.id)
    after = _shown(coordinator, run.id)
    assert after["m"] == before["m"]
    assert after.keys() == {"m", "a"}
    assert not set(after["m"]) & set(after["a"])
    item = late.claim(0)
    assert item is not None
    assert item.dimensions == after["a"]
    current = coordinator.client.run(run.id).current_round
    assert current is not None
    assert {assignment.client_id for assignment in current.assignments} == {"m", "a"}
    assert _refused(coordinator, run.id) == [("z", "no dimensions are left for z")]
    assert coordinator.worker("z", register=False).claim(0) is None
    coordinator.worker("zz")
    for worker in (first, late):
        item = worker.claim(0)
        assert item is not None
        deliver(worker, item, tmp_path)
    coordinator.advance(run.id)  # the next round does not report z a second time
    assert _refused(coordinator, run.id) == [
        ("z", "no dimensions are left for z"),
        ("zz", "no dimensions are left for zz"),
    ]


def _refused(coordinator: Coordinator, run_id: UUID) -> list[tuple[str | None, str]]:
    events = [e for e in coordinator.client.event_log(run_id) if e.kind == "dimensions.exhausted"]
    assert all(event.message.endswith(": raise num_clients of the add-on in the next run") for event in events)
    return [(event.client_id, event.message.partition(":")[0]) for event in events]


def test_a_client_keeps_its_dimensions_however_the_cohort_is_sampled(coordinator: Coordinator, tmp_path: Path) -> None:
    """Clients that are not in a round also own dimensions, from the first round on."""
    names = [f"c{number}" for number in range(4)]
    workers = {name: coordinator.worker(name) for name in names}
    run = coordinator.client.create_run(_ssd(num_rounds=4, cohort={"min_clients": 4, "fraction": 0.5}))
    coordinator.advance(run.id)
    first, cohorts = _shown(coordinator, run.id), set()
    assert list(first) == names
    for _ in range(4):
        current = coordinator.client.run(run.id).current_round
        assert current is not None
        cohort = [part.client_id for part in current.assignments]
        assert len(cohort) == 2
        cohorts.add(tuple(cohort))
        for name in cohort:
            item = workers[name].claim(0)
            assert item is not None
            assert item.dimensions == first[name]
            deliver(workers[name], item, tmp_path)
        coordinator.advance(run.id)
        assert _shown(coordinator, run.id) == first
    assert len(cohorts) > 2
    assert {name for cohort in cohorts for name in cohort} == set(names)


def test_clients_that_join_at_once_get_disjoint_dimensions(
    coordinator: Coordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same holds for two aggregators that check the run at once, each without seeing the other."""
    from fedssl_coordinator.aggregator import tasks

    @contextmanager
    def always_got(name: str) -> Iterator[bool]:
        yield True

    worker = coordinator.worker("a")
    run = coordinator.client.create_run(_ssd(num_clients=4, num_rounds=2))
    coordinator.advance(run.id)
    item = worker.claim(0)
    assert item is not None
    deliver(worker, item, tmp_path)
    late = [f"late-{number}" for number in range(3)]
    start = threading.Barrier(5)

    def at_once(work: Callable[[], object]) -> None:
        start.wait()
        work()

    monkeypatch.setattr(tasks, "exclusive", always_got)
    works: list[Callable[[], object]] = [lambda name=name: coordinator.worker(name) for name in late]  # type: ignore[misc]
    works += [lambda: coordinator.advance(run.id)] * 2
    with ThreadPoolExecutor(5) as pool:
        list(pool.map(at_once, works))
    coordinator.advance(run.id)
    owned = _shown(coordinator, run.id)
    given = [dimension for dimensions in owned.values() for dimension in dimensions]
    assert len(given) == len(set(given))
    assert {len(dimensions) for dimensions in owned.values()} == {WIDTH // 4}
    current = coordinator.client.run(run.id).current_round
    assert current is not None
    assert {part.client_id for part in current.assignments} <= set(owned)


def test_every_client_gets_the_same_number_of_dimensions_and_the_rest_is_unused(coordinator: Coordinator) -> None:
    for name in ("a", "b", "c"):
        coordinator.worker(name)
    run = coordinator.client.create_run(_ssd(cohort={"min_clients": 3}))
    coordinator.advance(run.id)
    owned = _shown(coordinator, run.id)
    assert [len(dimensions) for dimensions in owned.values()] == [WIDTH // 3] * 3
    assert {view.client_id: view.dimensions for view in coordinator.client.dimension_assignments(run.id)} == owned


def test_a_revoked_clients_dimensions_are_not_given_to_another(coordinator: Coordinator, tmp_path: Path) -> None:
    a, b = coordinator.worker("a"), coordinator.worker("b")
    run = coordinator.client.create_run(_ssd(num_clients=2, num_rounds=3, cohort={"min_clients": 1}))
    coordinator.advance(run.id)
    before = _shown(coordinator, run.id)
    assert before.keys() == {"a", "b"}
    for worker in (a, b):
        item = worker.claim(0)
        assert item is not None
        deliver(worker, item, tmp_path)
    coordinator.client.revoke_client("b")
    coordinator.worker("c")
    coordinator.advance(run.id)
    assert _shown(coordinator, run.id) == before


def test_more_clients_than_slots_end_the_run_with_the_reason(coordinator: Coordinator) -> None:
    for name in ("a", "b", "c"):
        coordinator.worker(name)
    run = coordinator.client.create_run(_ssd(num_clients=2))
    coordinator.advance(run.id)
    done = coordinator.client.run(run.id)
    assert done.outcome == Outcome.FAILED
    assert done.reason is not None
    assert "among 2 clients, but there are 3" in done.reason


def test_postgres_refuses_overlapping_dimensions(coordinator: Coordinator) -> None:
    coordinator.worker("a")
    coordinator.worker("b")
    run = coordinator.client.create_run(_ssd(cohort={"min_clients": 2}))
    coordinator.advance(run.id)
    taken = _shown(coordinator, run.id)["a"][0]
    with pytest.raises(IntegrityError, match="pk_dimension_assignments"), transaction() as session:
        repository.add(session, run.id, "b", [taken])


def test_postgres_refuses_overlapping_dimensions_of_concurrent_transactions(coordinator: Coordinator) -> None:
    """The second transaction waits for the first to commit, and then fails."""
    for name in ("a", "b", "c"):
        coordinator.worker(name)
    run = coordinator.client.create_run(_ssd(num_clients=8, cohort={"clients": ["a"]}))
    coordinator.advance(run.id)
    free = sorted(set(range(WIDTH)) - set(_shown(coordinator, run.id)["a"]))
    refused: list[str] = []

    def take_the_same() -> None:
        try:
            with transaction() as session:
                repository.add(session, run.id, "c", [free[1], free[0]])
        except IntegrityError as error:
            refused.append(str(error))

    with transaction() as session:
        repository.add(session, run.id, "b", free[:1])
        second = threading.Thread(target=take_the_same)
        second.start()
        second.join(0.3)
        assert second.is_alive()
    second.join(10)
    assert "pk_dimension_assignments" in refused[0]
    assert _shown(coordinator, run.id).keys() == {"a", "b"}
