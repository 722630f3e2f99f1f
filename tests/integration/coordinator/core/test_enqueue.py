"""Messages that wake watchers, over a real Redis."""

import time

from redis import Redis

from fedssl_coordinator.core import enqueue
from fedssl_coordinator.core.enqueue import EVENTS_CHANNEL
from fedssl_coordinator.core.settings import settings
from support.coordinator import Coordinator


def test_wake_ups_are_sent_at_once_and_after_the_last_change_but_not_for_each_change(coordinator: Coordinator) -> None:
    with Redis.from_url(settings().redis_address) as redis, redis.pubsub() as subscription:
        subscription.subscribe(EVENTS_CHANNEL)
        assert subscription.get_message(timeout=5) is not None  # the confirmation of the subscription

        def num_messages(seconds: float) -> int:
            end, found = time.monotonic() + seconds, 0
            while (left := end - time.monotonic()) > 0:
                found += subscription.get_message(timeout=left) is not None
            return found

        time.sleep(2 * enqueue._GAP_SECONDS)
        enqueue._publish(EVENTS_CHANNEL)
        assert num_messages(0.2) == 1
        began = time.monotonic()
        for _ in range(200):
            enqueue._publish(EVENTS_CHANNEL)
        gaps = (time.monotonic() - began) / enqueue._GAP_SECONDS
        assert 2 <= num_messages(0.3) <= 2 + gaps
