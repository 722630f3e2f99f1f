"""Every state that a run can reach, whatever happens, and what must be true of each."""

import functools
from collections.abc import Callable, Iterable

import pytest

from fedssl.protocol.states import Outcome
from fedssl_coordinator.core import models as tables
from fedssl_coordinator.federation.transitions import TRANSITIONS
from model import actions, properties
from model.actions import Action, Violation
from model.exploration import Explored, explore
from model.setups import LARGER, SETUPS
from model.states import Setup, State
from support.fuzzing import examples

pytestmark = pytest.mark.full


NEVER_TAKEN = {
    (tables.Assignment, "offered", "declined"),  # a worker claims before it declines
    (tables.Assignment, "submitted", "rejected"),  # submitted and accepted are set in one transaction
    (tables.Assignment, "submitted", "expired"),
    (tables.Assignment, "declined", "submitted"),  # only in secure rounds, which the model does not have
}
"""The transitions that the code's table allows and no transaction of the model makes."""

_SETUPS = {**SETUPS, **LARGER} if examples(1) > 1 else SETUPS


@functools.cache
def explored(name: str) -> Explored:
    setup = _SETUPS[name]
    return explore(setup, actions.actions(setup), properties.check)


@pytest.mark.parametrize("name", _SETUPS)
def test_no_step_breaks_a_promise(name: str) -> None:
    """In particular nothing accepted is lost, no client counts twice, and an end is final. `properties.check` has
    them all."""
    found = explored(name)
    assert found.num_steps > len(found.found) > 100


@pytest.mark.parametrize("name", _SETUPS)
def test_healthy_parts_bring_every_run_to_an_end(name: str) -> None:
    """This holds from every state without a message, a lease or a deadline, only with sweeps and regular actions."""
    found = explored(name)
    assert _stuck(found, actions.HEALTHY, lambda state: _is_over_or_waits(state, found.setup)) == []


@pytest.mark.parametrize("name", _SETUPS)
def test_a_run_whose_clients_are_healthy_completes(name: str) -> None:
    found = explored(name)

    def is_excused(state: State) -> bool:
        return properties.has_ended(state) or properties.is_hopeless(state, found.setup)

    assert _stuck(found, actions.HEALTHY, lambda state: state.run.outcome is Outcome.COMPLETED, but=is_excused) == []


@pytest.mark.parametrize("name", _SETUPS)
def test_a_run_without_any_active_client_ends_after_some_time(name: str) -> None:
    found = explored(name)
    without_clients = [action for action in actions.HEALTHY if action not in (actions.claim, actions.submit)]
    goal = functools.partial(_is_over_or_waits, setup=found.setup)
    assert _stuck(found, [*without_clients, *actions.TIME], goal) == []


def test_the_model_takes_every_transition_of_the_code() -> None:
    """A new transition of the code fails this test until the model has an action for it."""
    for name in SETUPS:
        explored(name)
    legal = {(table, *map(str, change)) for table, changes in TRANSITIONS.items() for change in changes}
    evaluations = (tables.Evaluation, tables.SiteEvaluation)  # no run waits for them
    legal = {change for change in legal if change[0] not in evaluations}
    assert legal - actions.taken == NEVER_TAKEN


@pytest.mark.parametrize(
    ("broken", "by", "name"),
    [
        ("_is_still_due", lambda *_: True, "two aggregators"),
        ("_end_job", lambda state, after: state._replace(job=None), "distilled rounds"),
        ("_checked_member", lambda member, offer_again: actions._offered(member), "two clients"),
    ],
)
def test_a_planted_bug_is_found(broken: str, by: object, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bugs: an aggregator publishes what is no longer due, an ended job may still publish, and a client is asked
    twice."""
    monkeypatch.setattr(actions, broken, by)
    with pytest.raises(Violation, match="after"):
        explore(SETUPS[name], actions.actions(SETUPS[name]), properties.check)


def test_a_planted_lack_of_progress_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug is a sweep that does not find failed computations whose pause has ended."""
    real = actions.needs_attention
    monkeypatch.setattr(actions, "needs_attention", lambda state: real(state) and state.unclosed is None)
    setup = SETUPS["two clients"]
    found = explore(setup, actions.actions(setup), properties.check)
    assert _stuck(found, actions.HEALTHY, lambda state: _is_over_or_waits(state, setup)) != []


def _is_over_or_waits(state: State, setup: Setup) -> bool:
    return properties.has_ended(state) or properties.waits_for_clients(state, setup)


def _stuck(
    found: Explored,
    healthy: Iterable[Action],
    is_goal: Callable[[State], bool],
    but: Callable[[State], bool] = lambda state: False,
) -> list[str]:
    """Return the way to a state from which no goal can be reached, if there is one that is not excused."""
    for state in found.states_without_way(healthy, is_goal):
        if not but(state):
            return [*found.path(state), f"in {state}"]
    return []
