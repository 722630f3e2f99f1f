"""One Redis subscription per process, shared by all long polls and event streams."""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator, Coroutine, Iterator

import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from fedssl_coordinator.core.enqueue import EVENTS_CHANNEL, WORK_CHANNEL

log = structlog.get_logger(__name__)

_RETRY_SECONDS = 1.0
_CANCEL_SECONDS = 0.2


@contextlib.asynccontextmanager
async def in_background(work: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Run `work` in a task for the length of the block, then cancel the task and wait for its end."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        while not task.done():  # redis-py loses a cancellation that comes while it connects
            task.cancel()
            await asyncio.wait([task], timeout=_CANCEL_SECONDS)
        with contextlib.suppress(asyncio.CancelledError):
            await task


class Listener:
    """Waits for the next wake-up on one channel."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def wake(self) -> None:
        self._event.set()

    async def wait(self, timeout_seconds: float) -> bool:
        """Return True on a wake-up since the last call, or False after the timeout."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._event.wait(), timeout_seconds)
        is_woken = self._event.is_set()
        self._event.clear()
        return is_woken


class Wakeups:
    """Forwards Redis messages to listeners. While Redis is down, listeners only have their timeouts."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._listeners: defaultdict[str, set[Listener]] = defaultdict(set)

    @contextlib.contextmanager
    def listen(self, channel: str) -> Iterator[Listener]:
        """Yield a listener that is woken by every message published from now on."""
        listener = Listener()
        self._listeners[channel].add(listener)
        try:
            yield listener
        finally:
            self._listeners[channel].discard(listener)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Maintain the subscription for the length of the block."""
        async with in_background(self._subscribe()):
            yield

    async def _subscribe(self) -> None:
        while True:
            try:
                await self._forward()
            except (RedisError, OSError) as error:
                log.warning("redis.unreachable", error=type(error).__name__, consequence="waiting by polling")
            await asyncio.sleep(_RETRY_SECONDS)

    async def _forward(self) -> None:
        async with Redis.from_url(self._url, health_check_interval=15) as redis, redis.pubsub() as subscription:
            await subscription.subscribe(WORK_CHANNEL, EVENTS_CHANNEL)
            while True:
                message = await subscription.get_message(ignore_subscribe_messages=True, timeout=5)
                if message is not None:
                    for listener in list(self._listeners[message["channel"].decode()]):
                        listener.wake()
