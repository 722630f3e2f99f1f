"""The collector runs while other processes store, submit or register the very bytes that it is about to remove."""

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from fedssl.artifacts.tensors import Tensors
from fedssl.client import ServerError
from fedssl.protocol.states import Outcome
from fedssl_coordinator.aggregator import rounds
from fedssl_coordinator.core.store import store
from fedssl_coordinator.storage.retention import collection
from support.coordinator import Coordinator
from support.data_sets import public_bytes
from support.scenario import Scenario
from support.tables import Tables
from support.uploads import digest

ROUNDS = int(os.environ.get("FEDSSL_TEST_RACES", "8"))
DATA_SETS = 2 * ROUNDS


@contextmanager
def over_and_over(work: Callable[[], object]) -> Iterator[None]:
    """Repeat the work in a thread for the duration of the block."""
    is_over = threading.Event()

    def loop() -> None:
        while not is_over.wait(0.003):
            work()

    with ThreadPoolExecutor(1) as pool:
        looping = pool.submit(loop)
        try:
            yield
        finally:
            is_over.set()
    looping.result()


@pytest.mark.full
def test_updates_with_the_same_bytes_in_every_round_survive_the_collector(
    coordinator: Coordinator, tables: Tables, tmp_path: Path
) -> None:
    """Each client sends the same bytes in every round, so they are alternately superfluous and needed."""
    scenario = Scenario(coordinator, tables, tmp_path, num_rounds=ROUNDS)
    removed: list[int] = []

    def collect() -> None:
        collected = collection.collect()
        assert collected is not None
        removed.append(collected.counts["update"])

    def deliver(name: str, value: float) -> None:
        scenario.claim(name)
        for _ in range(10):
            with suppress(ServerError):  # the collector was faster: the worker sends it again
                scenario.deliver(name, value)
                return

    with over_and_over(collect):
        for _ in range(ROUNDS):
            deliver("a", 1.0)
            deliver("b", 2.0)
            for update in {str(part.update) for part in scenario.round.assignments}:
                assert (coordinator.store / update[:2] / update[2:4] / update).is_file()
            scenario.advance()
    assert scenario.run.outcome == Outcome.COMPLETED
    assert scenario.events("run.stalled") == []
    assert sum(removed) > ROUNDS / 2, "there was hardly a race"


@pytest.mark.full
def test_a_data_set_can_be_registered_after_its_upload_whatever_the_collector_does(
    coordinator: Coordinator, tables: Tables
) -> None:
    """An answer to the operator that the bytes are stored must stay true until they are registered."""
    stored: set[str] = set()
    answers: Counter[int] = Counter()
    with over_and_over(collection.collect), coordinator.http() as http:
        while len(stored) < DATA_SETS or (not (answers[200] and answers[201]) and len(stored) < 20 * DATA_SETS):
            content = public_bytes(seed=len(stored))
            stored.add(name := digest(content))
            http.put(f"/v1/artifacts/{name}", content=content)
            tables.execute("UPDATE artifacts SET touched_at = now() - interval '2 days' WHERE digest = %s", name)
            while (status := http.put(f"/v1/artifacts/{name}", content=content).status_code) == 503:
                answers[status] += 1
            answers[status] += 1
            wanted = {"name": f"scans-{name[:8]}", "digest": name, "split": "train"}
            assert http.post("/v1/public-datasets", json=wanted).status_code == 201
    assert all((coordinator.store / name[:2] / name[2:4] / name).is_file() for name in stored)
    assert tables.one("SELECT count(*) FROM artifacts WHERE collected_at IS NULL") == len(stored)
    assert answers[200] > 0, "the collector was always the first"
    assert answers[201] > 0, "the collector was never the first"


def test_weights_that_are_removed_before_they_are_recorded_are_computed_again(
    coordinator: Coordinator, tables: Tables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The aggregator stores superfluous bytes that were already there, just as the collector begins to remove them."""
    scenario = Scenario(coordinator, tables, tmp_path, num_rounds=1)
    scenario.work("a", value=1.0)
    scenario.work("b", value=2.0)
    put = rounds.put

    def put_and_lose(tensors: Tensors) -> rounds.StoredArtifact:
        stored = put(tensors)
        store().delete(stored.digest)
        return stored

    with monkeypatch.context() as patch:
        patch.setattr(rounds, "put", put_and_lose)
        scenario.advance()
    [stalled] = scenario.events("run.stalled")
    assert "was removed while it was stored: store it again" in stalled.message
    scenario.advance()
    assert scenario.run.outcome is None  # its pause is not over
    tables.execute("UPDATE runs SET retry_at = NULL")
    scenario.advance()
    assert scenario.run.outcome == Outcome.COMPLETED
    assert store().path(str(scenario.run.model)).is_file()
