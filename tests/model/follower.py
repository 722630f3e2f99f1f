"""A follower that takes the model's steps with the code on a real database, and reads the model's state from it."""

import contextlib
from collections.abc import Iterator
from typing import Any
from uuid import UUID, uuid4

from fedssl.artifacts.tensors import serialised
from fedssl.protocol.policy import PolicyNotice
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.states import AssignmentState, JobState, Outcome, RoundState, RunState, Verdict
from fedssl.protocol.views import RunCreate, TokenCreate
from fedssl.protocol.work import Decline, Heartbeat, Register, Submit, WorkItem
from model.actions import Step
from model.processes import Process, die, fail, fail_for_good, publish
from model.states import DISTILLER, Job, Member, Round, Run, Setup, State
from support.federation import tensors_for
from support.tables import Tables

REFUSALS = {"lease-lost", "round-closed", "duplicate-update", "conflict"}
_LATER, _BEFORE = "now() + interval '250 seconds'", "now() - interval '1 second'"
_HOLDS_WEIGHTS = {"artifact": "weights", "methods": ["no-such-method"]}


class Follower:
    """One run, its clients, and the processes that compute for it."""

    def __init__(self, tables: Tables, setup: Setup, spec: RunSpec) -> None:
        """Create the run. `spec` has the setup's cohort, whose clients get new names."""
        from fedssl_coordinator.federation.runs import service as runs
        from fedssl_coordinator.identity.tokens import service as tokens

        self.tables = tables
        self.setup = setup
        self.clients = [f"{letter}-{uuid4().hex[:8]}" for letter in "abc"[: setup.num_clients]]
        self.processes: dict[int, Process] = {}
        self.items: dict[int, WorkItem] = {}
        self.refusing: set[int] = set()
        cohort = spec.cohort.model_copy(update={"clients": tuple(self.clients)})
        with _transaction() as session:
            for client in self.clients:
                tokens.create(session, TokenCreate(role="worker", client_id=client))
            given = RunCreate(spec=spec.model_copy(update={"cohort": cohort}), start=False)
            self.run_id: UUID = runs.create(session, given, None).id
        for index in range(setup.num_clients - setup.num_unregistered):
            self._register(index, refuses=False)

    def __enter__(self) -> "Follower":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            if process.is_running:
                process.order(die)

    # The rows as a state of the model

    def state(self) -> State:
        """Return the state that the rows have. Values that only the model has are the defaults."""
        [(state, outcome, is_prepared, rounds_closed, pauses)] = self._rows(
            "SELECT state, outcome, plan IS NOT NULL, rounds_closed, coalesce(retry_at > now(), false) FROM runs "
            "WHERE id = %s"
        )
        run = Run(RunState(state), Outcome(outcome) if outcome else None, is_prepared, rounds_closed, pauses)
        return State(run, self._round(), self._job(), tuple(self._members()), ())

    def _round(self) -> Round | None:
        rows = self._rows(
            "SELECT number, state, attempt, num_wanted, deadline <= now(), verdict FROM rounds WHERE run_id = %s "
            "ORDER BY number"
        )
        if not rows:
            return None
        number, state, attempt, num_wanted, is_overdue, verdict = rows[-1]
        return Round(number, RoundState(state), attempt, num_wanted, is_overdue, Verdict(verdict) if verdict else None)

    def _job(self) -> Job | None:
        rows = self._rows(
            "SELECT state, round_number, coalesce(retry_at > now(), false) FROM distillation_jobs WHERE run_id = %s "
            "AND state IN ('queued', 'running')"
        )
        return Job(JobState(rows[0][0]), *rows[0][1:]) if rows else None

    def _members(self) -> Iterator[Member]:
        clients = {
            row[0]: row[1:]
            for row in self.tables.query(
                "SELECT id, registered_at IS NOT NULL, revoked_at IS NOT NULL FROM clients WHERE id = ANY(%s)",
                self.clients,
            )
        }
        newest = {
            client: (AssignmentState(state), bool(waits))
            for client, state, waits in self._rows(
                "SELECT client_id, state, CASE state WHEN 'leased' THEN lease_expires_at <= now() WHEN 'offered' THEN "
                "offered_at > now() END FROM assignments a WHERE run_id = %s AND round_number = "
                "(SELECT max(number) FROM rounds WHERE run_id = a.run_id) ORDER BY attempt"
            )
        }
        for index, client in enumerate(self.clients):
            yield Member(*clients[client], index in self.refusing, *newest.get(client, (None, False)))

    # The model's steps

    def take(self, step: Step, before: State) -> None:
        """Take the step in the code, and stop the clock again."""
        who = step.who if step.who is not None else DISTILLER
        getattr(self, step.action)(who, step.detail, before)
        self._stop_clock()

    def start(self, *_: Any) -> None:
        self._change("start")

    def pause(self, *_: Any) -> None:
        self._change("pause")

    def resume(self, *_: Any) -> None:
        self._change("resume")

    def take_up(self, *_: Any) -> None:
        self._change("resume")

    def stop(self, *_: Any) -> None:
        self._change("stop")

    def revoke(self, who: int, *_: Any) -> None:
        from fedssl_coordinator.federation.clients import service

        self._ask(service.revoke, self.clients[who])

    def cancel_job(self, *_: Any) -> None:
        from fedssl_coordinator.federation.distillation import service

        for job_id in self._jobs():
            self._ask(service.cancel, job_id)

    def register(self, who: int, detail: str, *_: Any) -> None:
        self._register(who, refuses=detail == "refusing")

    def claim(self, who: int, _: str, before: State) -> None:
        """Claim, and assert that the item names the newest round that used an update of the client."""
        from fedssl_coordinator.federation.work import service

        if (item := self._ask(service.claim, self.clients[who])) is not None:
            self.items[who] = item
            named = 0 if item.last_accepted is None else item.last_accepted.round_number
            assert named == before.members[who].used, f"client {who} continues from the state of round {named}"

    def heartbeat(self, who: int, *_: Any) -> None:
        from fedssl_coordinator.federation.work import service

        if (item := self.items.get(who)) is not None:
            self._ask(service.heartbeat, self.clients[who], Heartbeat(assignment_id=item.assignment_id))

    def submit(self, who: int, *_: Any) -> None:
        from fedssl_coordinator.federation.work import service
        from fedssl_coordinator.storage.artifacts import service as artifacts

        if (item := self.items.get(who)) is None:
            return
        with artifacts.store().writer() as writer:
            writer.write(serialised(tensors_for(item.plan.update, 0.01 * (who + 1))))
            digest = writer.commit()
        if self._ask(artifacts.permit_upload, item.assignment_id, self.clients[who], digest) is not None:
            self._ask(_record_upload, item.assignment_id, digest)
        self._ask(
            service.submit, self.clients[who], Submit(assignment_id=item.assignment_id, update=digest, num_examples=9)
        )

    def decline(self, who: int, *_: Any) -> None:
        from fedssl_coordinator.federation.work import service

        if (item := self.items.get(who)) is not None:
            self._ask(service.decline, self.clients[who], Decline(assignment_id=item.assignment_id, reason="cannot"))

    def next_step(self, who: int, *_: Any) -> None:
        from fedssl_coordinator.aggregator import tasks

        self.processes[who] = Process(lambda: tasks._advance(self.run_id))

    def sweep(self, who: int, *_: Any) -> None:
        self.next_step(who)

    def read_updates(self, who: int, *_: Any) -> None:
        self.processes[who].order(publish)

    def publish(self, who: int, detail: str, before: State) -> None:
        computation = before.computations[who]
        assert computation is not None
        self.processes[who].order(*[publish] * (1 if computation.has_read else 2))

    def aggregation_fails(self, who: int, *_: Any) -> None:
        self.processes[who].order(fail)

    def aggregation_is_impossible(self, who: int, _: str, before: State) -> None:
        computation = before.computations[who]
        assert computation is not None
        orders = [fail_for_good] if computation.has_read else [publish, fail_for_good]
        self.processes[who].order(*orders)

    def aggregator_dies(self, who: int, *_: Any) -> None:
        self.processes[who].order(die)

    def begin_job(self, *_: Any) -> None:
        from fedssl_coordinator.aggregator import tasks

        for job_id in self._jobs():
            self.processes[DISTILLER] = Process(lambda job_id=job_id: tasks.distil(str(job_id)))  # type: ignore[misc]

    def complete_job(self, *_: Any) -> None:
        self.processes[DISTILLER].order(publish)

    def job_fails(self, *_: Any) -> None:
        self.processes[DISTILLER].order(fail)

    def job_is_impossible(self, *_: Any) -> None:
        self.processes[DISTILLER].order(fail_for_good)

    def distiller_dies(self, *_: Any) -> None:
        self.processes[DISTILLER].order(die)

    def distiller_leaves(self, *_: Any) -> None:
        from fedssl_coordinator.core.models import DistillationJob
        from fedssl_coordinator.federation.jobs import service

        self.distiller_dies()
        for job_id in self._jobs():
            self._ask(service.record_departure, DistillationJob, job_id)

    def lease_ends(self, who: int, *_: Any) -> None:
        self._set(
            "UPDATE assignments SET lease_expires_at = {} WHERE state = 'leased' AND client_id = %s", _BEFORE, who
        )

    def deadline_passes(self, *_: Any) -> None:
        self._execute(f"UPDATE rounds SET deadline = {_BEFORE} WHERE run_id = %s AND state = 'open'")

    def pause_ends(self, who: int, detail: str, *_: Any) -> None:
        if detail:
            table = "runs" if detail == "of the run" else "distillation_jobs"
            column = "id" if detail == "of the run" else "run_id"
            self._execute(f"UPDATE {table} SET retry_at = {_BEFORE} WHERE {column} = %s")
        else:
            self._set("UPDATE assignments SET offered_at = {} WHERE state = 'offered' AND client_id = %s", _BEFORE, who)

    # Details

    def end_forgotten(self, after: State) -> bool:
        """Let a computation continue whose job has ended and that the model has forgotten. It must change nothing.

        Returns whether there is one.
        """
        process = self.processes.get(DISTILLER)
        if after.computations[DISTILLER] is not None or process is None or not process.is_running:
            return False
        process.order(publish)
        return True

    def _register(self, who: int, *, refuses: bool) -> None:
        from fedssl_coordinator.federation.work import service

        notice = PolicyNotice.model_validate({"digest": "0" * 64, "allow": [_HOLDS_WEIGHTS]}) if refuses else None
        introduction = Register(
            worker_version="1", methods={}, device="cpu", num_images=9, channels=1, image_size=8, policy=notice
        )
        self._ask(service.register, self.clients[who], introduction)
        (self.refusing.add if refuses else self.refusing.discard)(who)

    def _change(self, verb: str) -> None:
        from fedssl_coordinator.federation.runs import service

        self._ask(service.change, self.run_id, verb)

    def _ask(self, call: Any, *arguments: Any) -> Any:
        """Return the answer, or None if the request is refused."""
        from fedssl_coordinator.core.problems import ProblemError

        try:
            with _transaction() as session:
                return call(session, *arguments)
        except ProblemError as problem:
            if problem.slug not in REFUSALS:
                raise
            return None

    def _jobs(self) -> list[UUID]:
        """Return the run's newest job in a list, which is empty if the run has no job."""
        rows = self._rows("SELECT id FROM distillation_jobs WHERE run_id = %s ORDER BY created_at")
        return [job_id for (job_id,) in rows[-1:]]

    def _stop_clock(self) -> None:
        """Make every pause last until the model ends it."""
        for table, column in (("runs", "id"), ("distillation_jobs", "run_id")):
            self._execute(f"UPDATE {table} SET retry_at = {_LATER} WHERE {column} = %s AND retry_at > now()")

    def _rows(self, statement: Any) -> list[tuple[Any, ...]]:
        return self.tables.query(statement, self.run_id)

    def _execute(self, statement: Any) -> None:
        self.tables.execute(statement, self.run_id)

    def _set(self, statement: Any, value: str, who: int) -> None:
        self.tables.execute(statement.format(value), self.clients[who])


def _record_upload(session: Any, assignment_id: UUID, digest: str) -> None:
    from fedssl_coordinator.storage.artifacts import repository

    repository.add(session, digest, 1)
    repository.add_upload(session, assignment_id, digest, 16)


@contextlib.contextmanager
def _transaction() -> Iterator[Any]:
    from fedssl_coordinator.core.db import transaction

    with transaction() as session:
        yield session
