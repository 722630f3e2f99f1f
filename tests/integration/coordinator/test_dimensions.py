"""Dimension assignments (SSD): disjoint, kept for the run, never handed on."""

from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy.exc import IntegrityError

from fedssl.dimensions import assign_dimensions
from fedssl.protocol.states import Outcome
from fedssl_coordinator.db import transaction
from fedssl_coordinator.dimensions import repository
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


def test_first_clients_take_the_slots_in_name_order(coordinator: Coordinator) -> None:
    workers = {name: coordinator.worker(name) for name in ("b", "a")}
    run = coordinator.client.create_run(_ssd(cohort={"min_clients": 2}, seed=3))
    coordinator.advance(run.id)
    slots = assign_dimensions(3, WIDTH, 2)
    assert _shown(coordinator, run.id) == {"a": slots[0], "b": slots[1]}
    for name, worker in workers.items():
        item = worker.claim(0)
        assert item is not None
        assert item.dimensions == _shown(coordinator, run.id)[name]


def test_methods_without_separation_assign_none(coordinator: Coordinator) -> None:
    worker = coordinator.worker("a")
    run = coordinator.client.create_run(tiny_spec())
    coordinator.advance(run.id)
    item = worker.claim(0)
    assert item is not None
    assert item.dimensions is None
    assert _shown(coordinator, run.id) == {}


def test_a_late_client_takes_a_free_slot_and_then_there_is_none(coordinator: Coordinator, tmp_path: Path) -> None:
    first = coordinator.worker("m")
    run = coordinator.client.create_run(_ssd(num_clients=2, num_rounds=3))
    coordinator.advance(run.id)
    before = _shown(coordinator, run.id)
    late = coordinator.worker("a")  # before "m" by name: "m" keeps its own all the same
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
    messages = [e.message for e in coordinator.client.event_log(run.id) if e.kind == "dimensions.exhausted"]
    assert messages == ["no dimensions are left for z: raise num_clients of the add-on in the next run"]


def test_a_revoked_clients_dimensions_are_not_handed_on(coordinator: Coordinator, tmp_path: Path) -> None:
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


def test_postgres_refuses_an_overlap(coordinator: Coordinator) -> None:
    coordinator.worker("a")
    coordinator.worker("b")
    run = coordinator.client.create_run(_ssd(cohort={"min_clients": 2}))
    coordinator.advance(run.id)
    taken = _shown(coordinator, run.id)["a"][0]
    with pytest.raises(IntegrityError, match="pk_dimension_assignments"), transaction() as session:
        repository.add(session, run.id, "b", [taken])
