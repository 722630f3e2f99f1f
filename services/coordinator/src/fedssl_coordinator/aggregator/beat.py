"""The clock: Celery's, which adds nothing to a queue that nobody serves."""

from typing import Any

from celery.beat import Scheduler

from fedssl_coordinator.core.celery_app import AGGREGATE
from fedssl_coordinator.core.enqueue import queue_depths

MOST_WAITING = 1_000
"""Messages: half an hour of sweeps, 1 MB. A sweep behind so many would find nothing that one of them does not."""


class Beat(Scheduler):  # type: ignore[misc]
    """In memory: the default scheduler keeps its clock in a pickle on disk, and the sweep needs no memory."""

    def apply_entry(self, entry: Any, producer: Any = None) -> None:
        """Send what is due, unless its queue has grown long."""
        if queue_depths().get(AGGREGATE, 0) < MOST_WAITING:
            super().apply_entry(entry, producer)
