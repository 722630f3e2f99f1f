"""Ways through the model on which every kind of step is taken."""

from collections import Counter, deque
from typing import NamedTuple

from model import actions
from model.actions import Step
from model.states import Setup, State, canonical, first

_OF_CLIENTS = frozenset(
    {"register", "claim", "heartbeat", "submit", "decline", "revoke", "lease_ends", "pause_ends", "update_is_damaged"}
)
"""The actions whose steps are about a client. The others' `who` is a process."""

_MOST_PLANS = 100
"""The number of plans for one kind of step after which it is assumed that the code never takes it."""


class _Edge(NamedTuple):
    """A step from one state: its action and kind, and the number of the state that follows."""

    action: str
    kind: int
    after: int


class Tour:
    """A way through the model that takes the kinds of steps of an exploration that have not been taken yet."""

    def __init__(self, setup: Setup, *, is_long: bool) -> None:
        """Begin a tour, in which a kind of step is an action in the states of run, round and job.

        If `is_long`, it is an action in the states of run, round, job and assignment, with the states that follow.
        """
        self.setup = setup
        self._actions = actions.actions(setup)
        self._is_long = is_long
        self._is_over = False
        self._taken: set[int] = set()
        self._plan: list[tuple[int, _Edge]] = []
        self._num_plans: Counter[int] = Counter()
        # Kinds and states have numbers, because a search compares millions of them. Each state's edges are computed
        # only once. States that differ only in the order of their clients are equal.
        self._kinds: dict[tuple[object, ...], int] = {}
        self._numbers: dict[State, int] = {}
        self._states: list[State] = []
        self._edges: dict[int, list[_Edge]] = {}

    def __bool__(self) -> bool:
        return not self._is_over

    def next_step(self, state: State) -> Step | None:
        """Return the next step on the way to a kind not taken yet, or None if none can be reached from here."""
        here = self._number(state)
        if not self._plan or self._plan[0][0] != here:  # the code took another way than the planned one
            self._plan = self._way_to_new(here)
            self._count_plan()
        if not self._plan:
            self._is_over = here == self._number(first(self.setup))
            return None
        _, edge = self._plan.pop(0)
        return next(step for step, after in self._steps(state) if self._edge(step, state, after) == edge)

    def took(self, step: Step, state: State, after: State) -> None:
        """Record a step from a state to another."""
        self._taken.add(self._edge(step, state, after).kind)

    def after(self, step: Step, state: State) -> list[State]:
        """Return the states that may follow a step. The code chooses between several outcomes."""
        is_chosen = step.action in ("register", "pause_ends")
        return [after for other, after in self._steps(state) if (other == step if is_chosen else other[:2] == step[:2])]

    def is_futile(self, request: Step, state: State) -> bool:
        """Return whether a request belongs to this exploration, and must change nothing now."""
        names = {action.__name__ for action in self._actions}
        return request.action in names and not self.after(request, state)

    def _count_plan(self) -> None:
        """Raise AssertionError if the code never takes the kind of step that a new plan ends with."""
        if self._plan:
            kind = self._plan[-1][1].kind
            self._num_plans[kind] += 1
            if self._num_plans[kind] > _MOST_PLANS:
                raise AssertionError(f"the model has a kind of step that the code never takes: {[*self._kinds][kind]}")

    def _steps(self, state: State) -> list[tuple[Step, State]]:
        return [found for action in self._actions for found in action(state, self.setup)]

    def _number(self, state: State) -> int:
        same = canonical(state)
        number = self._numbers.setdefault(same, len(self._states))
        if number == len(self._states):
            self._states.append(same)
        return number

    def _edge(self, step: Step, state: State, after: State) -> _Edge:
        kind: tuple[object, ...] = (step.action, *_states(state))
        if self._is_long:
            kind = (step.action, *_details(step, state), *_details(step, after))
        return _Edge(step.action, self._kinds.setdefault(kind, len(self._kinds)), self._number(after))

    def _edges_of(self, number: int) -> list[_Edge]:
        if number not in self._edges:
            state = self._states[number]
            edges = (self._edge(step, state, after) for step, after in self._steps(state))
            self._edges[number] = list(dict.fromkeys(edges))
        return self._edges[number]

    def _way_to_new(self, beginning: int) -> list[tuple[int, _Edge]]:
        """Return a shortest way from here whose last step is new."""
        came_from: dict[int, tuple[int, _Edge] | None] = {beginning: None}
        waiting = deque([beginning])
        while waiting:
            number = waiting.popleft()
            for edge in self._edges_of(number):
                if edge.kind not in self._taken:
                    return [*_way(came_from, number), (number, edge)]
                if edge.after not in came_from:
                    came_from[edge.after] = (number, edge)
                    waiting.append(edge.after)
        return []


def _states(state: State) -> tuple[object, ...]:
    return state.run.state, state.round and state.round.state, state.job and state.job.state


def _details(step: Step, state: State) -> tuple[object, ...]:
    """Return what a long tour distinguishes of a state before or after a step."""
    member = None if step.who is None or step.action not in _OF_CLIENTS else state.members[step.who]
    return (
        *_states(state),
        state.run.outcome,
        state.round and (state.round.number, state.round.attempt),
        member and (member.assignment, member.waits, member.is_revoked),
    )


def _way(came_from: dict[int, tuple[int, _Edge] | None], number: int) -> list[tuple[int, _Edge]]:
    way: list[tuple[int, _Edge]] = []
    while (before := came_from[number]) is not None:
        way.append(before)
        number = before[0]
    return way[::-1]
