"""An upload that is not what the plan declares gets a clear error and an event, and changes nothing."""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import httpx
import pytest
import torch

from fedssl.artifacts.header import max_file_bytes
from fedssl.artifacts.tensors import Tensors
from fedssl.protocol.views import EventView
from fedssl.protocol.work import WorkItem
from support.coordinator import Coordinator
from support.federation import tensors_for, tiny_spec
from support.tables import ChangeWatcher
from support.uploads import build_file, digest, raw_request, safetensors_bytes, split_file


@dataclass(frozen=True)
class Uploader:
    """A worker with a lease, and the file that it should upload."""

    coordinator: Coordinator
    token: str
    item: WorkItem

    @property
    def tensors(self) -> Tensors:
        return tensors_for(self.item.plan.update, 1.0)

    def put(
        self,
        content: Any,
        *,
        name: str | None = None,
        assignment: object = None,
        headers: dict[str, str] | None = None,
        token: str | None = None,
    ) -> httpx.Response:
        params = {"assignment": str(assignment or self.item.assignment_id)}
        path = f"/v1/artifacts/{name or digest(content)}"
        with self.coordinator.http(token or self.token) as http:
            return http.put(path, params=params, content=content, headers=headers)


@pytest.fixture(scope="module")
def uploader(shared_coordinator: Coordinator) -> Iterator[Uploader]:
    with shared_coordinator.worker("a") as worker:
        run = shared_coordinator.client.create_run(tiny_spec(cohort={"clients": ["a"], "lease_seconds": 3600}))
        shared_coordinator.advance(run.id)
        item = worker.claim(0)
        assert item is not None
        yield Uploader(shared_coordinator, shared_coordinator.worker_token("a"), item)


def _assert_refused(
    uploader: Uploader, answer: httpx.Response, events: list[EventView], status: int, slug: str, what: str
) -> None:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["type"] == f"urn:fedssl:problem:{slug}"
    assert what in answer.json()["detail"]
    [event] = events
    assert (event.kind, event.run_id, event.client_id, event.round_number) == (
        "artifact.refused",
        uploader.item.run_id,
        "a",
        1,
    )
    assert event.message == answer.json()["detail"]


def _first(tensors: Tensors) -> str:
    return next(name for name in sorted(tensors) if tensors[name].is_floating_point() and tensors[name].ndim > 1)


def _undeclared(t: Tensors) -> Tensors:
    return {**t, "secret.images": torch.zeros(1)}


def _missing(t: Tensors) -> Tensors:
    return {name: t[name] for name in sorted(t)[1:]}


def _renamed(t: Tensors) -> Tensors:
    return {("x" if name == _first(t) else name): tensor for name, tensor in t.items()}


def _misshapen(t: Tensors) -> Tensors:
    return {**t, _first(t): t[_first(t)].transpose(0, 1)}


def _flattened(t: Tensors) -> Tensors:
    return {**t, _first(t): t[_first(t)].flatten()}


def _halved(t: Tensors) -> Tensors:
    return {**t, _first(t): t[_first(t)].half()}


def _doubled(t: Tensors) -> Tensors:
    return {name: tensor.double() for name, tensor in t.items()}


def _as_integers(t: Tensors) -> Tensors:
    return {**t, _first(t): t[_first(t)].int()}


def _with(value: float) -> Callable[[Tensors], Tensors]:
    def change(t: Tensors) -> Tensors:
        spoilt = t[_first(t)].clone()
        spoilt.view(-1)[-1] = value
        return {**t, _first(t): spoilt}

    return change


TENSORS: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "an undeclared tensor": (_undeclared, "not declared: secret.images"),
    "a missing tensor": (_missing, "missing: encoder"),
    "a renamed tensor": (_renamed, "missing: encoder"),
    "a misshapen tensor": (_misshapen, "declared F32["),
    "a flat tensor": (_flattened, "declared F32["),
    "half precision": (_halved, "is F16["),
    "whole numbers": (_as_integers, "is I32["),
    "double precision": (_doubled, "is F64["),
    "nothing at all": (lambda t: {}, "missing: encoder"),
    "NaN": (_with(float("nan")), "holds NaN or infinity: training diverged"),
    "infinity": (_with(float("inf")), "holds NaN or infinity: training diverged"),
    "minus infinity": (_with(float("-inf")), "holds NaN or infinity: training diverged"),
}


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_that_differ_from_the_plan_are_refused(
    uploader: Uploader, change_watcher: ChangeWatcher, case: str
) -> None:
    change, what = TENSORS[case]
    with change_watcher.nothing_changes() as events:
        answer = uploader.put(safetensors_bytes(change(uploader.tensors)))
    _assert_refused(uploader, answer, events, 422, "artifact-rejected", what)


def test_a_file_larger_than_the_plan_allows_is_refused(uploader: Uploader, change_watcher: ChangeWatcher) -> None:
    size = max_file_bytes(uploader.item.plan.update) + 1
    with change_watcher.nothing_changes() as events:
        answer = uploader.put(b"\0" * size)
    _assert_refused(uploader, answer, events, 413, "artifact-too-large", f"{size} bytes announced")


def _shifted(entries: dict[str, Any], name: str, by: int) -> dict[str, Any]:
    start, stop = entries[name]["data_offsets"]
    return {**entries, name: {**entries[name], "data_offsets": [start + by, stop + by]}}


def _last(entries: dict[str, Any]) -> str:
    return max(entries, key=lambda name: int(entries[name]["data_offsets"][1]))


def _entry_with(entries: dict[str, Any], **changes: Any) -> dict[str, Any]:
    name = _last(entries)
    return {**entries, name: {**entries[name], **changes}}


HEADERS: dict[str, tuple[Callable[[dict[str, Any], bytes], bytes], str]] = {
    "an overlap": (lambda h, b: build_file(_shifted(h, _last(h), -8), b), "leave a gap or overlap"),
    "a gap": (lambda h, b: build_file(_shifted(h, _last(h), 8), b + bytes(8)), "leave a gap or overlap"),
    "negative offsets": (
        lambda h, b: build_file(_entry_with(h, data_offsets=[-8, 0]), b), "must be two byte positions",
    ),
    "offsets turned round": (
        lambda h, b: build_file(_entry_with(h, data_offsets=h[_last(h)]["data_offsets"][::-1]), b),
        "span another size",
    ),
    "huge offsets": (
        lambda h, b: build_file(_entry_with(h, data_offsets=[0, 2**63]), b), "must be two byte positions",
    ),
    "offsets with a point": (
        lambda h, b: build_file(_entry_with(h, data_offsets=[0.0, 8.0]), b), "must be two byte positions",
    ),
    "minus zero": (
        lambda h, b: build_file(json.dumps(h).replace("[0, ", "[-0, ", 1), b), "cannot be read",
    ),
    "a negative size": (lambda h, b: build_file(_entry_with(h, shape=[-1]), b), "none negative"),
    "sizes whose product overflows": (
        lambda h, b: build_file(_entry_with(h, shape=[2**62, 2**62]), b), "more bytes than can be addressed",
    ),
    "a truth for a size": (lambda h, b: build_file(_entry_with(h, shape=[True]), b), "none negative"),
    "nine dimensions": (lambda h, b: build_file(_entry_with(h, shape=[1] * 9), b), "at most 8 sizes"),
    "an unknown dtype": (lambda h, b: build_file(_entry_with(h, dtype="C128"), b), "dtype must be one of"),
    "a dtype that is a list": (lambda h, b: build_file(_entry_with(h, dtype=["F32"]), b), "dtype must be one of"),
    "another key in an entry": (lambda h, b: build_file(_entry_with(h, note="hi"), b), "needs exactly"),
    "metadata": (lambda h, b: build_file({**h, "__metadata__": {"images": "many"}}, b), "__metadata__"),
    "a name twice": (
        lambda h, b: build_file(json.dumps(h)[:-1] + ", " + json.dumps(h)[1:], b), "a name occurs twice",
    ),
    "a name with a NUL": (lambda h, b: build_file({**h, "\x00": h[_last(h)]}, b), "overlap"),
    "a name with half a character": (lambda h, b: build_file({**h, "\ud800": h[_last(h)]}, b), "half a character"),
    "a name that is a path": (
        lambda h, b: build_file({**h, "../../a": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}, b),
        "not declared: '../../a'",
    ),
    "a name of control characters": (
        lambda h, b: build_file({**h, "a\x1b[31m": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}, b),
        r"not declared: 'a\x1b[31m'",
    ),
    "not JSON": (lambda h, b: build_file("{" * len(json.dumps(h)), b), "cannot be read"),
    "not an object": (lambda h, b: build_file("[]", b), "not a JSON object"),
    "a space in front": (lambda h, b: build_file(" " + json.dumps(h), b), "not a JSON object"),
    "NaN for a size": (lambda h, b: build_file(_entry_with(h, shape=[float("nan")]), b), "none negative"),
    "not UTF-8": (lambda h, b: build_file(b'{"\xff": 1}', b), "cannot be read"),
    "nested deeply": (lambda h, b: build_file('{"a":' * 900, b), "cannot be read"),
    "an empty object": (lambda h, b: build_file({}, b""), "missing: encoder"),
    "no header": (lambda h, b: b"", "ended within its safetensors header"),
    "four bytes": (lambda h, b: b"\x08\0\0\0", "ended within its safetensors header"),
    "half a header": (lambda h, b: build_file(h, b)[:100], "ended within its safetensors header"),
    "only the header": (lambda h, b: build_file(h), "bytes, "),
    "less than the header says": (lambda h, b: build_file(h, b[:-1]), "were announced"),
    "more than the header says": (lambda h, b: build_file(h, b + b"\0"), "were announced"),
}  # fmt: skip


@pytest.mark.parametrize("case", HEADERS)
def test_manipulated_headers_are_refused(uploader: Uploader, change_watcher: ChangeWatcher, case: str) -> None:
    change, what = HEADERS[case]
    with change_watcher.nothing_changes() as events:
        answer = uploader.put(change(*split_file(safetensors_bytes(uploader.tensors))))
    _assert_refused(uploader, answer, events, 422, "artifact-rejected", what)


@pytest.mark.parametrize("length", [2**20, 2**63, 2**64 - 1])
def test_a_header_that_claims_to_be_too_long_is_refused(
    uploader: Uploader, change_watcher: ChangeWatcher, length: int
) -> None:
    header, body = split_file(safetensors_bytes(uploader.tensors))
    with change_watcher.nothing_changes() as events:
        answer = uploader.put(build_file(header, body, length=length))
    _assert_refused(uploader, answer, events, 413, "artifact-too-large", f"the header claims {length} bytes")


def test_a_file_with_another_digest_is_refused(uploader: Uploader, change_watcher: ChangeWatcher) -> None:
    """The digest is checked before the values: NaN in damaged bytes does not mean that training diverged."""
    for tensors in (uploader.tensors, _with(float("nan"))(uploader.tensors)):
        with change_watcher.nothing_changes() as events:
            answer = uploader.put(safetensors_bytes(tensors), name=digest(b"something else"))
        _assert_refused(
            uploader, answer, events, 422, "artifact-rejected", f"the announced one is {digest(b'something else')}"
        )


def test_an_upload_without_a_length_is_refused(uploader: Uploader, change_watcher: ChangeWatcher) -> None:
    data = safetensors_bytes(uploader.tensors)
    with change_watcher.nothing_changes() as events:
        answer = uploader.put(iter([data]), name=digest(data))
    assert "content-length" not in answer.request.headers
    _assert_refused(uploader, answer, events, 411, "length-required", "send Content-Length")


@pytest.mark.parametrize("missing", [1, 1000])
def test_an_upload_whose_connection_breaks_changes_nothing(
    uploader: Uploader, change_watcher: ChangeWatcher, missing: int
) -> None:
    data = safetensors_bytes(uploader.tensors)
    with change_watcher.nothing_changes() as events:
        raw_request(uploader.coordinator.url, _head(uploader, data, len(data)), data[:-missing], then_close=True)
        time.sleep(0.2)
    assert events == []


def test_a_file_longer_than_its_announced_length_is_refused(uploader: Uploader, change_watcher: ChangeWatcher) -> None:
    """The bytes after the announced ones are read as the next request, which is invalid."""
    data = safetensors_bytes(uploader.tensors)
    with change_watcher.nothing_changes():
        answer = raw_request(uploader.coordinator.url, _head(uploader, data, len(data) - 4), data, then_close=False)
        time.sleep(0.1)
    assert answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 422 "))


def _head(uploader: Uploader, data: bytes, length: int) -> str:
    path = f"/v1/artifacts/{digest(data)}?assignment={uploader.item.assignment_id}"
    return f"PUT {path} HTTP/1.1\nHost: here\nAuthorization: Bearer {uploader.token}\nContent-Length: {length}"


@pytest.mark.parametrize(
    "name",
    ["f" * 63, "f" * 65, "F" * 64, "g" * 64, "..%2f" + "f" * 59, "%00" + "f" * 63, "f" * 64 + "%0a", "%ff" * 64],
)
def test_an_invalid_digest_is_refused(uploader: Uploader, change_watcher: ChangeWatcher, name: str) -> None:
    with change_watcher.nothing_changes() as events:
        answer = uploader.put(b"anything", name=name)
    assert answer.status_code in (404, 422)  # a slash makes it another path
    if answer.status_code == 422:
        assert answer.json()["type"] == "urn:fedssl:problem:invalid-request"
        assert answer.json()["errors"][0]["loc"] == ["path", "digest"]
        assert [(event.kind, event.client_id) for event in events] == [("request.refused", "a")]


@pytest.mark.parametrize("assignment", ["", "7", "x" * 36])
def test_an_invalid_assignment_id_is_refused(
    uploader: Uploader, change_watcher: ChangeWatcher, assignment: str
) -> None:
    data = safetensors_bytes(uploader.tensors)
    with change_watcher.nothing_changes() as events, uploader.coordinator.http(uploader.token) as http:
        answer = http.put(f"/v1/artifacts/{digest(data)}", params={"assignment": assignment}, content=data)
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["loc"] == ["query", "assignment"]
    assert [event.kind for event in events] == ["request.refused"]


def test_the_assignment_of_another_client_is_answered_like_an_unknown_one(
    uploader: Uploader, change_watcher: ChangeWatcher
) -> None:
    data = safetensors_bytes(uploader.tensors)
    token = uploader.coordinator.worker_token("stranger")
    for assignment in (uploader.item.assignment_id, uuid4()):
        with change_watcher.nothing_changes() as events:
            answer = uploader.put(data, token=token, assignment=assignment)
        assert answer.status_code == 404
        assert answer.json()["type"] == "urn:fedssl:problem:not-found"
        assert answer.json()["detail"] == (
            f"stranger has no assignment {assignment}: claim work and use the id that it carries"
        )
        [event] = events
        assert (event.kind, event.client_id, event.run_id) == ("assignment.foreign", "stranger", None)


def test_the_sender_of_a_large_file_that_is_refused_at_its_header_gets_the_answer(
    shared_coordinator: Coordinator, change_watcher: ChangeWatcher, uploader: Uploader
) -> None:
    """The server stops reading after the header. The answer must reach a client that is still sending."""
    wide = tiny_spec(
        model={"encoder": {"widths": [256, 1024]}, "projector": {"hidden_dims": [512], "out_dim": 256}},
        cohort={"clients": ["a"], "lease_seconds": 3600},
    )
    with shared_coordinator.worker("a") as worker:
        run = shared_coordinator.client.create_run(wide)
        shared_coordinator.advance(run.id)
        shared_coordinator.client.pause(uploader.item.run_id)  # otherwise its lease would come first
        item = worker.claim(0)
        shared_coordinator.client.resume(uploader.item.run_id)
    assert item is not None
    assert item.run_id == run.id
    tensors = tensors_for(item.plan.update)
    data = safetensors_bytes({("x" if name == _first(tensors) else name): tensor for name, tensor in tensors.items()})
    assert len(data) > 10_000_000
    for _ in range(5):
        with change_watcher.nothing_changes() as events:
            answer = uploader.put(data, assignment=item.assignment_id)
        assert answer.status_code == 422
        assert "not declared: x" in answer.json()["detail"]
        assert [event.run_id for event in events] == [run.id]


def test_the_right_file_is_accepted_after_all_refusals(uploader: Uploader, change_watcher: ChangeWatcher) -> None:
    data = safetensors_bytes(uploader.tensors)
    last = change_watcher.tables.last_event()
    assert uploader.put(data).status_code == 201
    with change_watcher.nothing_changes():
        assert uploader.put(data).status_code == 200  # repeated: it is already stored
    assert change_watcher.tables.events_after(last) == []
    known = change_watcher.tables.query("SELECT num_bytes FROM artifacts WHERE digest = %s", digest(data))
    assert known == [(len(data),)]
    stored = uploader.coordinator.store / digest(data)[:2] / digest(data)[2:4] / digest(data)
    assert stored.read_bytes() == data
    assert list((uploader.coordinator.store / "incoming").iterdir()) == []
