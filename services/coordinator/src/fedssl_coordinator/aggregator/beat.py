"""Celery's scheduler of periodic tasks, without adding to a queue that no worker serves."""

from typing import Any

import structlog
from celery.beat import Scheduler, SchedulingError

from fedssl_coordinator.core.celery_app import queue_of
from fedssl_coordinator.core.queues import queue_depths

log = structlog.get_logger(__name__)

MOST_WAITING = 1_000
"""The most messages in a queue: half an hour of sweeps, 1 MB. Another one would find nothing that these do not find."""


class Beat(Scheduler):  # type: ignore[misc]
    """Keeps its clock in memory: the default scheduler pickles it to disk, and the sweep does not need that."""

    def apply_entry(self, entry: Any, producer: Any = None) -> None:
        """Send the task that is due, unless its queue holds MOST_WAITING messages. A failure is one line of the log."""
        if queue_depths().get(queue_of(entry.task), MOST_WAITING) >= MOST_WAITING:
            return
        try:
            self.apply_async(entry, producer=producer, advance=False)
        except SchedulingError as error:
            log.warning("redis.unreachable", error=str(error), consequence="the task is sent when it is due again")
