"""A run from its spec to its last round, one request at a time."""

from pathlib import Path

import pytest

from fedssl.artifacts.tensors import load_tensors
from fedssl.client import Conflict
from fedssl.protocol.states import AssignmentState, Outcome, RoundState, RunState, Verdict
from support.coordinator import Coordinator
from support.federation import tiny_spec, upload_and_submit


def test_two_clients_complete_a_run_of_two_rounds(coordinator: Coordinator, tmp_path: Path) -> None:
    a, b = coordinator.worker("a"), coordinator.worker("b")
    run = coordinator.client.create_run(tiny_spec(cohort={"min_clients": 2}))
    assert run.state == RunState.RUNNING
    assert run.model is None

    coordinator.advance(run.id)
    for number, (low, high, mean) in enumerate([(1.0, 4.0, 3.0), (2.0, 6.5, 5.0)], start=1):
        item_a, item_b = a.claim(0), b.claim(0)
        assert item_a is not None
        assert item_b is not None
        assert item_a.round_number == item_b.round_number == number
        assert item_a.broadcast == item_b.broadcast
        upload_and_submit(b, item_b, tmp_path, high, num_examples=20)
        coordinator.advance(run.id)  # one of two updates does not close the round
        assert coordinator.client.run(run.id).rounds_closed == number - 1
        upload_and_submit(a, item_a, tmp_path, low, num_examples=10)
        coordinator.advance(run.id)
        assert _global_value(coordinator, run.id, tmp_path) == mean  # (10 low + 20 high) / 30

    done = coordinator.client.run(run.id)
    assert (done.state, done.outcome, done.rounds_closed) == (RunState.FINISHED, Outcome.COMPLETED, 2)
    rounds = list(coordinator.client.rounds(run.id))
    assert [(r.number, r.state, r.verdict) for r in rounds] == [
        (1, RoundState.CLOSED, Verdict.AGGREGATED),
        (2, RoundState.CLOSED, Verdict.AGGREGATED),
    ]
    assert {a.state for r in rounds for a in r.assignments} == {AssignmentState.ACCEPTED}
    kinds = [event.kind for event in coordinator.client.event_log(run.id)]
    assert kinds[:4] == ["run.created", "run.started", "run.prepared", "round.opened"]
    assert kinds[-2:] == ["round.closed", "run.finished"]
    losses = {(m.round_number, m.client_id): m.value for m in coordinator.client.metrics(run.id, "loss")}
    assert losses == {
        (1, "a"): 1.0, (1, "b"): 4.0, (1, None): 3.0,
        (2, "a"): 2.0, (2, "b"): 6.5, (2, None): 5.0,
    }  # fmt: skip


def _global_value(coordinator: Coordinator, run_id: object, folder: Path) -> float:
    path = folder / "global.safetensors"
    coordinator.client.download_model(run_id, path)  # type: ignore[arg-type]
    tensors = [t for t in load_tensors(path).values() if t.is_floating_point()]
    first = float(tensors[0].flatten()[0])
    assert all(bool((t == first).all()) for t in tensors)
    return first


def test_a_run_that_waits_for_clients_gives_the_reason(coordinator: Coordinator) -> None:
    coordinator.worker("a")
    run = coordinator.client.create_run(tiny_spec(cohort={"min_clients": 2}))
    coordinator.advance(run.id)
    waiting = coordinator.client.run(run.id)
    assert waiting.current_round is None
    assert waiting.reason == "waiting for clients: 1 of 2 have registered"
    coordinator.worker("b")
    coordinator.advance(run.id)
    assert coordinator.client.run(run.id).current_round is not None
    assert coordinator.client.run(run.id).reason is None


def test_stopping_a_run_ends_its_round_and_leases(coordinator: Coordinator) -> None:
    worker = coordinator.worker("a")
    run = coordinator.client.create_run(tiny_spec())
    coordinator.advance(run.id)
    item = worker.claim(0)
    assert item is not None
    stopped = coordinator.client.stop(run.id)
    assert (stopped.state, stopped.outcome) == (RunState.FINISHED, Outcome.STOPPED)
    reply = worker.heartbeat(item.assignment_id)
    assert not reply.carry_on
    assert "stopped by an operator" in reply.reason
    assert coordinator.client.stop(run.id).outcome == Outcome.STOPPED  # a repeated stop is not an error
    with pytest.raises(Conflict, match="cannot resume"):
        coordinator.client.resume(run.id)
    assert worker.claim(0) is None


def test_a_paused_run_offers_no_work(coordinator: Coordinator) -> None:
    worker = coordinator.worker("a")
    run = coordinator.client.create_run(tiny_spec())
    coordinator.advance(run.id)
    coordinator.client.pause(run.id)
    assert worker.claim(0) is None
    coordinator.client.resume(run.id)
    assert worker.claim(0) is not None


def test_creating_a_run_twice_with_one_key_makes_one_run(coordinator: Coordinator) -> None:
    first = coordinator.client.create_run(tiny_spec(), start=False, idempotency_key="k1")
    again = coordinator.client.create_run(tiny_spec(), start=False, idempotency_key="k1")
    assert again.id == first.id
    with pytest.raises(Conflict, match="another spec"):
        coordinator.client.create_run(tiny_spec(seed=1), start=False, idempotency_key="k1")
    assert len(list(coordinator.client.runs())) == 1
