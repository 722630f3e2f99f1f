"""The state machines: every pair of states, allowed or not, on a real database."""

from collections.abc import Callable, Iterator
from enum import StrEnum
from itertools import product
from typing import Any

import pytest
from sqlalchemy import func
from sqlalchemy.orm import Session

from fedssl.protocol.states import AssignmentState, JobState, RoundState, RunState, SiteEvaluationState
from fedssl_coordinator.core.models import Assignment, DistillationJob, Evaluation, Round, Run, SiteEvaluation
from fedssl_coordinator.federation.transitions import TRANSITIONS, IllegalTransition, Row, transition
from support.coordinator import Coordinator
from support.servers import Servers
from support.tables import Tables

DIGEST = "d" * 64
STATES: dict[type[Row], type[StrEnum]] = {
    Run: RunState,
    Round: RoundState,
    Assignment: AssignmentState,
    DistillationJob: JobState,
    Evaluation: JobState,
    SiteEvaluation: SiteEvaluationState,
}
JOBS = (DistillationJob, Evaluation)
PAIRS = [(table, before, after) for table, states in STATES.items() for before, after in product(states, states)]

# What the constraints require of a row in each state.
NEEDS: dict[str, dict[str, Any]] = {
    "finished": {"outcome": "completed"},
    "closed": {"verdict": "aggregated"},
    "accepted": {"update_digest": DIGEST},
    "leased": {"lease_expires_at": func.now()},
    **{ended: {"finished_at": func.now()} for ended in ("completed", "failed", "cancelled")},
    "queued": {"finished_at": None},
}


def _needs(table: type[Row], state: str) -> dict[str, Any]:
    if table is SiteEvaluation:
        ended = {"ended_at": None if state == "offered" else func.now()}
        return ended | ({"counts": {}} if state == "completed" else {})
    results = {"results": {}} if table is Evaluation and state == "completed" else {}
    if (table, state) in ((Run, "running"), (Round, "open")):  # a failed run may also be resumed
        return {"outcome": None} if table is Run else {"verdict": None}
    return NEEDS.get(state, {}) | results


Make = Callable[[type[Row], str], Row]


@pytest.fixture(scope="module")
def database(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tables]:
    store = tmp_path_factory.mktemp("store")
    with servers.database() as url, Coordinator(url, servers.redis_url, store), Tables(url) as tables:
        tables.execute("INSERT INTO artifacts (digest, num_bytes) VALUES (%s, 1)", DIGEST)
        tables.execute("INSERT INTO clients (id) VALUES ('a')")
        tables.execute(
            "INSERT INTO evaluation_datasets (name, digest, num_train, num_test, num_classes, channels, image_size) "
            "VALUES ('held-out', %s, 8, 4, 4, 1, 8)",
            DIGEST,
        )
        yield tables


@pytest.fixture
def session(database: Tables) -> Iterator[Session]:
    from fedssl_coordinator.core.db import _factory

    with _factory()() as opened:
        yield opened


@pytest.fixture
def make(session: Session) -> Make:
    """Return a function that commits a row in a given state, with the rows that it depends on."""

    def make_row(table: type[Row], state: str) -> Row:
        values = {"state": state, **_needs(table, state)}
        run = Run(name="r", method="m", method_version=1, spec={}, num_rounds=1, **_or(table is Run, values, "running"))
        session.add(run)
        session.flush()
        row: Row = run
        if table is DistillationJob:
            row = DistillationJob(run_id=run.id, round_number=1, num_epochs=1, **values)
            session.add(row)
        elif table is Evaluation:
            which = {"model": DIGEST, "dataset": "held-out", "dataset_digest": DIGEST, "config": {}}
            row = Evaluation(run_id=run.id, round_number=1, **which, **values)
            session.add(row)
        elif table is SiteEvaluation:
            row = SiteEvaluation(run_id=run.id, round_number=1, client_id="a", model=DIGEST, **values)
            session.add(row)
        elif table is not Run:
            place = {"run_id": run.id, "number": 1, "broadcast": DIGEST, "deadline": func.now()}
            round_ = Round(**place, **_or(table is Round, values, "open"))
            session.add(round_)
            session.flush()
            row = round_
            if table is Assignment:
                row = Assignment(run_id=run.id, round_id=round_.id, round_number=1, client_id="a", attempt=1, **values)
                session.add(row)
        session.commit()
        session.refresh(row)
        return row

    return make_row


def _or(is_it: bool, values: dict[str, Any], state: str) -> dict[str, Any]:  # noqa: FBT001
    return values if is_it else {"state": state}


def _name(value: object) -> str:
    return getattr(value, "__tablename__", str(value))


def test_the_transition_tables_contain_every_state() -> None:
    assert TRANSITIONS.keys() == STATES.keys()
    for table, states in STATES.items():
        mentioned = {state for pair in TRANSITIONS[table] for state in pair}
        assert mentioned == set(states)


def test_only_the_listed_states_are_final() -> None:
    ends = {
        table: {state for state in states if not any(before == state for before, _ in TRANSITIONS[table])}
        for table, states in STATES.items()
    }
    assert ends == {
        Run: set(),  # a failed run may be resumed, a completed one continued
        Round: set(),  # the failed round of a resumed run is opened again
        Assignment: {"rejected", "expired"},  # an accepted one may be lost or left out, a declined one in a secure sum
        DistillationJob: {"completed", "failed", "cancelled"},
        Evaluation: {"completed"},  # the others may be requested again
        SiteEvaluation: {"completed"},  # the others may be requested again
    }


def test_the_transition_tables_are_immutable() -> None:
    with pytest.raises(TypeError):
        TRANSITIONS[Run] = {}  # type: ignore[index]
    with pytest.raises(TypeError):
        TRANSITIONS[Run]["finished", "running"] = "run.revived"  # type: ignore[index]


@pytest.mark.parametrize(("table", "before", "after"), PAIRS, ids=_name)
def test_every_pair_of_states_is_a_transition_or_refused(
    database: Tables, session: Session, make: Make, table: type[Row], before: Any, after: Any
) -> None:
    row = make(table, before)
    row_id, last = row.id, database.last_event()
    untouched = database.dump()
    needs = _needs(table, after)
    if (before, after) not in TRANSITIONS[table]:
        with pytest.raises(IllegalTransition, match=f"{table.__tablename__}: {before} -> {after}"):
            transition(session, row, after, "why", **needs)
        session.commit()
        assert database.dump() == untouched
        return
    assert transition(session, row, after, "why", data={"more": 1}, **needs)
    assert database.dump() == untouched  # nothing is visible before the commit
    session.commit()
    assert (row.id, row.state) == (row_id, after)  # both are read again
    [event] = database.events_after(last)
    assert (event.kind, event.message) == (TRANSITIONS[table][before, after], "why")
    assert event.run_id == (row.id if isinstance(row, Run) else row.run_id)
    assert event.round_number == (None if table is Run else 1)
    assert event.client_id == ("a" if table in (Assignment, SiteEvaluation) else None)
    assert event.data["more"] == 1
    assert event.data.get("assignment") == (str(row_id) if table is Assignment else None)
    assert event.data.get("job") == (str(row_id) if table is DistillationJob else None)
    assert event.data.get("evaluation") == (str(row_id) if table is Evaluation else None)
    assert event.data.get("site_evaluation") == (str(row_id) if table is SiteEvaluation else None)


LEGAL = [(table, *pair) for table, pairs in TRANSITIONS.items() for pair in pairs]


@pytest.mark.parametrize(("table", "before", "after"), LEGAL, ids=_name)
def test_a_lost_race_changes_nothing(
    database: Tables, session: Session, make: Make, table: type[Row], before: Any, after: Any
) -> None:
    """If another transaction changed the row since it was read, the result is False without an event, and the row
    shows its new state."""
    row = make(table, before)
    others = [state for state in STATES[table] if state not in (before, after)]
    ended = (
        {"failed", "cancelled"}
        if table in JOBS
        else {"refused", "expired"}
        if table is SiteEvaluation
        else {state for state in STATES[table] if state not in NEEDS}
    )
    other = next(state for state in others if state in ended)
    [(changed,)] = database.query(
        {
            Run: "UPDATE runs SET state = %s, outcome = NULL WHERE id = %s RETURNING state",
            Round: "UPDATE rounds SET state = %s, verdict = NULL WHERE id = %s RETURNING state",
            Assignment: "UPDATE assignments SET state = %s WHERE id = %s RETURNING state",
            DistillationJob: "UPDATE distillation_jobs SET state = %s, finished_at = now() WHERE id = %s "
            "RETURNING state",
            Evaluation: "UPDATE evaluations SET state = %s, finished_at = now() WHERE id = %s RETURNING state",
            SiteEvaluation: "UPDATE site_evaluations SET state = %s, ended_at = now() WHERE id = %s RETURNING state",
        }[table],  # type: ignore[arg-type]
        other,
        row.id,
    )
    assert changed == other
    untouched = database.dump()
    assert not transition(session, row, after, "why", **_needs(table, after))
    session.commit()
    assert database.dump() == untouched
    assert row.state == other


def test_a_rollback_undoes_a_transition_and_its_event(database: Tables, session: Session, make: Make) -> None:
    row = make(Run, "running")
    untouched = database.dump()
    assert transition(session, row, RunState.PAUSED, "why")
    session.rollback()
    assert database.dump() == untouched
    assert row.state == "running"


def test_a_detached_row_can_still_make_a_transition(database: Tables, session: Session, make: Make) -> None:
    row = make(Run, "running")
    session.expunge(row)
    assert transition(session, row, RunState.PAUSED, "why")
    session.commit()
    assert database.one("SELECT state FROM runs WHERE id = %s", row.id) == "paused"
