"""Messages that wake watchers and aggregators, over a real Redis."""

import json
import time
from base64 import b64decode
from uuid import uuid4

from redis import Redis

from fedssl_coordinator.core import enqueue
from fedssl_coordinator.core.celery_app import QUEUES
from fedssl_coordinator.core.db import transaction
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


def test_each_request_is_one_task_of_its_queue_after_the_commit_and_none_without(coordinator: Coordinator) -> None:
    run, job, evaluation = uuid4(), uuid4(), uuid4()

    def tasks(redis: Redis) -> list[tuple[str, str, list[str]]]:
        messages = [(queue, json.loads(text)) for queue in QUEUES for text in redis.lrange(queue, 0, -1)[::-1]]
        redis.delete(*QUEUES)
        return [(queue, each["headers"]["task"], json.loads(b64decode(each["body"]))[0]) for queue, each in messages]

    with Redis.from_url(settings().redis_address) as redis:
        for is_committed in (False, True):
            tasks(redis)
            with transaction() as session:
                enqueue.advance(session, run)
                enqueue.begin_mean(session, run)
                enqueue.compute_plan(session, "digest")
                enqueue.collect(session)
                enqueue.distil(session, job)
                enqueue.evaluate(session, evaluation)
                enqueue.notify(session)
                if not is_committed:
                    session.rollback()
                assert tasks(redis) == []
        found = tasks(redis)
    assert sorted(found) == sorted(
        [
            ("aggregate", "fedssl.advance_run", [str(run)]),
            ("aggregate", "fedssl.begin_mean", [str(run)]),
            ("aggregate", "fedssl.compute_plan", ["digest"]),
            ("aggregate", "fedssl.collect", []),
            ("distill", "fedssl.distil", [str(job)]),
            ("evaluate", "fedssl.evaluate", [str(evaluation)]),
            ("notify", "fedssl.notify", []),
        ]
    )
