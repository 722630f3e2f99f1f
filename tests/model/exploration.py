"""Explores every state that the actions can reach, and stores the way to each."""

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from model.actions import Action, Step, Violation
from model.states import Setup, State, canonical, first

Check = Callable[[State, State, Setup], None]
"""Raise Violation if a step (before, after) must not happen, or if its second state must not exist."""


@dataclass(frozen=True)
class Explored:
    """Every reachable state, each with the step by which it was first found."""

    setup: Setup
    found: dict[State, tuple[State, Step] | None]
    num_steps: int
    sources: dict[Action, dict[int, list[int]]]
    """By action and state, the states from which the action leads there; a state's number is its place in `found`."""

    def path(self, state: State) -> list[str]:
        """Return the steps of a shortest way to a state."""
        return _path(self.found, state)

    def states_without_way(self, actions: Iterable[Action], is_goal: Callable[[State], bool]) -> Iterator[State]:
        """Yield the states from which these actions cannot reach a goal, those nearest to the beginning first."""
        sources = [self.sources[action] for action in actions]
        can = {number for number, state in enumerate(self.found) if is_goal(state)}
        waiting = list(can)
        while waiting:
            number = waiting.pop()
            for state in itertools.chain.from_iterable(each.get(number, ()) for each in sources):
                if state not in can:
                    can.add(state)
                    waiting.append(state)
        yield from (state for number, state in enumerate(self.found) if number not in can)


def explore(setup: Setup, actions: Iterable[Action], check: Check) -> Explored:
    """Return every state that the actions reach. Raises Violation with the steps that lead to one."""
    actions = tuple(actions)
    beginning = canonical(first(setup))
    found: dict[State, tuple[State, Step] | None] = {beginning: None}
    numbers = {beginning: 0}
    sources: dict[Action, dict[int, list[int]]] = {action: {} for action in actions}
    waiting = deque([beginning])
    num_steps = 0
    while waiting:
        state = waiting.popleft()
        number = numbers[state]
        try:
            for action in actions:
                step = Step(action.__name__)
                for step, after in action(state, setup):
                    num_steps += 1
                    check(state, after, setup)
                    after = canonical(after)
                    reached = numbers.setdefault(after, len(numbers))
                    if reached == len(found):
                        found[after] = (state, step)
                        waiting.append(after)
                    sources[action].setdefault(reached, []).append(number)
        except Violation as violation:
            steps = "\n".join([*_path(found, state), f"then {step}: {violation}"])
            raise Violation(f"{violation}, after\n{steps}\nin {state}") from violation
    return Explored(setup, found, num_steps, sources)


def _path(found: dict[State, tuple[State, Step] | None], state: State) -> list[str]:
    steps: list[str] = []
    while (came_from := found[state]) is not None:
        state, step = came_from
        steps.append(str(step))
    return steps[::-1]
