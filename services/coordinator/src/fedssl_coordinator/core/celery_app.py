"""Celery: a message says "look at this run" or "at this job", never what to do. All tasks are idempotent and re-read
Postgres.

Three queues, each served by as many processes as it needs: `aggregate` moves runs on and is quick; `distill` and
`evaluate` hold what may take hours, so that it holds up nobody else.
"""

import threading
import time
from datetime import UTC, datetime, timedelta
from typing import Any

from celery import Celery
from celery.schedules import schedule
from celery.signals import worker_shutting_down

from fedssl_coordinator.core.settings import settings

AGGREGATE, DISTILL, EVALUATE = QUEUES = ("aggregate", "distill", "evaluate")

is_stopping = threading.Event()
"""Set once this process was asked to end: a long task saves its work and leaves at its next epoch."""


_BEGAN, _BEGAN_SECONDS = datetime.now(UTC), time.monotonic()


def _steady_now() -> datetime:
    """A clock that never jumps: beat would wait a day for its next sweep if the machine's were put back by one."""
    return _BEGAN + timedelta(seconds=time.monotonic() - _BEGAN_SECONDS)


def _configuration() -> dict[str, Any]:
    """Read when Celery first needs it: importing this module needs no settings."""
    return {
        "broker_url": settings().redis_url.get_secret_value(),
        "task_serializer": "json",
        "accept_content": ["json"],
        "task_ignore_result": True,
        "task_default_queue": AGGREGATE,
        "task_routes": {"fedssl.distil": {"queue": DISTILL}, "fedssl.evaluate": {"queue": EVALUATE}},
        # A lost message is re-sent by the sweep, so none is kept unacknowledged: a long task is never started twice.
        "task_acks_late": False,
        # No limit: it would count a message whose acknowledgement Redis did not take as one in hand, for ever, and the
        # process would take no other. A message is not fetched before the last one's task has ended: the pool is solo.
        "worker_prefetch_multiplier": 0,
        "worker_hijack_root_logger": False,
        "broker_connection_retry_on_startup": True,
        "broker_transport_options": {
            "socket_timeout": 5,
            "socket_connect_timeout": 2,
            "retry_on_timeout": True,
            "max_retries": 0,  # for sending: a request must not wait for Redis to come back. Consumers try on for ever.
        },
        "beat_schedule": {
            # Without `expires`: whose clock is ahead of beat's would drop every one.
            "sweep": {"task": "fedssl.sweep", "schedule": schedule(settings().sweep_seconds, nowfun=_steady_now)},
            "collect": {"task": "fedssl.collect", "schedule": schedule(settings().collect_seconds, nowfun=_steady_now)},
        },
        "beat_scheduler": "fedssl_coordinator.aggregator.beat:Beat",
    }


app = Celery("fedssl", include=["fedssl_coordinator.aggregator.tasks", "fedssl_coordinator.core.telemetry"])
app.add_defaults(_configuration)


@worker_shutting_down.connect  # type: ignore[untyped-decorator]
def _note_stop(**_: object) -> None:
    is_stopping.set()
