"""Notifications through Redis, sent after a commit. A lost one only costs time, because beat checks Postgres anyway."""

import functools
import threading
import time
from typing import Any
from uuid import UUID

import redis
import structlog
from kombu.exceptions import OperationalError
from kombu.pools import producers
from sqlalchemy.orm import Session

from fedssl import tracing
from fedssl_coordinator.core.celery_app import app
from fedssl_coordinator.core.db import after_commit
from fedssl_coordinator.core.queues import redis_connection

log = structlog.get_logger(__name__)

WORK_CHANNEL = "fedssl:work"
EVENTS_CHANNEL = "fedssl:events"
_SILENCE_SECONDS = 2.0
_GAP_SECONDS = 0.05  # between two messages of one channel
_published_at: dict[str, float] = {}  # when each channel's last message was sent, or its next one will be
_silent_until = 0.0  # after a failure nothing is sent for a moment, so that requests stay fast while Redis is down


@functools.lru_cache
def _producers() -> Any:
    """Return connections with short timeouts: Celery's own may wait for Redis, but a request must not."""
    impatient = {"socket_timeout": 1, "socket_connect_timeout": 1, "retry_on_timeout": False}
    return producers[app.connection_for_write(transport_options=impatient)]


def advance(session: Session, run_id: UUID) -> None:
    """Enqueue a check of the run by an aggregator, after the commit."""
    after_commit(session, _send_task, "advance_run", str(run_id))


def begin_mean(session: Session, run_id: UUID) -> None:
    """Enqueue the addition of the accepted updates of the run's round to their mean, after the commit."""
    after_commit(session, _send_task, "begin_mean", str(run_id))


def distil(session: Session, job_id: UUID) -> None:
    """Enqueue a check of the job in the queue `distill`, after the commit."""
    after_commit(session, _send_task, "distil", str(job_id))


def evaluate(session: Session, evaluation_id: UUID) -> None:
    """Enqueue a check of the evaluation in the queue `evaluate`, after the commit."""
    after_commit(session, _send_task, "evaluate", str(evaluation_id))


def compute_plan(session: Session, digest: str) -> None:
    """Enqueue the computation of the plan of the spec with this digest, after the commit."""
    after_commit(session, _send_task, "compute_plan", digest)


def collect(session: Session) -> None:
    """Enqueue the removal of artifacts that nothing needs any more, after the commit."""
    after_commit(session, _send_task, "collect")


def notify(session: Session) -> None:
    """Enqueue the delivery of notifications that are due, after the commit."""
    after_commit(session, _send_task, "notify")


def wake_workers(session: Session) -> None:
    """Wake the claims that wait for work after the commit."""
    after_commit(session, _publish, WORK_CHANNEL)


def wake_watchers(session: Session) -> None:
    """Wake the event streams after the commit."""
    after_commit(session, _publish, EVENTS_CHANNEL)


def wake_watchers_now() -> None:
    """Wake the event streams, after a statement that was a transaction by itself."""
    _publish(EVENTS_CHANNEL)


def _publish(channel: str) -> None:
    """Wake the listeners of a channel: now, or at the end of a gap if they were woken just before.

    Under load each update wakes the watchers twice, and each message costs every API process a turn. Two threads at
    once may send one message too many, but never one too few.
    """
    now, last = time.monotonic(), _published_at.get(channel, 0.0)
    if last > now:
        return  # a message is about to be sent
    if last + _GAP_SECONDS <= now:
        _published_at[channel] = now
        _publish_now(channel)
        return
    _published_at[channel] = last + _GAP_SECONDS
    timer = threading.Timer(last + _GAP_SECONDS - now, _publish_now, [channel])
    timer.daemon = True
    timer.start()


def _publish_now(channel: str) -> None:
    if time.monotonic() < _silent_until:
        return
    try:
        redis_connection().publish(channel, "")
    except redis.RedisError as error:
        _pause_sending(error)


def _send_task(name: str, *arguments: str) -> None:
    try:
        with _producers().acquire(block=True) as producer:
            if time.monotonic() < _silent_until:  # checked again: another send may have failed during the wait
                return
            app.send_task(f"fedssl.{name}", args=arguments, retry=False, headers=tracing.carried(), producer=producer)
    except (OperationalError, redis.RedisError, OSError) as error:
        _pause_sending(error)


def _pause_sending(error: Exception) -> None:
    global _silent_until
    _silent_until = time.monotonic() + _SILENCE_SECONDS
    log.warning("redis.unreachable", error=type(error).__name__, consequence="beat will pick the work up")
