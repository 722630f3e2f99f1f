"""The state machines' states. Which change may follow which is the coordinator's table TRANSITIONS."""

from enum import StrEnum


class RunState(StrEnum):
    """created -> running <-> paused -> finished."""

    CREATED = "created"
    RUNNING = "running"
    PAUSED = "paused"
    FINISHED = "finished"


class Outcome(StrEnum):
    """How a finished run ended."""

    COMPLETED = "completed"
    FAILED = "failed"
    STOPPED = "stopped"


class RoundState(StrEnum):
    """open -> aggregating -> (distilling) -> closed; back to open if the store has lost an accepted update."""

    OPEN = "open"
    AGGREGATING = "aggregating"
    DISTILLING = "distilling"
    CLOSED = "closed"


class Verdict(StrEnum):
    """How a round ended."""

    AGGREGATED = "aggregated"
    PARTIAL = "partial"
    SKIPPED = "skipped"
    FAILED = "failed"


WITHOUT_WEIGHTS = (Verdict.SKIPPED, Verdict.FAILED)
"""The verdicts of rounds that put no update into the weights, so that no client's state advances in them."""


class AssignmentState(StrEnum):
    """offered -> leased -> submitted -> accepted | rejected | expired | declined; accepted -> expired if it is lost."""

    OFFERED = "offered"
    LEASED = "leased"
    SUBMITTED = "submitted"
    ACCEPTED = "accepted"
    REJECTED = "rejected"
    EXPIRED = "expired"
    DECLINED = "declined"


class SiteEvaluationState(StrEnum):
    """offered -> completed | refused | expired, of one round's evaluation at one site.

    A request offers one again that was refused or has expired.
    """

    OFFERED = "offered"
    COMPLETED = "completed"
    REFUSED = "refused"
    """The site cannot evaluate, or its data owner's policy refuses."""
    EXPIRED = "expired"
    """The round's weights were removed, or the client was revoked, before the site answered."""


class Cause(StrEnum):
    """The cause of a declined assignment: whose problem it is."""

    CLIENT_DATA = "client-data"
    """Its images do not fit the run, or its data owner's policy refuses."""
    CLIENT_MACHINE = "client-machine"
    """Its machine or installation: too little memory, another version, an unexpected error."""
    COORDINATOR = "coordinator"
    """Something that the coordinator should have provided is missing or damaged."""
    SPEC = "spec"
    """The run's settings: the training diverges, for example."""


class JobState(StrEnum):
    """queued -> running -> completed | failed | cancelled, of distillations and evaluations."""

    QUEUED = "queued"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
