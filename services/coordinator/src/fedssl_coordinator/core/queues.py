"""This process's connection to Redis, and how many messages wait there. Imports no database: beat has none."""

import functools

import redis
import structlog

from fedssl_coordinator.core.celery_app import QUEUES
from fedssl_coordinator.core.settings import settings

log = structlog.get_logger(__name__)


@functools.lru_cache
def redis_connection() -> redis.Redis:
    """Return the process's connection to Redis, which waits for a second at most."""
    url = settings().redis_address
    return redis.Redis.from_url(url, socket_timeout=1, socket_connect_timeout=1)


def queue_depths() -> dict[str, int]:
    """Return how many messages wait in each queue, or an empty dict if Redis does not answer."""
    try:
        return {queue: redis_connection().llen(queue) for queue in QUEUES}
    except redis.RedisError as error:
        log.warning("redis.unreachable", error=type(error).__name__, consequence="queue lengths are unknown")
        return {}
