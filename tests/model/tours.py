"""Ways through the model on which every kind of step is taken."""

from collections import deque

from model import actions
from model.actions import Step
from model.states import Setup, State, canonical, first


class Tour:
    """The kinds of steps that are left, in one exploration's actions."""

    def __init__(self, setup: Setup, *, is_long: bool) -> None:
        """A kind of step is an action in the states of run, round and job, and if `is_long`, also of the assignment."""
        self.setup = setup
        self._actions = actions.actions(setup)
        self._is_long = is_long
        self._taken: set[tuple[object, ...]] = set()
        self._plan: list[tuple[State, Step]] = []
        self._is_over = False
        self._known: dict[State, list[tuple[Step, State, State]]] = {}

    def __bool__(self) -> bool:
        return not self._is_over

    def next_step(self, state: State) -> Step | None:
        """Return the next step on the way to one that was not taken yet, or None if none can be reached from here."""
        if not self._plan or self._plan[0][0] != state:  # the code went another way than was planned
            self._plan = self._way_to_new(state)
        if not self._plan:
            self._is_over = canonical(state) == canonical(first(self.setup))
            return None
        return self._plan.pop(0)[1]

    def took(self, step: Step, state: State) -> None:
        """Record a step."""
        self._taken.add(self._kind(step, state))

    def after(self, step: Step, state: State) -> list[State]:
        """Return the states that may follow a step. Which of several ways it goes is the code's choice."""
        is_chosen = step.action in ("register", "pause_ends")
        return [
            after
            for action in self._actions
            for other, after in action(state, self.setup)
            if (other == step if is_chosen else other[:2] == step[:2])
        ]

    def is_futile(self, request: Step, state: State) -> bool:
        """Return whether a request belongs to this exploration, and must change nothing now."""
        names = {action.__name__ for action in self._actions}
        return request.action in names and not self.after(request, state)

    def _kind(self, step: Step, state: State) -> tuple[object, ...]:
        current, job = state.round, state.job
        states = (state.run.state, current and current.state, job and job.state)
        if not self._is_long:
            return (step.action, *states)
        who = step.who if step.who is not None and step.who < len(state.members) else None
        member = None if who is None else state.members[who]
        about = member and (member.assignment, member.waits, member.is_revoked)
        return (
            step.action,
            step.detail,
            *states,
            state.run.outcome,
            current and (current.number, current.attempt),
            about,
        )

    def _way_to_new(self, beginning: State) -> list[tuple[State, Step]]:
        """Return a shortest way from here whose last step is new."""
        came_from: dict[State, tuple[State, Step] | None] = {beginning: None}
        seen, waiting = {canonical(beginning)}, deque([beginning])
        while waiting:
            state = waiting.popleft()
            for step, after, same in self._steps(state):
                if self._kind(step, state) not in self._taken:
                    return [*_way(came_from, state), (state, step)]
                if same not in seen:
                    seen.add(same)
                    came_from[after] = (state, step)
                    waiting.append(after)
        return []

    def _steps(self, state: State) -> list[tuple[Step, State, State]]:
        """Return every step from a state, with the next state and its canonical form; each state is worked out once."""
        if state not in self._known:
            self._known[state] = [
                (step, after, canonical(after)) for action in self._actions for step, after in action(state, self.setup)
            ]
        return self._known[state]


def _way(came_from: dict[State, tuple[State, Step] | None], state: State) -> list[tuple[State, Step]]:
    way: list[tuple[State, Step]] = []
    while (before := came_from[state]) is not None:
        way.append(before)
        state = before[0]
    return way[::-1]
