"""The code behaves like the model: runs are led through the model's steps on real Postgres.

Requests that the model does not allow are also made, and must change nothing.
"""

import random
from collections.abc import Iterator
from typing import Any

import pytest

from fedssl.protocol.runs import RunSpec
from fedssl.protocol.states import Outcome
from fedssl_coordinator.federation import retries
from model.actions import Step
from model.follower import Follower
from model.processes import computations_stop
from model.setups import SETUPS
from model.states import DISTILLER, Setup, State, first
from model.tours import Tour
from support import traces
from support.coordinator import Coordinator
from support.federation import tiny_spec
from support.fuzzing import examples
from support.methods import CONFIGS, PUBLIC
from support.tables import Tables

FOLLOWED = tuple(SETUPS) if examples(1) > 1 else ("two clients", "two aggregators", "distilled rounds")
"""The setups that the code follows. `make explore` has all of them."""

NOT_FOLLOWED = frozenset({"losses", "useless updates"})
"""These depend on bytes, as rejections do: `make fault` and the aggregator's own tests have them."""

FUTILE = 0.15
"""The share of requests that the model does not allow."""

_STILL = {"lease_seconds": 86_400, "deadline_seconds": 86_400}
_REQUESTS = tuple(Step(name) for name in ("start", "pause", "resume", "cancel_job", "begin_job"))
_REQUESTS_OF_CLIENTS = ("claim", "heartbeat", "submit", "decline")


@pytest.fixture(autouse=True)
def _stopping() -> Iterator[None]:
    with computations_stop():
        yield


@pytest.fixture
def tables(coordinator: Coordinator) -> Iterator[Tables]:
    with Tables(coordinator.database_url) as looking:
        yield looking


def spec_of(setup: Setup) -> RunSpec:
    """Return a spec with the setup's cohort, whose computations take no time."""
    sections: dict[str, Any] = {"num_rounds": setup.num_rounds, "cohort": {**setup.cohort.model_dump(), **_STILL}}
    if setup.distils_first:
        method = {"name": "fedca", **CONFIGS["fedca"], "num_base_epochs": 1}
        return tiny_spec(**sections, method=method, public_data={**PUBLIC, "num_images": 64})
    if setup.distils_rounds:
        reducer = {**CONFIGS["flesd"]["reducer"], "num_epochs": 1, "num_anchors": 16}
        method = {"name": "flesd", **CONFIGS["flesd"], "reducer": reducer}
        return tiny_spec(**sections, method=method, public_data={**PUBLIC, "num_images": 32})
    return tiny_spec(**sections)


@pytest.mark.full
@pytest.mark.parametrize(
    "name", [name if name == FOLLOWED[0] else pytest.param(name, marks=pytest.mark.full) for name in FOLLOWED]
)
def test_the_code_follows_the_model(name: str, tables: Tables) -> None:
    """Take every action in every state of run, round and job; with `make explore` also of the assignment concerned."""
    most_deaths = getattr(retries, "MOST_DEATHS", 0)
    setup = SETUPS[name]._replace(
        events=SETUPS[name].events - NOT_FOLLOWED, most_deaths=most_deaths, rejects_updates=False
    )
    left, rng = Tour(setup, is_long=examples(1) > 1), random.Random(name)
    while left:
        follow(tables, left, rng)


def follow(tables: Tables, tour: Tour, rng: random.Random) -> None:
    """Take one run through steps that were not taken yet, and compare the rows with the model after each."""
    setup, taken = tour.setup, []
    state = first(setup)
    with Follower(tables, setup, spec_of(setup)) as follower:
        while (step := tour.next_step(state)) is not None:
            futile = [request for request in _requests(state) if tour.is_futile(request, state)]
            if futile and rng.random() < FUTILE:
                step = rng.choice(futile)
            expected = tour.after(step, state) or [state]
            taken.append(str(step))
            follower.take(step, state)
            rows = compared(follower.state())
            found = [after for after in expected if compared(after) == rows]
            assert found, f"after {taken}\nthe rows are {rows}\nand the model has {list(map(compared, expected))}"
            tour.took(step, state, found[0])
            state = found[0]
            if follower.end_forgotten(state):
                assert compared(follower.state()) == rows, f"a computation whose job has ended wrote, after {taken}"
        traces.check(tables, follower.run_id)


def _requests(state: State) -> list[Step]:
    """Return every request that operators, workers and the distiller's queue can make, allowed or not."""
    clients = [index for index, member in enumerate(state.members) if member.is_registered and not member.is_revoked]
    requests = [*_REQUESTS, *(Step(name, who) for name in _REQUESTS_OF_CLIENTS for who in clients)]
    if state.computations[DISTILLER] is not None:  # a second try at its job would replace it in `Follower.processes`
        requests.remove(Step("begin_job"))
    if state.run.outcome is Outcome.FAILED:  # the same request resumes the run, which not every setup allows
        requests.remove(Step("resume"))
    return requests


def compared(state: State) -> tuple[Any, ...]:
    """Return the part of a state that is in the rows."""
    members = tuple(
        member._replace(is_damaged=False, read_by=frozenset(), last_accepted=0, used=0) for member in state.members
    )
    current = state.round
    if current is not None and not state.is_open:
        current = current._replace(is_overdue=False)
    run = state.run._replace(was_tried=False, num_deaths=0)
    job = state.job and state.job._replace(num_deaths=0)
    return run, current, job, members
