"""Hints through Redis, sent after a commit. Losing one costs time, never truth: beat looks at Postgres anyway."""

import functools
import time
from typing import Any
from uuid import UUID

import redis
import structlog
from kombu.exceptions import OperationalError
from kombu.pools import producers
from sqlalchemy.orm import Session

from fedssl import tracing
from fedssl_coordinator.core.celery_app import QUEUES, app
from fedssl_coordinator.core.db import after_commit
from fedssl_coordinator.core.settings import settings

log = structlog.get_logger(__name__)

WORK_CHANNEL = "fedssl:work"
EVENTS_CHANNEL = "fedssl:events"
_SILENCE_SECONDS = 2.0
_silent_until = 0.0  # after a failure Redis is left alone for a moment, so that requests stay quick while it is down


@functools.lru_cache
def _redis() -> redis.Redis:
    url = settings().redis_url.get_secret_value()
    return redis.Redis.from_url(url, socket_timeout=1, socket_connect_timeout=1)


@functools.lru_cache
def _producers() -> Any:
    """Connections of their own: Celery's may wait for Redis to come back, a request must not."""
    impatient = {"socket_timeout": 1, "socket_connect_timeout": 1, "retry_on_timeout": False}
    return producers[app.connection_for_write(transport_options=impatient)]


def advance(session: Session, run_id: UUID) -> None:
    """After the commit, have an aggregator look at the run."""
    after_commit(session, _send_task, "advance_run", str(run_id))


def distil(session: Session, job_id: UUID) -> None:
    """After the commit, have a worker of the queue `distill` look at the job."""
    after_commit(session, _send_task, "distil", str(job_id))


def evaluate(session: Session, evaluation_id: UUID) -> None:
    """After the commit, have a worker of the queue `evaluate` look at the evaluation."""
    after_commit(session, _send_task, "evaluate", str(evaluation_id))


def wake_workers(session: Session) -> None:
    """After the commit, wake the claims that wait for work."""
    after_commit(session, _publish, WORK_CHANNEL)


def wake_watchers(session: Session) -> None:
    """After the commit, wake the event streams."""
    after_commit(session, _publish, EVENTS_CHANNEL)


def queue_depths() -> dict[str, int]:
    """How many messages wait in each queue; nothing while Redis does not answer."""
    try:
        return {queue: _redis().llen(queue) for queue in QUEUES}
    except redis.RedisError as error:
        log.warning("redis.unreachable", error=type(error).__name__, consequence="how long the queues are is not known")
        return {}


def _publish(channel: str) -> None:
    if time.monotonic() < _silent_until:
        return
    try:
        _redis().publish(channel, "")
    except redis.RedisError as error:
        _fall_silent(error)


def _send_task(name: str, *arguments: str) -> None:
    try:
        with _producers().acquire(block=True) as producer:
            if time.monotonic() < _silent_until:  # asked here: another may have failed while this one waited
                return
            app.send_task(f"fedssl.{name}", args=arguments, retry=False, headers=tracing.carried(), producer=producer)
    except (OperationalError, redis.RedisError, OSError) as error:
        _fall_silent(error)


def _fall_silent(error: Exception) -> None:
    global _silent_until
    _silent_until = time.monotonic() + _SILENCE_SECONDS
    log.warning("redis.unreachable", error=type(error).__name__, consequence="beat will pick the work up")
