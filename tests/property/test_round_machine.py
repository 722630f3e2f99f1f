"""Invariants of a run hold whatever workers, operators, aggregators and the clock do, in any order."""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any
from uuid import UUID

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from fedssl.artifacts.tensors import serialised
from fedssl.protocol.states import Cause
from fedssl.protocol.training import CohortConfig
from fedssl.protocol.views import RunCreate, TokenCreate
from fedssl.protocol.work import Decline, Heartbeat, Register, Submit, WorkItem
from support.coordinator import Coordinator
from support.federation import tensors_for, tiny_spec
from support.tables import Tables

COUNTING = ("aggregated", "partial", "skipped")
REFUSALS = {"lease-lost", "round-closed", "duplicate-update", "conflict", "not-found"}
_numbers = itertools.count()


class Killed(BaseException):
    """The aggregator's process ends."""


class RoundMachine(RuleBasedStateMachine):
    """One run, its clients `x` to `z`, and all their possible and impossible requests."""

    def __init__(self, tables: Tables) -> None:
        super().__init__()
        self.tables = tables
        self.items: dict[str, WorkItem] = {}
        self.revoked: set[str] = set()
        self.lost: set[str] = set()
        self.last_event = 0

    @initialize(
        num_clients=st.integers(2, 3),
        num_rounds=st.integers(1, 3),
        min_updates=st.none() | st.integers(1, 3),
        max_attempts=st.integers(1, 3),
        without_quorum=st.sampled_from(["fail", "skip"]),
        fraction=st.sampled_from([1.0, 1.0, 0.5]),
    )
    def create(self, num_clients: int, num_rounds: int, **cohort: Any) -> None:
        from fedssl_coordinator.federation.runs import service as runs
        from fedssl_coordinator.federation.work import service as work
        from fedssl_coordinator.identity.tokens import service as tokens

        example = next(_numbers)
        self.clients = [f"{letter}-{example}" for letter in "xyz"[:num_clients]]
        introduction = Register(worker_version="1", methods={}, device="cpu", num_images=1000, channels=1, image_size=8)
        wanted = CohortConfig(fraction=cohort["fraction"]).num_wanted(num_clients)
        if cohort["min_updates"] is not None:
            cohort["min_updates"] = min(cohort["min_updates"], wanted)
        spec = tiny_spec(num_rounds=num_rounds, cohort={"clients": self.clients, **cohort})
        with self._transaction() as session:
            for client in self.clients:
                tokens.create(session, TokenCreate(role="worker", client_id=client))
                work.register(session, client, introduction)
            self.run_id: UUID = runs.create(session, RunCreate(spec=spec), None).id
        self.cohort = spec.cohort

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[Any]:
        from fedssl_coordinator.core.db import transaction

        with transaction() as session:
            yield session

    def _ask(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result of a call in its own transaction, or None if it is refused for a reason in REFUSALS."""
        from fedssl_coordinator.core.problems import ProblemError

        try:
            with self._transaction() as session:
                return call(session, *arguments)
        except ProblemError as problem:
            if problem.slug not in REFUSALS:
                raise
            return None

    # What workers do

    @rule(who=st.integers(0, 2))
    def claim(self, who: int) -> None:
        from fedssl_coordinator.federation.work import service as work

        client = self.clients[who % len(self.clients)]
        if client not in self.revoked:
            item = self._ask(work.claim, client)
            if item is not None:
                assert item.client_id == client
                self.items[client] = item

    @rule(who=st.integers(0, 2), value=st.floats(-1, 1, width=32), num_examples=st.integers(1, 99))
    def deliver(self, who: int, value: float, num_examples: int) -> None:
        from fedssl_coordinator.federation.work import service as work
        from fedssl_coordinator.storage.artifacts import service as artifacts

        if (held := self._held(who)) is None:
            return
        client, item = held
        with artifacts.store().writer() as writer:
            writer.write(serialised(tensors_for(item.plan.update, value)))
            digest = writer.commit()
        if self._ask(artifacts.permit_upload, item.assignment_id, client, digest) is not None:
            self._ask(_note_upload, item.assignment_id, digest)
        submission = Submit(assignment_id=item.assignment_id, update=digest, num_examples=num_examples)
        if self._ask(work.submit, client, submission) is not None:
            assert self._ask(work.submit, client, submission) is not None  # the same answer again

    @rule(who=st.integers(0, 2))
    def heartbeat(self, who: int) -> None:
        from fedssl_coordinator.federation.work import service as work

        if (held := self._held(who)) is not None:
            self._ask(work.heartbeat, held[0], Heartbeat(assignment_id=held[1].assignment_id))

    @rule(who=st.integers(0, 2), cause=st.none() | st.sampled_from(list(Cause)))
    def decline(self, who: int, cause: Cause | None) -> None:
        from fedssl_coordinator.federation.work import service as work

        if (held := self._held(who)) is not None:
            declined = Decline(assignment_id=held[1].assignment_id, reason="cannot", cause=cause)
            self._ask(work.decline, held[0], declined)

    @rule(who=st.integers(0, 2))
    def interfere(self, who: int) -> None:
        """Submit an update for another client's assignment, which must be refused."""
        from fedssl_coordinator.federation.work import service as work

        if (held := self._held(who)) is not None:
            submission = Submit(assignment_id=held[1].assignment_id, update="0" * 64, num_examples=1)
            for client in self.clients:
                assert client == held[0] or self._ask(work.submit, client, submission) is None

    def _held(self, who: int) -> tuple[str, WorkItem] | None:
        """Return a client and what it claimed last, or None if no client has claimed anything.

        Rules have no precondition for this, because the sample of clients depends on their names.
        """
        if not self.items:
            return None
        client = sorted(self.items)[who % len(self.items)]
        return client, self.items[client]

    # What the store's disk does

    @rule(who=st.integers(0, 2))
    def lose_an_update(self, who: int) -> None:
        """Delete the file of an accepted update before its round is closed."""
        from fedssl_coordinator.core.store import store

        rows = self._query(
            "SELECT update_digest FROM assignments a JOIN rounds n ON n.id = a.round_id WHERE a.run_id = %s "
            "AND a.state = 'accepted' AND n.state <> 'closed' ORDER BY client_id"
        )
        if rows:
            [digest] = rows[who % len(rows)]
            store().delete(digest)
            self.lost.add(digest)

    # What the clock does

    @rule()
    def pass_deadline(self) -> None:
        self.tables.execute(
            "UPDATE rounds SET deadline = now() - interval '1 second' WHERE run_id = %s AND state = 'open'", self.run_id
        )

    @rule()
    def lapse(self) -> None:
        self.tables.execute(
            "UPDATE assignments SET lease_expires_at = now() - interval '1 second' "
            "WHERE run_id = %s AND state = 'leased'",
            self.run_id,
        )

    @rule()
    def pass_pause(self) -> None:
        """End the pause after which a client that declined is asked again."""
        self.tables.execute(
            "UPDATE assignments SET offered_at = now() WHERE run_id = %s AND state = 'offered' AND offered_at > now()",
            self.run_id,
        )

    # What aggregators do

    @rule()
    def advance(self) -> None:
        from fedssl_coordinator.aggregator.tasks import advance_run

        self.tables.execute("UPDATE runs SET retry_at = NULL WHERE id = %s", self.run_id)
        advance_run(str(self.run_id))

    @rule(where=st.sampled_from(["closing.close_round", "closing.end_run", "opening.open_next"]))
    def advance_and_die(self, where: str) -> None:
        def die(*_: object, **__: object) -> None:
            raise Killed

        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Killed):
            patch.setattr(f"fedssl_coordinator.federation.rounds.{where}", die)
            self.advance()

    # What operators do

    @rule(verb=st.sampled_from(["pause", "resume", "resume"]))
    def pause_or_resume(self, verb: str) -> None:
        from fedssl_coordinator.federation.runs import service as runs

        self._ask(runs.change, self.run_id, verb)

    @rule(chance=st.integers(0, 9), who=st.integers(0, 2))
    def stop_or_revoke(self, chance: int, who: int) -> None:
        from fedssl_coordinator.federation.clients import service as clients
        from fedssl_coordinator.federation.runs import service as runs

        if chance == 0:
            self._ask(runs.change, self.run_id, "stop")
        elif chance == 1:
            client = self.clients[who % len(self.clients)]
            self._ask(clients.revoke, client)
            self.revoked.add(client)

    # What stays true

    @invariant()
    def one_round_at_most_is_unclosed_and_their_numbers_have_no_gap(self) -> None:
        rows = self._query("SELECT number, state, verdict FROM rounds WHERE run_id = %s ORDER BY number")
        assert [number for number, *_ in rows] == list(range(1, len(rows) + 1))
        assert all(state == "closed" for _, state, _ in rows[:-1])
        assert all(verdict in COUNTING for *_, verdict in rows[:-1])

    @invariant()
    def rounds_closed_counts_the_rounds_that_count(self) -> None:
        [(rounds_closed, num_rounds)] = self._query("SELECT rounds_closed, num_rounds FROM runs WHERE id = %s")
        counting = self._query("SELECT verdict FROM rounds WHERE run_id = %s AND verdict IS NOT NULL")
        assert rounds_closed == sum(verdict in COUNTING for (verdict,) in counting) <= num_rounds

    @invariant()
    def a_client_counts_once_in_a_round_and_its_update_is_stored(self) -> None:
        from fedssl_coordinator.core.store import store

        rows = self._query(
            "SELECT round_number, client_id, update_digest FROM assignments WHERE run_id = %s AND state = 'accepted'"
        )
        assert len({(number, client) for number, client, _ in rows}) == len(rows)
        assert all(digest in store() or digest in self.lost for *_, digest in rows)

    @invariant()
    def live_work_is_in_an_open_round_of_an_unfinished_run(self) -> None:
        live = self._query(
            "SELECT r.state, n.state FROM assignments a JOIN rounds n ON n.id = a.round_id "
            "JOIN runs r ON r.id = a.run_id WHERE a.run_id = %s AND a.state IN ('offered', 'leased', 'submitted')"
        )
        assert all(run in ("running", "paused") and round_ == "open" for run, round_ in live)

    @invariant()
    def a_finished_run_has_an_end_and_no_open_round(self) -> None:
        [(state, outcome, finished_at)] = self._query("SELECT state, outcome, finished_at FROM runs WHERE id = %s")
        assert (state == "finished") == (outcome is not None) == (finished_at is not None)
        kinds = [kind for (kind,) in self._query("SELECT kind FROM events WHERE run_id = %s ORDER BY id")]
        resumed = self._query(
            "SELECT 1 FROM events WHERE run_id = %s AND kind = 'run.resumed' AND data ->> 'outcome' = 'failed'"
        )
        assert kinds.count("run.finished") == (state == "finished") + len(resumed)
        if state == "finished":
            assert not self._query("SELECT 1 FROM rounds WHERE run_id = %s AND state <> 'closed'")
            last = len(kinds) - kinds[::-1].index("run.finished")
            assert set(kinds[last:]) <= {"assignment.refused", "artifact.refused"}

    @invariant()
    def every_verdict_has_a_reason_for_every_client(self) -> None:
        told = {
            number: data["clients"]
            for number, data in self._query(
                "SELECT round_number, data FROM events WHERE run_id = %s AND kind = 'round.closed' ORDER BY id"
            )
        }
        closed = self._query("SELECT number, verdict, reason FROM rounds WHERE run_id = %s AND state = 'closed'")
        assert told.keys() >= {number for number, *_ in closed}  # a failed round may be open again
        cohorts: dict[int, set[str]] = {}
        for number, client in self._query("SELECT round_number, client_id FROM assignments WHERE run_id = %s"):
            cohorts.setdefault(number, set()).add(client)
        for number, _, reason in closed:
            assert reason
            assert told[number].keys() == cohorts[number]
            assert all(told[number].values())

    @invariant()
    def a_round_with_new_weights_had_its_quorum(self) -> None:
        rows = self._query(
            "SELECT verdict, count(*) FILTER (WHERE a.state = 'accepted'), count(DISTINCT a.client_id) FROM rounds n "
            "JOIN assignments a ON a.round_id = n.id WHERE n.run_id = %s AND verdict IN ('aggregated', 'partial') "
            "GROUP BY n.id"
        )
        for verdict, accepted, members in rows:
            if self.cohort.min_updates is not None:
                assert accepted >= self.cohort.min_updates
            elif not self.revoked:
                assert accepted == members
            assert (verdict == "aggregated") == (accepted == members)

    @invariant()
    def the_log_only_grows(self) -> None:
        newest = self.tables.last_event()
        assert newest >= self.last_event
        self.last_event = newest

    def teardown(self) -> None:
        """Check that the run finishes from any state if its clients behave, unless a client was revoked."""
        if not hasattr(self, "run_id"):
            return
        self.pause_or_resume("resume")
        for _ in range(3 * 3 * 4):
            if self._query("SELECT 1 FROM runs WHERE id = %s AND state = 'finished'"):
                return
            self.advance()
            self.pass_pause()
            for who, _ in enumerate(self.clients):
                self.claim(who)
            for who, client in enumerate(sorted(self.items)):
                if client not in self.revoked:
                    self.deliver(who, 0.5, 5)
        assert self.revoked, "the run does not end"

    def _query(self, statement: Any) -> list[tuple[Any, ...]]:
        return self.tables.query(statement, self.run_id)


def _note_upload(session: Any, assignment_id: UUID, digest: str) -> None:
    from fedssl_coordinator.storage.artifacts import repository

    repository.add(session, digest, 1)
    repository.add_upload(session, assignment_id, digest, 16)


@pytest.mark.full
def test_a_run_keeps_its_invariants_whatever_happens(coordinator: Coordinator) -> None:
    with Tables(coordinator.database_url) as tables:
        run_state_machine_as_test(
            lambda: RoundMachine(tables),
            settings=settings(
                max_examples=15,
                stateful_step_count=30,
                deadline=None,
                suppress_health_check=list(HealthCheck),
                database=None,
                # On a real database every example takes a second, so shrinking a failure takes longer than reading it.
                phases=(Phase.generate,),
            ),
        )
