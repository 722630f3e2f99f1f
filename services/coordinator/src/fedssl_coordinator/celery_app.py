"""Celery: a message says "look at this run", never what to do. All tasks are idempotent and re-read Postgres."""

from typing import Any

from celery import Celery

from fedssl_coordinator.settings import settings


def _configuration() -> dict[str, Any]:
    """Read when Celery first needs it: importing this module needs no settings."""
    return {
        "broker_url": settings().redis_url.get_secret_value(),
        "task_serializer": "json",
        "accept_content": ["json"],
        "task_ignore_result": True,
        "task_default_queue": "aggregate",
        # A lost message is re-sent by the sweep, so none is kept unacknowledged: a long task is never started twice.
        "task_acks_late": False,
        "worker_prefetch_multiplier": 1,
        "worker_hijack_root_logger": False,
        "broker_connection_retry_on_startup": True,
        "broker_transport_options": {
            "socket_timeout": 5,
            "socket_connect_timeout": 2,
            "retry_on_timeout": True,
            "max_retries": 0,  # for sending: a request must not wait for Redis to come back. Consumers try on for ever.
        },
        "beat_schedule": {
            "sweep": {
                "task": "fedssl.sweep",
                "schedule": settings().sweep_seconds,
                # Behind a long aggregation sweeps must not pile up.
                "options": {"expires": settings().sweep_seconds * 2},
            }
        },
        # In memory: the default scheduler keeps its clock in a pickle on disk, and the sweep needs no memory.
        "beat_scheduler": "celery.beat:Scheduler",
    }


app = Celery("fedssl", include=["fedssl_coordinator.tasks"])
app.add_defaults(_configuration)
