"""The fast path for the ordinary case of a request gives the same answers, rows and events as the service.

The same requests are sent to one coordinator several times, from the same initial state: once with the ordinary
case, and once without it, so that the service decides every case.
"""

import importlib
import itertools
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from fedssl.protocol.measures import MEASURES
from support.coordinator import Coordinator
from support.fuzzing import examples
from support.scripted import Request, ScriptedFederation, comparable, differences
from support.servers import Servers
from support.tables import Tables

PLACES = (
    *(f"federation.work.ordinary.{name}" for name in ("claim", "heartbeat", "permit", "accept")),
    "storage.artifacts.service.worker_that_may_fetch",
)
PROGRESS = {"phase": "training", "epoch": 1, "num_epochs": 2, "step": 3, "num_steps": 4, "loss": 0.5}
CLAIMS: list[Request] = [("claim", "a", {}), ("claim", "b", {})]
DELIVERED_BY_B: Request = ("deliver", "b", {"value": 1.0})

ROUND: list[Request] = [
    *CLAIMS,
    ("heartbeat", "a", {"progress": PROGRESS}),
    ("fetch", "a", "broadcast"),
    ("deliver", "a", {"value": 1.0}),
    ("deliver", "a", {"value": 1.0}),
    DELIVERED_BY_B,
    ("advance", "a", {}),
    *CLAIMS,
]

SLOW = settings(
    deadline=None,
    suppress_health_check=list(HealthCheck),
    database=None,
    phases=(Phase.explicit, Phase.generate),  # shrinking a failure takes longer than reading it
)

names = st.sampled_from("ab")
whose = st.sampled_from(["a", "b", ""])  # the client of the assignment; empty for an unknown assignment
submissions = st.fixed_dictionaries(
    {"value": st.sampled_from([1.0, 1.0, 1.0, 2.0])},
    optional={
        "num_examples": st.sampled_from([1, 10, 1000, 1001]),
        "metrics": st.sampled_from([{}, {"loss": -0.0, "a/b": 1e30}, {MEASURES[0]: 1.0}]),
        "of": whose,
        "announced": st.just("0" * 64),
    },
)
heartbeats = st.fixed_dictionaries(
    {},
    optional={
        "progress": st.just(PROGRESS),
        "resources": st.just({"memory_bytes": 7}),
        "of": whose,
        "state_lost": st.just({"round_number": 1, "reason": "missing"}),
    },
)
plain = st.just({})
artifacts = st.sampled_from(["broadcast", "update"])


def _of(what: str, how: st.SearchStrategy[Any] = plain) -> st.SearchStrategy[Request]:
    return st.tuples(st.just(what), names, how)


workers_requests = st.one_of(
    _of("claim"),
    _of("claim"),
    _of("deliver", submissions),
    _of("deliver", submissions),
    _of("heartbeat", heartbeats),
    _of("upload", submissions),
    _of("submit", submissions),
    _of("fetch", artifacts),
    _of("decline"),
)
others = st.sampled_from(
    ["advance", "advance", "lapse", "pass_deadline", "pause", "resume", "stop", "revoke", "exclude"]
)
requests = st.one_of(*[workers_requests] * 3, st.tuples(others, names, plain))

# Each takes effect in one transaction, except a delivery, which is also checked before its bytes are read.
CONCERNING_A: list[Request] = [
    ("deliver", "a", {"value": 1.0}),
    ("deliver", "a", {"value": 2.0}),
    ("deliver", "b", {"value": 1.0}),
    ("heartbeat", "a", {"progress": PROGRESS}),
    ("claim", "a", {}),
    ("decline", "a", {}),
    ("advance", "a", {}),
    ("pause", "a", {}),
    ("stop", "a", {}),
    ("revoke", "a", {}),
    ("exclude", "a", {}),
]
ORDINARY = [request for request in CONCERNING_A if request[0] in ("deliver", "heartbeat", "claim")]
BEFORE: list[list[Request]] = [
    CLAIMS[1:],
    CLAIMS,
    [*CLAIMS, DELIVERED_BY_B],
    [*CLAIMS, ("let_lapse", "a", {})],
    [*CLAIMS, DELIVERED_BY_B, ("let_deadline_pass", "a", {})],
]


@pytest.fixture(scope="module")
def running(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Coordinator, Tables]]:
    store = tmp_path_factory.mktemp("ordinary") / "store"
    with servers.database() as url, Coordinator(url, servers.redis_url, store) as coordinator, Tables(url) as tables:
        yield coordinator, tables


@pytest.fixture
def advanced(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list that collects the id of a run whenever an aggregator would be asked to advance it. None is
    advanced."""
    found: list[Any] = []
    monkeypatch.setattr("fedssl_coordinator.core.enqueue.advance", lambda _, run_id: found.append(run_id))
    return found


@contextmanager
def _begun(running: tuple[Coordinator, Tables], *, is_ordinary: bool = False) -> Iterator[ScriptedFederation]:
    federation = ScriptedFederation(*running)
    try:
        with pytest.MonkeyPatch.context() as patch:
            for place in PLACES if not is_ordinary else ():
                patch.setattr(f"fedssl_coordinator.{place}", lambda *_: None)
            yield federation
    finally:
        federation.close()


@contextmanager
def _used() -> Iterator[set[str]]:
    """Yield a set that collects the places that used an ordinary case during the block."""
    used: set[str] = set()

    def noting(place: str, original: Any) -> Any:
        def call(*given: Any) -> Any:
            found = original(*given)
            if found is not None and found[-1:] != (None,):
                used.add(place)
            return found

        return call

    with pytest.MonkeyPatch.context() as patch:
        for place in PLACES:
            module, name = f"fedssl_coordinator.{place}".rsplit(".", 1)
            patch.setattr(f"{module}.{name}", noting(place, getattr(importlib.import_module(module), name)))
        yield used


@pytest.mark.full
def test_ordinary_requests_give_the_same_answers_rows_and_events_as_the_service(
    running: tuple[Coordinator, Tables], advanced: list[Any]
) -> None:
    def carried_out(script: Sequence[Request], *, is_ordinary: bool) -> list[Any]:
        with _begun(running, is_ordinary=is_ordinary) as federation:
            steps = []
            for request in script:
                federation.age()
                advanced.clear()
                steps.append([federation.send(request), len(advanced), federation.rows()])
            return comparable([steps, federation.events()])  # type: ignore[no-any-return]

    @settings(SLOW, max_examples=examples(8))
    @example(first=ROUND, script=[])
    @given(first=st.sampled_from([[], CLAIMS, CLAIMS, ROUND]), script=st.lists(requests, min_size=4, max_size=12))
    def one(first: list[Request], script: list[Request]) -> None:
        whole = [*first, *script]
        expected, found = (carried_out(whole, is_ordinary=is_ordinary) for is_ordinary in (False, True))
        for request, before, after in itertools.zip_longest(whole, expected[0], found[0]):
            assert after == before, [request, *differences(before, after)]
        assert found[1] == expected[1]

    with _used() as used:
        one()
    assert used == set(PLACES)


@pytest.mark.full
def test_two_simultaneous_requests_have_the_same_outcome_as_in_some_order(
    running: tuple[Coordinator, Tables], advanced: list[Any]
) -> None:
    def outcome(before: list[Request], pair: list[Request], *, is_raced: bool) -> dict[str, Any]:
        with _begun(running, is_ordinary=is_raced) as federation:
            for request in before:
                assert federation.send(request)[1] in (200, 201, None), request
            federation.age()
            advanced.clear()
            if is_raced:
                with ThreadPoolExecutor(2) as pool:
                    answers = list(pool.map(federation.send, pair))
            else:
                answers = [federation.send(request) for request in pair]
            events = sorted(map(_without_the_place_of_a_refusal, federation.events()), key=_subject)
            whole = {"advanced": len(advanced), **federation.rows(), "events": events}
            return {**comparable(whole), "answers": sorted(map(_summary, answers))}

    cases = list(itertools.product(BEFORE, ORDINARY, CONCERNING_A))
    for before, x, y in random.Random(16).sample(cases, min(len(cases), examples(12))):
        allowed = [outcome(before, pair, is_raced=False) for pair in ([x, y], [y, x])]
        found = outcome(before, [x, y], is_raced=True)
        assert found in allowed, [before, x, y, *[list(differences(each, found)) for each in allowed]]


def _without_the_place_of_a_refusal(event: dict[str, Any]) -> dict[str, Any]:
    """Return the event. If it is a refusal, only its subject is kept.

    A delivery may be refused before its bytes are read or afterwards, with different messages.
    """
    is_refusal = event["kind"].endswith((".refused", ".foreign"))
    return {**event, "kind": "refused", "message": "", "data": {}} if is_refusal else event


def _subject(event: dict[str, Any]) -> tuple[str, str]:
    """Return the key by which events are sorted: only those with the same key keep their order.

    A claim, for instance, does not wait for the pause of a run. So it may be recorded after the pause, although it
    began before.
    """
    return event["kind"].split(".")[0], event["client_id"] or ""


def _summary(answer: list[Any]) -> list[Any]:
    what, status, *rest = answer
    is_refusal = isinstance(status, int) and status >= 400
    return [what, str(status), rest[0]["type"] if is_refusal else ""]
