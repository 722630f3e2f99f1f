"""The Celery application. A message names a run or a job to check, never what to do with it.

All tasks are idempotent and read the state from Postgres. There are four queues, and each can be served by any number
of processes: tasks of `aggregate` are short; those of `distill` and `evaluate` may take hours, and have queues of their
own so that they do not delay other runs; those of `notify` wait for servers outside of the federation.
"""

import threading
import time
from datetime import UTC, datetime, timedelta
from typing import Any

from celery import Celery
from celery.schedules import schedule
from celery.signals import worker_shutting_down

from fedssl_coordinator.core.settings import settings

AGGREGATE, DISTILL, EVALUATE, NOTIFY = QUEUES = ("aggregate", "distill", "evaluate", "notify")

_QUEUE_OF = {"fedssl.distil": DISTILL, "fedssl.evaluate": EVALUATE, "fedssl.notify": NOTIFY}

is_stopping = threading.Event()
"""Set once this process was asked to stop: a long task then saves its work and ends at its next epoch."""

_BEGAN, _BEGAN_SECONDS = datetime.now(UTC), time.monotonic()


def _steady_now() -> datetime:
    """Return the time of a clock that never jumps.

    With the machine's clock, beat would wait a day for its next sweep if that clock was set back by a day.
    """
    return _BEGAN + timedelta(seconds=time.monotonic() - _BEGAN_SECONDS)


def _configuration() -> dict[str, Any]:
    """Return Celery's configuration. It is read on first use, so that importing this module needs no settings."""
    return {
        "broker_url": settings().redis_address,
        "task_serializer": "json",
        "accept_content": ["json"],
        "task_ignore_result": True,
        "task_default_queue": AGGREGATE,
        "task_routes": {task: {"queue": queue} for task, queue in _QUEUE_OF.items()},
        # Acknowledged before the task starts, so that a long task never starts twice. The sweep resends lost messages.
        "task_acks_late": False,
        # 0 means no limit. The solo pool fetches no message before the last task has ended.
        "worker_prefetch_multiplier": 0,
        # No commands from other processes: a process waits for them without a timeout, and if Redis is restarted at an
        # unlucky moment, it waits forever and takes no task either.
        "worker_enable_remote_control": False,
        "worker_hijack_root_logger": False,
        "broker_connection_retry_on_startup": True,
        "broker_transport_options": {
            "socket_timeout": 5,
            "socket_connect_timeout": 2,
            "retry_on_timeout": True,
            "max_retries": 0,  # for sending, because a request must not wait for Redis; consumers retry forever
            # A message leaves Redis when it is taken. With acknowledgements, Celery puts unfinished messages back when
            # the connection is lost, and the process ends if that fails. The sweep resends lost messages.
            "ack_emulation": False,
        },
        "beat_schedule": {
            # Without `expires`: a worker whose clock is ahead of beat's would discard every message.
            "sweep": {"task": "fedssl.sweep", "schedule": schedule(settings().sweep_seconds, nowfun=_steady_now)},
            "notify": {"task": "fedssl.notify", "schedule": schedule(settings().notify_seconds, nowfun=_steady_now)},
            "collect": {"task": "fedssl.collect", "schedule": schedule(settings().collect_seconds, nowfun=_steady_now)},
        },
        "beat_scheduler": "fedssl_coordinator.aggregator.beat:Beat",
    }


def queue_of(task: str) -> str:
    """Return the queue of a task."""
    return _QUEUE_OF.get(task, AGGREGATE)


app = Celery("fedssl", include=["fedssl_coordinator.core.telemetry"])
# The processes that run tasks import them: to send a task, beat and the API only need its name.
app.add_defaults(_configuration)


@worker_shutting_down.connect  # type: ignore[untyped-decorator]
def _set_stopping(**_: object) -> None:
    is_stopping.set()
