"""The Celery queues: long jobs delay no other run, runs take turns, and killing a process changes no bit."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
import pytest
import torch
from redis import Redis

from fedssl.artifacts.tensors import load_tensors
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.states import AssignmentState, JobState, Outcome, RunState
from fedssl.protocol.views import EventView, RoundView
from fedssl.simulation import simulate
from fedssl_coordinator.core.celery_app import QUEUES
from support.coordinator import Coordinator
from support.distillation_scenario import distillation_spec
from support.federation import deliver, tiny_spec
from support.methods import method_spec, shards
from support.processes import Federation, federation
from support.servers import Servers
from support.tables import Tables

pytestmark = [pytest.mark.full, pytest.mark.integration]


@pytest.fixture(scope="module")
def running(servers: Servers, database: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """Yield a federation of three workers and a process for each queue except that of evaluations.

    It saves a checkpoint of a distillation after every epoch.
    """
    folder, clients = tmp_path_factory.mktemp("federation"), shards(method_spec("flesd"))
    with federation(database, servers.redis_url, folder, clients, FEDSSL_CHECKPOINT_SECONDS="0") as started:
        for name in started.clients:
            started.start(name)
        started.wait_for(lambda: sum(c.registered_at is not None for c in started.client.clients()) == 3, "workers")
        yield started


@pytest.fixture
def looking(database: str) -> Iterator[Tables]:
    with Tables(database) as tables:
        yield tables


def _submit(running: Federation, spec: RunSpec) -> UUID:
    return running.client.create_run(spec).id


def _await_end(running: Federation, run_id: UUID, seconds: float = 120) -> None:
    def ended() -> bool:
        return running.client.run(run_id).state == RunState.FINISHED

    running.wait_for(ended, "the run's end", seconds)
    run = running.client.run(run_id)
    assert run.outcome == Outcome.COMPLETED, run.reason


def _await_epoch(running: Federation, run_id: UUID, epoch: int) -> None:
    def reached() -> bool:
        job = running.client.run(run_id).distillation
        return job is not None and job.state == JobState.RUNNING and job.epoch >= epoch

    running.wait_for(reached, f"epoch {epoch} of a distillation")


@contextmanager
def _held_at_epoch(running: Federation, database: str, run_id: UUID, epoch: int) -> Iterator[None]:
    """Wait until the distillation reaches the epoch, and lock its row in the block: it records no more progress."""
    statement = "SELECT epoch FROM distillation_jobs WHERE run_id = %s AND state = 'running' FOR UPDATE"
    with psycopg.connect(database.replace("+psycopg", "", 1)) as holder:

        def reached() -> bool:
            holder.rollback()
            row = holder.execute(statement, (run_id,)).fetchone()
            return row is not None and row[0] >= epoch

        running.wait_for(reached, f"epoch {epoch} of a distillation")
        yield


def _assert_simulated(running: Federation, run_id: UUID, spec: RunSpec) -> None:
    path = running.folder / "model.safetensors"
    running.client.download_model(run_id, path)
    deployed, simulated = load_tensors(path), simulate(spec, running.clients)
    assert deployed.keys() == simulated.model.keys()
    assert [name for name in deployed if not torch.equal(deployed[name], simulated.model[name])] == []


def _events(running: Federation, run_id: UUID, kind: str) -> list[EventView]:
    return [event for event in running.client.event_log(run_id) if event.kind == kind]


def test_a_distillation_resumes_after_its_process_was_stopped_and_after_it_was_killed(
    running: Federation, database: str
) -> None:
    """Another process resumes from a checkpoint. The first process saved it when it ended, the second while it ran."""
    spec = distillation_spec(80)
    run_id = _submit(running, spec)
    with _held_at_epoch(running, database, run_id, 5):
        os.kill(running.pid("distiller"), signal.SIGTERM)
    running.kill("distiller", signal.SIGTERM)
    left_at = running.client.distillation_job(_job(running, run_id)).epoch
    assert left_at < 80, "it waited for the end of the distillation"
    running.start("distiller")
    with _held_at_epoch(running, database, run_id, left_at + 10):
        running.kill("distiller", signal.SIGKILL)
    assert running.client.distillation_job(_job(running, run_id)).state == JobState.RUNNING
    running.start("distiller")
    _await_end(running, run_id)
    _assert_simulated(running, run_id, spec)
    first, second = (event.data["epoch"] for event in _events(running, run_id, "distillation.resumed"))
    assert 5 <= first < second < 80
    stalls = [event.message for event in _events(running, run_id, "distillation.stalled")]
    # Only the kill counts: an end on request is not a failure. Other stalls only record that no process takes the job.
    assert sum("the aggregator ended while it computed" in message for message in stalls) == 1
    assert len(_events(running, run_id, "distillation.started")) == 1


def _job(running: Federation, run_id: UUID) -> UUID:
    return list(running.client.distillation_jobs(run_id))[-1].id


def test_a_long_distillation_delays_no_other_run(running: Federation) -> None:
    """The same workers serve both runs. The clients of the slow run have delivered."""
    slow = _submit(running, distillation_spec(100_000, name="slow"))
    _await_epoch(running, slow, 1)
    quick_spec = method_spec("fedsimclr", num_rounds=4)
    quick = _submit(running, quick_spec)
    _await_end(running, quick)
    job = running.client.run(slow).distillation
    assert job is not None
    assert (job.state, job.epoch < 100_000) == (JobState.RUNNING, True)
    assert job.eta_seconds is not None
    _assert_simulated(running, quick, quick_spec)
    waiting_spec = distillation_spec(4, name="waits", seed=12)
    waiting = _submit(running, waiting_spec)  # waits for the only distiller
    running.wait_for(lambda: running.client.run(waiting).distillation, "its job")
    time.sleep(1.5)
    queued = running.client.run(waiting).distillation
    assert queued is not None
    assert queued.state == JobState.QUEUED
    running.client.cancel_distillation(job.id)
    _await_end(running, waiting)
    _assert_simulated(running, waiting, waiting_spec)
    assert running.client.run(slow).state == RunState.PAUSED
    running.client.stop(slow)


def test_a_second_distiller_takes_jobs_while_the_first_is_busy(running: Federation) -> None:
    """Distillation scales separately: one more process is enough, without a setting."""
    slow = _submit(running, distillation_spec(100_000, name="slow"))
    _await_epoch(running, slow, 1)
    running.start("distiller-2")
    quick = _submit(running, distillation_spec(4, name="quick"))
    _await_end(running, quick)
    job = running.client.run(slow).distillation
    assert job is not None
    assert job.state == JobState.RUNNING
    running.client.stop(slow)
    running.kill("distiller-2", signal.SIGTERM)


SERVER_STATE = {
    "scaffold": {},
    "orchestra": {"num_global_centroids": 16, "num_local_centroids": 4, "memory_size": 32, "num_global_steps": 50},
}


@pytest.mark.parametrize("name", ["scaffold", "orchestra"])
def test_killing_an_aggregator_in_mid_aggregation_changes_no_bit(
    running: Federation, looking: Tables, database: str, name: str
) -> None:
    """Control variates and global centroids are computed again from the round's artifacts."""
    spec = method_spec(name, method={"name": name, **SERVER_STATE[name]}, num_rounds=8, seed=5)
    run_id = _submit(running, spec)

    def current() -> RoundView | None:
        return running.client.run(run_id).current_round

    def has_state() -> bool:
        """Return whether a round is open that begins with the state of an earlier one."""
        return (found := current()) is not None and found.number >= 2

    running.wait_for(has_state, "round 2")
    running.kill("aggregator", signal.SIGTERM)
    while not has_state():  # the aggregator has closed the round meanwhile: use a later one
        running.start("aggregator")
        running.wait_for(has_state, "a later round")
        running.kill("aggregator", signal.SIGTERM)
    held = current()
    assert held is not None
    number = held.number
    assert number < spec.num_rounds

    def all_accepted() -> bool:
        found = current()
        return found is not None and [part.state for part in found.assignments] == [AssignmentState.ACCEPTED] * 3

    running.wait_for(all_accepted, f"every update of round {number}")
    with psycopg.connect(database.replace("+psycopg", "", 1)) as blocker:
        # The new state is computed and stored, and cannot be published: that begins with a row in this table.
        blocker.execute("LOCK TABLE artifacts IN SHARE MODE")
        running.start("aggregator")
        blocked = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query ~ 'INSERT INTO artif'"
        running.wait_for(lambda: looking.one(blocked) == 1, "an aggregator that is about to publish")
        running.kill("aggregator", signal.SIGKILL)
    assert running.client.run(run_id).rounds_closed == number - 1
    running.start("aggregator")
    _await_end(running, run_id)
    _assert_simulated(running, run_id, spec)
    assert "the aggregator ended while it computed" in _events(running, run_id, "run.stalled")[0].message


def test_only_an_aggregator_of_runs_loads_torch_before_it_has_work(
    running: Federation, servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first round is then not slow, and the processes of the other queues need little memory while they wait."""
    monkeypatch.setattr(running, "forks", False)  # a forked process has torch from the start
    running.kill("aggregator", signal.SIGTERM)
    running.start("aggregator")

    def has_torch(name: str) -> bool:
        return "libtorch" in Path(f"/proc/{running.pid(name)}/maps").read_text()

    with Redis.from_url(servers.redis_url) as redis:
        redis.delete("evaluate")  # messages of other tests' coordinators would be work
        before = _waiting_consumers(redis)
        running.start("evaluator")
        running.wait_for(lambda: has_torch("aggregator"), "torch in the aggregator")
        running.wait_for(lambda: _waiting_consumers(redis) - before, "the evaluator")
        assert not has_torch("evaluator")
        running.kill("evaluator", signal.SIGTERM)


def _waiting_consumers(redis: Redis) -> set[str]:
    """Return the connections that wait for a message."""
    return {client["id"] for client in redis.client_list() if client["cmd"] == "brpop"}


def test_no_process_waits_for_remote_commands(running: Federation, servers: Servers) -> None:
    """Celery waits for remote commands without a timeout, and once hung in that wait after a restart of Redis."""
    with Redis.from_url(servers.redis_url) as redis:
        running.wait_for(lambda: len(_waiting_consumers(redis)) >= 2, "the consumers")
        assert redis.pubsub_channels("*pidbox*") == []
        assert redis.keys("unacked*") == []


# Fairness


def test_one_worker_serves_several_runs_in_turn(coordinator: Coordinator, tmp_path: Path) -> None:
    """It gets one assignment at a time, the oldest offer first, so every run progresses as fast as the others."""
    worker = coordinator.worker("a")
    runs = [coordinator.client.create_run(tiny_spec(name=f"run-{n}", num_rounds=4)).id for n in range(3)]
    for run_id in runs:
        coordinator.advance(run_id)
    order = []
    for _ in range(12):
        item = worker.claim(0)
        assert item is not None
        again = worker.claim(0)
        assert again is not None
        assert again.assignment_id == item.assignment_id  # it gets no other work while it holds this
        order.append((item.run_id, item.round_number))
        deliver(worker, item, tmp_path)
        coordinator.advance(item.run_id)
    assert order == [(run_id, number) for number in (1, 2, 3, 4) for run_id in runs]
    assert worker.claim(0) is None


def test_one_task_computes_only_one_round(coordinator: Coordinator, tmp_path: Path) -> None:
    """The next round waits for its turn in the queue, behind other runs."""
    worker = coordinator.worker("a")
    run_id = coordinator.client.create_run(tiny_spec(num_rounds=3)).id
    for closed in range(3):
        coordinator.advance(run_id)
        coordinator.advance(run_id)
        assert coordinator.client.run(run_id).rounds_closed == closed
        item = worker.claim(0)
        assert item is not None
        deliver(worker, item, tmp_path)
    coordinator.advance(run_id)
    assert coordinator.client.run(run_id).outcome == Outcome.COMPLETED


# What the sweep finds


def _waiting(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the ids of the distillation jobs whose messages a sweep sends. The messages are lost."""
    from fedssl_coordinator.aggregator import tasks

    sent: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(tasks, "queue_depths", lambda: dict.fromkeys(QUEUES, 0))
        patch.setattr(tasks.distil, "delay", sent.append)
        patch.setattr(tasks.advance_run, "delay", lambda run_id: None)
        tasks.sweep()
    return sent


def test_a_lost_message_is_sent_again_but_not_at_every_sweep(
    coordinator: Coordinator, tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job may wait for hours behind another: its messages must not pile up meanwhile."""
    run_id, job = _queued(coordinator, tables)
    assert _waiting(monkeypatch) == []  # a worker was notified just now
    tables.execute("UPDATE distillation_jobs SET sent_at = sent_at - interval '11 seconds'")
    assert _waiting(monkeypatch) == [job]
    assert _waiting(monkeypatch) == []
    tables.execute("UPDATE distillation_jobs SET sent_at = NULL")
    coordinator.client.pause(run_id)
    assert _waiting(monkeypatch) == []
    tables.execute("UPDATE distillation_jobs SET state = 'running', started_at = now()")
    assert _waiting(monkeypatch) == [job]  # begun, but no process works on it: it continues in spite of the pause
    tables.execute("UPDATE distillation_jobs SET sent_at = NULL, retry_at = now() + interval '1 minute'")
    assert _waiting(monkeypatch) == []


def test_jobs_are_sent_again_after_the_database_clock_was_set_back(
    coordinator: Coordinator, tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A time that was written before, and is now in the future, must not delay a job for a day."""
    _, job = _queued(coordinator, tables)
    tables.execute("UPDATE distillation_jobs SET sent_at = now() + interval '1 day'")
    assert _waiting(monkeypatch) == [job]
    tables.execute("UPDATE distillation_jobs SET sent_at = NULL, retry_at = now() + interval '1 day'")
    assert _waiting(monkeypatch) == [job]


def test_a_job_that_a_process_works_on_is_not_sent_again(
    coordinator: Coordinator, tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedssl_coordinator.core.db import exclusive
    from fedssl_coordinator.core.models import DistillationJob
    from fedssl_coordinator.federation.jobs.repository import lock_name

    _, job = _queued(coordinator, tables)
    tables.execute("UPDATE distillation_jobs SET state = 'running', started_at = now(), sent_at = NULL")
    with exclusive(lock_name(DistillationJob, UUID(job))) as connection:
        assert connection is not None
        assert _waiting(monkeypatch) == []
        with exclusive(lock_name(DistillationJob, UUID(job))) as second:
            assert second is None
    assert _waiting(monkeypatch) == [job]


def test_the_sweep_leaves_out_a_run_that_distils(coordinator: Coordinator, tables: Tables) -> None:
    from fedssl_coordinator.core.db import transaction
    from fedssl_coordinator.federation.rounds import repository

    run_id, _ = _queued(coordinator, tables)
    with transaction() as session:
        assert repository.needing_attention(session) == []
    coordinator.client.cancel_distillation(_only_job(tables))
    coordinator.client.resume(run_id)
    with transaction() as session:
        assert repository.needing_attention(session) == [run_id]  # its next job is not queued yet


def _queued(coordinator: Coordinator, tables: Tables) -> tuple[UUID, str]:
    """Return a run of FedCA, which distils before its first round, and the id of its job."""
    run_id = coordinator.client.create_run(method_spec("fedca")).id
    coordinator.advance(run_id)
    return run_id, str(_only_job(tables))


def _only_job(tables: Tables) -> UUID:
    found: Any = tables.one("SELECT id FROM distillation_jobs")
    assert isinstance(found, UUID)
    return found


def test_a_cancellation_waits_for_a_job_that_is_publishing_and_finds_it_completed(
    coordinator: Coordinator, tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operator's request is refused because the job is completed, and the run continues."""
    from fedssl.client import Conflict
    from fedssl_coordinator.federation.distillation import service

    run_id, job = _queued(coordinator, tables)
    complete, seen = service.complete, []

    def cancel() -> None:
        try:
            coordinator.client.cancel_distillation(UUID(job))
        except Conflict as error:
            seen.append(str(error))

    canceller = threading.Thread(target=cancel)

    def complete_slowly(*arguments: Any) -> None:
        canceller.start()
        canceller.join(0.5)
        assert canceller.is_alive()  # waits for the run
        complete(*arguments)

    monkeypatch.setattr(service, "complete", complete_slowly)
    coordinator.distil(run_id)
    canceller.join(10)
    assert "is completed" in seen[0]
    assert coordinator.client.run(run_id).state == RunState.RUNNING
