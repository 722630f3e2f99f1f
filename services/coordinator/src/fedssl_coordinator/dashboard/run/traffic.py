"""The bytes that a run has moved.

They are sums over all its updates. Those of closed rounds stay as they are, so a process that has added them up once
reads only the newest rounds again: a page does not take longer the more rounds its run has had.
"""

import threading
from typing import NamedTuple, Self
from uuid import UUID

from sqlalchemy import func, select
from sqlalchemy.orm import Session, aliased

from fedssl_coordinator.core.models import Artifact, Assignment, Round, Run, Upload

_MOST_RUNS = 256
_closed: dict[UUID, tuple[int, "Traffic"]] = {}
"""The traffic of the first closed rounds of the runs that were shown last, with the number of these rounds."""
_writing = threading.Lock()


class Traffic(NamedTuple):
    """Bytes on the wire: what clients sent, how often, and what they were given."""

    up: int
    uploads: int
    down: int

    def plus(self, other: Self) -> "Traffic":
        """Return the sum of both."""
        return Traffic(self.up + other.up, self.uploads + other.uploads, self.down + other.down)


def traffic(session: Session, run: Run) -> Traffic:
    """Return the run's traffic.

    It is the updates that arrived, one broadcast per lease that was taken, and the frozen tensors once per client that
    has taken a lease.
    """
    through, before = _closed.get(run.id, (0, Traffic(0, 0, 0)))
    settled = run.rounds_closed - 1  # an update may still arrive while the newest round closes
    if settled > through:
        before = before.plus(_between(session, run, through + 1, settled))
        through = settled
        with _writing:
            while len(_closed) >= _MOST_RUNS:
                del _closed[next(iter(_closed))]
            _closed[run.id] = (through, before)
    return before.plus(_between(session, run, through + 1, run.num_rounds))


def _between(session: Session, run: Run, first: int, last: int) -> Traffic:
    """Return the traffic of some rounds."""
    wanted = (Round.run_id == run.id, Round.number.between(first, last))
    up = (
        select(func.coalesce(func.sum(Artifact.num_bytes), 0), func.count())
        .select_from(Round)
        .join(Assignment, Assignment.round_id == Round.id)
        .join(Upload, Upload.assignment_id == Assignment.id)
        .join(Artifact, Artifact.digest == Upload.digest)
        .where(*wanted)
    )
    down = (
        select(func.coalesce(func.sum(Artifact.num_bytes), 0))
        .select_from(Round)
        .join(Assignment, Assignment.round_id == Round.id)
        .join(Artifact, Artifact.digest == Round.broadcast)
        .where(*wanted, Assignment.leased_at.is_not(None))
    )
    (num_bytes, count), given = session.execute(up).one(), session.scalar(down)
    return Traffic(int(num_bytes), count, int(given or 0) + _frozen_bytes(session, run, first, last))


def _frozen_bytes(session: Session, run: Run, first: int, last: int) -> int:
    """Return the bytes of the frozen tensors for the clients whose first lease is in these rounds."""
    if run.frozen is None:
        return 0
    before = aliased(Assignment)
    had_one = select(before.id).where(
        before.run_id == run.id,
        before.client_id == Assignment.client_id,
        before.round_number < first,
        before.leased_at.is_not(None),
    )
    new_clients = select(func.count(Assignment.client_id.distinct())).where(
        Assignment.run_id == run.id,
        Assignment.round_number.between(first, last),
        Assignment.leased_at.is_not(None),
        ~had_one.exists(),
    )
    size = select(Artifact.num_bytes).where(Artifact.digest == run.frozen)
    return (session.scalar(new_clients) or 0) * (session.scalar(size) or 0)
