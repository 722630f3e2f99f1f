"""An invalid run spec gets a clear error and an event, and changes nothing."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from support.coordinator import Coordinator
from support.federation import TINY
from support.tables import ChangeWatcher

JSON = {"Content-Type": "application/json"}


def _post(coordinator: Coordinator, content: bytes | str, headers: dict[str, str] = JSON) -> httpx.Response:
    with coordinator.http() as http:
        return http.post("/v1/runs", content=content, headers=headers)


def _spec(**changes: Any) -> str:
    return json.dumps({"spec": {**TINY, **changes}, "start": True})


SPECS: dict[str, tuple[dict[str, Any], str, str]] = {
    "unknown method": ({"method": {"name": "fedmagic"}}, "spec.method", "fedalignuniform"),
    "method without a name": ({"method": {}}, "spec.method", "name"),
    "method of the wrong type": ({"method": 7}, "spec.method", "valid"),
    "unknown key": ({"traning": {}}, "spec.traning", "no such key"),
    "unknown nested key": ({"training": {"batchsize": 3}}, "spec.training.batchsize", "no such key"),
    "unknown deep key": (
        {"training": {"optimizer": {"lr": 0.1}}}, "spec.training.optimizer.lr", "no such key",
    ),
    "unknown key in the method": (
        {"method": {"name": "fedsimclr", "temprature": 1}}, "spec.method.fedsimclr.temprature", "no such key",
    ),
    "value below": ({"training": {"batch_size": 1}}, "spec.training.batch_size", "greater than or equal to 2"),
    "value above": ({"num_rounds": 10**9}, "spec.num_rounds", "less than or equal to"),
    "no rounds": ({"num_rounds": 0}, "spec.num_rounds", "greater than or equal to 1"),
    "negative epochs": ({"training": {"local_epochs": -1}}, "spec.training.local_epochs", "greater"),
    "learning rate zero": ({"training": {"optimizer": {"learning_rate": 0}}}, "learning_rate", "greater than 0"),
    "no such optimiser": ({"training": {"optimizer": {"name": "lion"}}}, "optimizer.name", "'sgd'"),
    "no such encoder": ({"model": {"encoder": {"name": "vit"}}}, "spec.model.encoder.name", "'convnet'"),
    "seventeen channels": ({"data": {"channels": 17}}, "spec.data.channels", "16"),
    "a mean for each of two channels": ({"data": {"channels": 1, "mean": [0.1, 0.2]}}, "spec.data", "needs 1 value,"),
    "text for a number": ({"num_rounds": "many"}, "spec.num_rounds", "valid integer"),
    "half a round": ({"num_rounds": 1.5}, "spec.num_rounds", "valid integer"),
    "list for an object": ({"training": []}, "spec.training", "valid dictionary"),
    "null for an object": ({"model": None}, "spec.model", "valid dictionary"),
    "seed too large": ({"seed": 2**63}, "spec.seed", "less than"),
    "seed of 5000 digits": ({"seed": 10**4299}, "spec.seed", "less than"),
    "negative seed": ({"seed": -1}, "spec.seed", "greater"),
    "secure aggregation of what is not a sum": (
        {"method": {"name": "fedu2"}, "secure_aggregation": {}}, "spec", "reducer eua compares each update",
    ),
    "empty name": ({"name": ""}, "spec.name", "a run's name has at most 100 letters"),
    "NUL in the name": ({"name": "a\x00b"}, "spec.name", "a run's name has at most 100 letters"),
    "line break in the name": ({"name": "a\nb"}, "spec.name", "a run's name has at most 100 letters"),
    "right-to-left override in the name": ({"name": "a\u202eb"}, "spec.name", "a run's name has at most 100 letters"),
    "lone surrogate in the name": ({"name": "\ud800"}, "spec.name", "valid string"),
    "NUL where text is free": ({"partition": {"dataset": "a\x00b"}}, "body", "NUL"),
    "lone surrogate where text is free": ({"partition": {"dataset": "\udfff"}}, "body", "incomplete character"),
    "lone surrogate as a key": ({"\ud83d": 1}, "spec", "string"),
    "NUL as a key": ({"\x00": 1}, "spec.\\x00", "no such key"),
    "a very long key": ({"k" * 300_000: 1}, "spec.kkk", "no such key"),
    "no clients": ({"cohort": {"clients": []}}, "spec.cohort", "cohort.clients is empty"),
    "a client twice": ({"cohort": {"clients": ["a", "a"]}}, "spec.cohort", "names a client twice"),
    "more clients than there are": (
        {"cohort": {"clients": ["a"], "min_clients": 2}}, "spec.cohort", "larger than the list",
    ),
    "a client's name in capitals": ({"cohort": {"clients": ["Hospital"]}}, "spec.cohort.clients.0", "at most 63 lower"),
    "a client's name and a line break": ({"cohort": {"clients": ["a\n"]}}, "spec.cohort.clients.0", "at most 63 lower"),
    "nobody sampled": ({"cohort": {"fraction": 0}}, "spec.cohort.fraction", "greater than 0"),
    "no quorum": ({"cohort": {"min_updates": 0}}, "spec.cohort.min_updates", "greater than or equal to 1"),
    "deadline in the past": ({"cohort": {"deadline_seconds": -1}}, "spec.cohort.deadline_seconds", "greater"),
    "lease too short": ({"cohort": {"lease_seconds": 0.1}}, "spec.cohort.lease_seconds", "greater"),
    "method without its projector": (
        {"method": {"name": "fedbyol"}, "model": {"projector": None}}, "spec", "projector",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SPECS)
def test_an_invalid_spec_is_refused_with_the_field_and_the_reason(
    shared_coordinator: Coordinator, change_watcher: ChangeWatcher, case: str
) -> None:
    changes, where, what = SPECS[case]
    with change_watcher.nothing_changes() as events:
        answer = _post(shared_coordinator, _spec(**changes))
    _assert_refused(answer, where, what)
    assert [event.kind for event in events] == ["request.refused"]
    assert where in events[0].message
    assert what in events[0].message


def _assert_refused(answer: httpx.Response, where: str, what: str) -> None:
    assert answer.status_code == 422, answer.text[:500]
    assert answer.headers["content-type"] == "application/problem+json"
    body = answer.json()
    assert (body["type"], body["status"]) == ("urn:fedssl:problem:invalid-request", 422)
    assert "nothing was changed; correct this and send it again" in body["detail"]
    assert where in body["detail"]
    assert any(where in ".".join(error["loc"]) and what in error["msg"] for error in body["errors"]), body["errors"]
    assert len(answer.content) < 20_000


_NUMBERS = ("NaN", "Infinity", "-Infinity", "1e999", "-1e999")


@pytest.mark.parametrize("number", _NUMBERS)
def test_a_number_that_is_not_finite_is_refused(
    shared_coordinator: Coordinator, change_watcher: ChangeWatcher, number: str
) -> None:
    text = '{"spec": {"training": {"optimizer": {"learning_rate": %s}}}}' % number  # noqa: UP031
    with change_watcher.nothing_changes() as events:
        answer = _post(shared_coordinator, text)
    _assert_refused(answer, "spec.training.optimizer.learning_rate", "")
    assert [event.kind for event in events] == ["request.refused"]


BODIES: dict[str, tuple[bytes | str, dict[str, str], str]] = {
    "nothing": (b"", JSON, "is missing"),
    "not JSON": (b"spec: {}", JSON, "is not JSON"),
    "half of it": (_spec()[:-1], JSON, "is not JSON"),
    "an array": (b"[]", JSON, "valid dictionary"),
    "no spec": (b'{"start": true}', JSON, "is missing"),
    "not UTF-8": (b'{"spec": "\xff\xfe"}', JSON, "cannot be read as JSON"),
    "nested deeply": (b'{"spec":' * 100_000, JSON, "cannot be read as JSON"),
    "a deep array": (b"[" * 500_000, JSON, "cannot be read as JSON"),
    "a number of 5000 digits": (b'{"spec": {"seed": ' + b"9" * 5000 + b"}}", JSON, "cannot be read as JSON"),
    "without a content type": (_spec(), {}, "valid dictionary"),
    "as a form": (_spec(), {"Content-Type": "application/x-www-form-urlencoded"}, "valid dictionary"),
}


@pytest.mark.parametrize("case", BODIES)
def test_a_body_without_a_valid_spec_is_refused(
    shared_coordinator: Coordinator, change_watcher: ChangeWatcher, case: str
) -> None:
    content, headers, what = BODIES[case]
    with change_watcher.nothing_changes() as events:
        answer = _post(shared_coordinator, content, headers)
    _assert_refused(answer, "", what)
    assert [event.kind for event in events] == ["request.refused"]


def _announced(coordinator: Coordinator) -> httpx.Response:
    return _post(coordinator, b'{"spec": "' + b"x" * (1 << 20) + b'"}')


def _streamed(coordinator: Coordinator) -> httpx.Response:
    with coordinator.http() as http:
        return http.post("/v1/runs", content=(b"[" * 65536 for _ in range(64)), headers=JSON)


@pytest.mark.parametrize("send", [_announced, _streamed])
def test_a_body_larger_than_a_mebibyte_is_refused(
    shared_coordinator: Coordinator, change_watcher: ChangeWatcher, send: Callable[[Coordinator], httpx.Response]
) -> None:
    with change_watcher.nothing_changes() as events:
        answer = send(shared_coordinator)
    assert answer.status_code == 413
    assert answer.json()["type"] == "urn:fedssl:problem:body-too-large"
    assert answer.json()["detail"] == "at most 1048576 bytes are accepted: send less"
    assert events == []  # refused before the token is checked


def test_a_body_of_nearly_a_mebibyte_is_read(shared_coordinator: Coordinator, change_watcher: ChangeWatcher) -> None:
    with change_watcher.nothing_changes():
        answer = _post(shared_coordinator, _spec(name="x" * 1_000_000))
    _assert_refused(answer, "spec.name", "a run's name has at most 100 letters")


@pytest.mark.parametrize("case", ["not JSON", "nested deeply", "not UTF-8", "nothing", "no spec"])
def test_without_a_valid_token_errors_in_the_body_are_not_reported(
    shared_coordinator: Coordinator, change_watcher: ChangeWatcher, case: str
) -> None:
    """FastAPI reads the body before it checks the token: callers without a token must not fill the audit log."""
    content, headers, _ = BODIES[case]
    with change_watcher.nothing_changes() as events, shared_coordinator.http("fedssl_nonsense") as http:
        answer = http.post("/v1/runs", content=content, headers=headers)
    assert answer.status_code == 401
    assert events == []


def test_all_errors_are_reported_at_once(shared_coordinator: Coordinator, change_watcher: ChangeWatcher) -> None:
    with change_watcher.nothing_changes() as events:
        answer = _post(shared_coordinator, _spec(num_rounds=0, seed=-1, data={"channels": 17, "pixels": 3}))
    places = [".".join(error["loc"]) for error in answer.json()["errors"]]
    assert sorted(places) == ["spec.data.channels", "spec.data.pixels", "spec.num_rounds", "spec.seed"]
    assert all(place in events[0].message for place in places)


def test_hundreds_of_errors_are_shortened(shared_coordinator: Coordinator, change_watcher: ChangeWatcher) -> None:
    with change_watcher.nothing_changes() as events:
        answer = _post(shared_coordinator, _spec(**{f"wrong{i}": i for i in range(500)}))
    assert len(answer.json()["errors"]) == 20
    assert len(events[0].message) <= 2010


def test_an_invalid_idempotency_key_is_refused(shared_coordinator: Coordinator, change_watcher: ChangeWatcher) -> None:
    for key in ("", "a b", "x" * 201, "\xe9"):
        with change_watcher.nothing_changes() as events, shared_coordinator.http() as http:
            answer = http.post("/v1/runs", content=_spec(), headers={**JSON, "Idempotency-Key": key.encode("latin-1")})
        assert answer.status_code == 422, key
        assert [event.kind for event in events] == ["request.refused"]
