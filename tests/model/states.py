"""The states of the model: one run with its newest round, its clients' newest assignments, and its job.

An assignment that has ended and has a successor changes nothing any more, nor does a closed round or an ended job, so
the model keeps only the newest of each. Times become flags: whether a deadline, a lease or a pause is over.
"""

from typing import Any, NamedTuple

from fedssl.protocol.states import AssignmentState, JobState, Outcome, RoundState, RunState, Verdict
from fedssl.protocol.training import CohortConfig

LIVE = frozenset({AssignmentState.OFFERED, AssignmentState.LEASED, AssignmentState.SUBMITTED})
NEW_WEIGHTS = frozenset({Verdict.AGGREGATED, Verdict.PARTIAL})
DISTILLER = 0
"""The computation of the distiller. The aggregators' are 1, 2, ..."""


class Setup(NamedTuple):
    """The subject of one exploration: the run's spec, and which events of the outside world may happen."""

    num_clients: int
    num_rounds: int
    cohort: CohortConfig
    distils_rounds: bool = False
    distils_first: bool = False
    num_aggregators: int = 1
    num_unregistered: int = 0
    most_deaths: int = 2
    """The number of deadly tries after which a computation is quarantined. The code's is larger."""

    rejects_updates: bool = True
    """Any accepted updates but not all may be rejected by name when the new weights are published."""

    events: frozenset[str] = frozenset()
    """Names of optional actions: see `actions.OPTIONAL`."""


class Run(NamedTuple):
    """The row of `runs`.

    `pauses`: `retry_at` is in the future. `was_tried`: `num_tries` is not 0. `num_deaths`: how many of the last tries
    ended their process.
    """

    state: RunState = RunState.CREATED
    outcome: Outcome | None = None
    is_prepared: bool = False
    rounds_closed: int = 0
    pauses: bool = False
    was_tried: bool = False
    num_deaths: int = 0

    def without_tries(self, **values: Any) -> "Run":
        """Forget the tries, as `retries.reset` does, and set other values."""
        return self._replace(**{"pauses": False, "was_tried": False, "num_deaths": 0, **values})


class Round(NamedTuple):
    """The row of the newest round in `rounds`."""

    number: int
    state: RoundState
    attempt: int = 1
    num_wanted: int | None = None
    is_overdue: bool = False
    verdict: Verdict | None = None


class Job(NamedTuple):
    """The row of the unfinished distillation job."""

    state: JobState
    round_number: int
    pauses: bool = False
    num_deaths: int = 0


class Member(NamedTuple):
    """A client, and the row of its newest assignment in the newest round.

    `waits`: the lease has run out, or the offer begins after a pause. `read_by`: the computations that use its update.
    `last_accepted` is the round that its next work item names, and `used` the newest round whose weights contain its
    update: a client's state is right only if they are equal.
    """

    is_registered: bool = True
    is_revoked: bool = False
    refuses: bool = False
    assignment: AssignmentState | None = None
    waits: bool = False
    is_damaged: bool = False
    read_by: frozenset[int] = frozenset()
    last_accepted: int = 0
    used: int = 0

    @property
    def is_live(self) -> bool:
        return self.assignment in LIVE

    @property
    def is_accepted(self) -> bool:
        return self.assignment is AssignmentState.ACCEPTED

    @property
    def is_eligible(self) -> bool:
        return self.is_registered and not self.is_revoked


class Computation(NamedTuple):
    """The work of a process, outside of every transaction. `round_number` is 0 for the first weights."""

    round_number: int
    has_read: bool


class State(NamedTuple):
    """Everything that the actions depend on."""

    run: Run
    round: Round | None
    job: Job | None
    members: tuple[Member, ...]
    computations: tuple[Computation | None, ...]
    """The distiller's first, then each aggregator's."""

    @property
    def unclosed(self) -> Round | None:
        return None if self.round is None or self.round.state is RoundState.CLOSED else self.round

    @property
    def is_open(self) -> bool:
        return self.round is not None and self.round.state is RoundState.OPEN

    @property
    def accepted(self) -> frozenset[int]:
        return frozenset(index for index, member in enumerate(self.members) if member.is_accepted)

    @property
    def has_enough(self) -> bool:
        """True if the round has as many updates as it needs from a larger cohort."""
        wanted = None if self.round is None else self.round.num_wanted
        return wanted is not None and len(self.accepted) >= wanted

    def with_member(self, index: int, member: Member) -> "State":
        return self._replace(members=(*self.members[:index], member, *self.members[index + 1 :]))

    def with_computation(self, process: int, computation: Computation | None) -> "State":
        """Return the state after a process has begun or ended a computation."""
        before, after = self.computations[:process], self.computations[process + 1 :]
        members = tuple(member._replace(read_by=member.read_by - {process}) for member in self.members)
        return self._replace(computations=(*before, computation, *after), members=members)

    def reads(self, process: int) -> "State":
        """Return the state after a process has read which updates are accepted."""
        members = tuple(
            member._replace(read_by=member.read_by | {process}) if member.is_accepted else member
            for member in self.members
        )
        return self._replace(members=members)


def first(setup: Setup) -> State:
    """Return the state after the run's creation."""
    registered = setup.num_clients - setup.num_unregistered
    members = (Member(),) * registered + (Member(is_registered=False),) * setup.num_unregistered
    return State(Run(), None, None, members, (None,) * (1 + setup.num_aggregators))


def canonical(state: State) -> State:
    """Return the state with its clients in a fixed order, because states that differ only in that order are equal."""
    return state._replace(members=tuple(sorted(state.members, key=_order)))


def _order(member: Member) -> tuple[object, ...]:
    return (*member[:3], member.assignment or "", *member[4:6], sorted(member.read_by), *member[7:])
