"""A worker neither ends nor hangs if a coordinator is broken or malicious, and continues with an honest one."""

import json
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from uuid import uuid4

import pytest
from structlog.testing import capture_logs

from fedssl.backoff import Backoff
from fedssl.client import BadAnswer, ClientError, Retry, UnknownWork, WorkerClient
from fedssl.protocol.work import Submit
from fedssl_worker.agent import Agent, register
from fedssl_worker.backoff import Refused
from support import hostile
from support.tensors import are_equal
from support.waiting import wait_until

from .conftest import CLIENT, INTRODUCTION, WorkerHarness, make_item, make_spec
from .coordinator import TOKEN, FakeCoordinator, Refusal

CALLS: dict[str, Callable[[WorkerClient], object]] = {
    "register": lambda client: client.register(INTRODUCTION),
    "claim": lambda client: client.claim(0),
    "heartbeat": lambda client: client.heartbeat(uuid4()),
    "submit": lambda client: client.submit(Submit(assignment_id=uuid4(), update="0" * 64, num_examples=1)),
    "decline": lambda client: client.decline(uuid4(), "because"),
    "ended-runs": lambda client: client.ended_runs([uuid4()]),
}
ONCE = Retry(seconds=0)


def always(answer: hostile.Answer) -> Callable[[str], Iterable[bytes]]:
    return lambda call: answer()


@pytest.mark.parametrize("call", CALLS)
def test_every_malformed_answer_raises_a_client_error_quickly(coordinator: FakeCoordinator, call: str) -> None:
    answers = {**hostile.MALFORMED, **hostile.REFUSALS, **hostile.WAITS}
    for name, answer in answers.items():
        coordinator.raw = always(answer)
        with WorkerClient(coordinator.url, TOKEN, timeout=2, retry=ONCE) as client:
            began = time.monotonic()
            if name == "no bytes" and call == "claim":  # read as 204
                assert CALLS[call](client) is None
                continue
            with pytest.raises(ClientError) as caught:
                CALLS[call](client)
            assert time.monotonic() - began < 2, name
            assert len(str(caught.value)) < 50_000, name


@pytest.mark.full(but=1)
@pytest.mark.parametrize("name", hostile.slow_answers(0))
def test_an_answer_that_arrives_byte_by_byte_ends_at_the_deadline(coordinator: FakeCoordinator, name: str) -> None:
    coordinator.raw = always(hostile.slow_answers(0.05)[name])
    with WorkerClient(coordinator.url, TOKEN, timeout=0.5, retry=ONCE) as client:
        for call in ("claim", "heartbeat"):
            began = time.monotonic()
            with pytest.raises(ClientError):
                CALLS[call](client)
            assert time.monotonic() - began < 2


@pytest.mark.full
def test_a_slow_answer_that_makes_progress_is_not_interrupted(coordinator: FakeCoordinator) -> None:
    """Half a second without a byte would be too long, but two seconds in total are not."""
    item = make_item(make_spec(), 1).model_dump_json().encode()
    item += b" " * (400_000 - len(item))

    def slowly(call: str) -> Iterable[bytes]:
        yield b"HTTP/1.1 200 OK\r\nContent-Length: 400000\r\n\r\n"
        for start in range(0, len(item), 40_000):
            time.sleep(0.2)
            yield item[start : start + 40_000]

    coordinator.raw = slowly
    with WorkerClient(coordinator.url, TOKEN, timeout=0.5, retry=ONCE) as client:
        assert client.claim(0) is not None


@pytest.mark.parametrize("case", hostile.WORK)
def test_invalid_work_is_declined(harness: WorkerHarness, case: str) -> None:
    work = harness.item(make_spec(), 1)
    hostile_work = hostile.changed_item(work.model_dump_json().encode(), **hostile.WORK[case])
    harness.coordinator.raw = lambda call: hostile.answer(hostile_work)() if call == "claim" else None
    with pytest.raises(UnknownWork):
        harness.client.claim(0)
    harness.restart().step()
    (declined,) = harness.coordinator.declined
    assert declined.assignment_id == work.assignment_id
    assert harness.coordinator.submissions == []


@pytest.mark.full
def test_a_worker_survives_every_malformed_answer_to_a_claim_and_then_works(harness: WorkerHarness) -> None:
    """Claims get the malformed answers one after the other, then an honest coordinator's; the update has the same
    bits."""
    answers = [*hostile.MALFORMED.values(), *hostile.REFUSALS.values(), *hostile.WAITS.values()]
    harness.coordinator.raw = lambda call: answers.pop()() if answers and call == "claim" else None
    harness.offer(make_spec(), 1)
    with running(harness):
        wait_until(lambda: harness.coordinator.submissions, 60)
    assert not answers
    assert are_equal(harness.sent(), harness.train_directly(make_spec(), 1)[0])
    assert set(harness.coordinator.calls) <= {"claim", "PUT artifact", "GET artifact", "submit", "heartbeat"}


@pytest.mark.full(but=1)
@pytest.mark.parametrize("call", ["GET artifact", "PUT artifact", "submit", "heartbeat"])
def test_a_round_survives_malformed_answers_to_each_call(harness: WorkerHarness, call: str) -> None:
    answers = [
        hostile.MALFORMED["lists in lists"],
        hostile.MALFORMED["a page"],
        hostile.MALFORMED["a huge length"],
        hostile.MALFORMED["a redirect"],
        *hostile.REFUSALS.values(),
        *hostile.WAITS.values(),
    ]
    if call in ("GET artifact", "PUT artifact"):  # an artifact with other bytes is declined
        del answers[:3]
    answers.append(hostile.raw_response())
    harness.coordinator.raw = lambda made: answers.pop()() if answers and made == call else None
    harness.offer(make_spec(), 1, lease_seconds=0.2)
    with running(harness):
        wait_until(lambda: harness.coordinator.submissions or harness.coordinator.declined, 60)
        assert harness.coordinator.submissions, harness.coordinator.declined
    assert are_equal(harness.sent(), harness.train_directly(make_spec(), 1)[0])


class running:  # noqa: N801 - reads as what it does
    """The agent in a thread, which must still be alive at the end."""

    def __init__(self, harness: WorkerHarness) -> None:
        self._harness = harness
        self._agent = harness.restart()
        self._ended: list[BaseException] = []
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            self._agent.run()
        except BaseException as error:  # noqa: BLE001 - shown by the test
            self._ended.append(error)

    def __enter__(self) -> Agent:
        self._thread.start()
        return self._agent

    def __exit__(self, *_: object) -> None:
        was_alive = self._thread.is_alive()

        def revoke(call: str) -> None:
            raise Refusal("forbidden", 403, "This client was revoked.")

        self._harness.coordinator.raw = lambda call: None
        self._harness.coordinator.before = revoke
        self._thread.join(20)
        assert was_alive, self._ended
        assert [type(error) for error in self._ended] == [Refused]


@pytest.mark.parametrize("name", ["a proxy's 401", "a proxy's 403", "a proxy's 403 as a problem"])
def test_a_proxys_refusal_is_logged_and_retried(harness: WorkerHarness, name: str) -> None:
    answers = [hostile.REFUSALS[name]] * 3
    harness.coordinator.raw = lambda call: answers.pop()() if answers else None
    with capture_logs() as logs:
        registered = register(harness.client, INTRODUCTION, Backoff(first=0.01, longest=0.02))
        assert registered.client_id == CLIENT
        answers += [hostile.REFUSALS[name]] * 3
        harness.offer(make_spec(), 1)
        with running(harness):
            wait_until(lambda: harness.coordinator.submissions)
    told = [line for line in logs if line["event"] == "coordinator.answer_invalid"]
    assert len(told) == 6
    assert all(line["log_level"] == "error" for line in told)
    assert "a proxy" in told[-1]["todo"]


def test_an_answer_about_another_assignment_is_refused(harness: WorkerHarness) -> None:
    other = json.dumps({"assignment_id": str(uuid4()), "state": "accepted"}).encode()
    harness.coordinator.raw = lambda call: hostile.answer(other)()
    for call in ("submit", "decline"):
        with pytest.raises(BadAnswer, match="answered about"):
            CALLS[call](harness.client)


def test_ended_runs_returns_only_runs_that_were_asked_for(harness: WorkerHarness) -> None:
    asked, other = uuid4(), uuid4()
    body = json.dumps({"run_ids": [str(asked), str(other)]}).encode()
    harness.coordinator.raw = lambda call: hostile.answer(body)()
    assert harness.client.ended_runs([asked]) == {asked}


def test_a_model_larger_than_the_workers_limit_is_declined_before_it_is_fetched(harness: WorkerHarness) -> None:
    harness.offer(make_spec(), 1)
    agent = harness.restart()
    agent._executor._max_artifact_bytes = 1000
    with suppress(ClientError):
        agent.step()
    (declined,) = harness.coordinator.declined
    assert "this worker accepts 1000" in declined.reason
    assert "GET artifact" not in harness.coordinator.calls
