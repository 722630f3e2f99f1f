"""A worker that sends more than the plan of its method: nothing of it is stored.

Refusals that are the same in any run are in test_refused_uploads.py. These tests try to get around a plan of
similarities, of weights, and of weights with centers, and use every channel besides the tensors.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import torch

from fedssl.artifacts.tensors import Tensors, serialised
from fedssl.client import WorkerClient
from fedssl.protocol.views import EventView
from fedssl.protocol.work import Submit, WorkItem
from support.coordinator import Coordinator
from support.federation import tensors_for, tiny_spec
from support.smuggling import PAYLOAD, SEVERAL, SMUGGLING, append_payload
from support.tables import ChangeWatcher
from support.uploads import digest

PUBLIC = {"dataset": "digits", "num_images": 40}
REDUCER = {"name": "distillation", "num_anchors": 16, "batch_size": 8, "num_epochs": 2}
RUNS: dict[str, dict[str, Any]] = {
    "flesd": {"method": {"name": "flesd", "reducer": REDUCER}, "public_data": PUBLIC},
    "fedsimclr": {"method": {"name": "fedsimclr"}},
    "fedrlc": {"method": {"name": "fedrlc", "add_ons": [{"name": "crossed_kl", "num_centers": 3}]}},
}


@dataclass(frozen=True)
class Uploader:
    """A worker's lease in a run of each method."""

    coordinator: Coordinator
    worker: WorkerClient
    token: str
    items: dict[str, WorkItem]

    def tensors(self, method: str, value: float = 0.5) -> Tensors:
        return tensors_for(self.items[method].plan.update, value)

    def put(self, method: str, content: bytes, *, token: str | None = None) -> httpx.Response:
        with self.coordinator.http(token or self.token) as http:
            params = {"assignment": str(self.items[method].assignment_id)}
            return http.put(f"/v1/artifacts/{digest(content)}", params=params, content=content)


@pytest.fixture(scope="module")
def uploader(shared_coordinator: Coordinator) -> Iterator[Uploader]:
    items = {}
    with shared_coordinator.worker("a") as worker:
        for method, changes in RUNS.items():
            cohort = {"clients": ["a"], "lease_seconds": 3600}
            run = shared_coordinator.client.create_run(tiny_spec(cohort=cohort, **changes))
            shared_coordinator.advance(run.id)
            item = worker.claim(0)
            assert item is not None
            assert item.run_id == run.id
            items[method] = item
            shared_coordinator.client.pause(run.id)  # or its lease would come first at the next claim
        for item in items.values():
            shared_coordinator.client.resume(item.run_id)
        yield Uploader(shared_coordinator, worker, shared_coordinator.worker_token("a"), items)


def _assert_refused(
    uploader: Uploader, method: str, answer: httpx.Response, events: list[EventView], what: str
) -> None:
    """Check that the upload was refused with the reason. A file too large for the plan is not even read."""
    if answer.status_code == 413:
        assert answer.json()["type"] == "urn:fedssl:problem:artifact-too-large"
        assert "bytes announced; the method's artifact plan allows at most" in answer.json()["detail"]
    else:
        assert answer.status_code == 422, answer.text
        assert answer.json()["type"] == "urn:fedssl:problem:artifact-rejected"
        assert what in answer.json()["detail"]
    [event] = events
    assert (event.kind, event.run_id, event.client_id) == ("artifact.refused", uploader.items[method].run_id, "a")
    assert PAYLOAD.decode() not in event.message


CASES = [(method, case) for method in RUNS for case in SMUGGLING] + [
    (method, case) for method in ("fedsimclr", "fedrlc") for case in SEVERAL
]


@pytest.mark.parametrize(("method", "case"), CASES, ids=[f"{method}: {case}" for method, case in CASES])
def test_a_file_that_contains_more_than_the_plan_is_not_stored(
    uploader: Uploader, change_watcher: ChangeWatcher, method: str, case: str
) -> None:
    smuggle, words = {**SMUGGLING, **SEVERAL}[case]
    with change_watcher.nothing_changes() as events:
        answer = uploader.put(method, smuggle(uploader.tensors(method)))
    _assert_refused(uploader, method, answer, events, words)


@pytest.mark.parametrize("method", RUNS)
def test_bytes_after_the_right_file_are_refused(uploader: Uploader, change_watcher: ChangeWatcher, method: str) -> None:
    with change_watcher.nothing_changes() as events:
        answer = uploader.put(method, append_payload(uploader.tensors(method)))
    _assert_refused(uploader, method, answer, events, "were announced")


@pytest.mark.parametrize(
    ("method", "others", "what"),
    [
        ("flesd", ("fedsimclr",), "missing: factor; not declared: encoder"),
        ("flesd", ("flesd", "fedsimclr"), "not declared: encoder"),
        ("fedsimclr", ("flesd",), "not declared: factor"),
        ("fedsimclr", ("fedsimclr", "flesd"), "not declared: factor"),
        ("fedsimclr", ("fedsimclr", "fedrlc"), "not declared: centers.mu"),
        ("fedrlc", ("fedrlc", "flesd"), "not declared: factor"),
        ("fedrlc", ("fedsimclr",), "missing: centers.mu"),
    ],
)
def test_tensors_of_another_method_are_refused(
    uploader: Uploader, change_watcher: ChangeWatcher, method: str, others: tuple[str, ...], what: str
) -> None:
    tensors = {name: tensor for other in others for name, tensor in uploader.tensors(other).items()}
    with change_watcher.nothing_changes() as events:
        answer = uploader.put(method, serialised(tensors))
    _assert_refused(uploader, method, answer, events, what)


@pytest.mark.parametrize(
    ("tensors", "what"),
    [
        ({"factor": torch.rand(40, 8)}, "factor is F32[40, 8], declared F32[40, 4]"),
        ({"factor": torch.rand(41, 4)}, "factor is F32[41, 4], declared F32[40, 4]"),
        ({"factor": torch.rand(4, 40)}, "factor is F32[4, 40], declared F32[40, 4]"),
        ({"factor": torch.rand(40, 4).half()}, "factor is F16[40, 4], declared F32[40, 4]"),
        ({"representations": torch.rand(40, 4)}, "not declared: representations"),
        ({"similarities": torch.rand(780).half()}, "not declared: similarities"),
    ],
    ids=["a wider client's", "more images", "turned", "another precision", "the embeddings", "the pairs"],
)
def test_similarities_of_another_shape_or_packing_are_refused(
    uploader: Uploader, change_watcher: ChangeWatcher, tensors: Tensors, what: str
) -> None:
    with change_watcher.nothing_changes() as events:
        answer = uploader.put("flesd", serialised(tensors))
    _assert_refused(uploader, "flesd", answer, events, what)


def test_a_megabyte_for_a_plan_of_640_bytes_is_refused(uploader: Uploader, change_watcher: ChangeWatcher) -> None:
    with change_watcher.nothing_changes() as events:
        answer = uploader.put("flesd", serialised({"factor": torch.rand(40, 8000)}))
    assert answer.status_code == 413
    assert [event.kind for event in events] == ["artifact.refused"]


def test_an_upload_for_another_clients_assignment_is_refused(uploader: Uploader, change_watcher: ChangeWatcher) -> None:
    """Even with the right tensors, the assignment of another client is treated like one that does not exist."""
    stranger = uploader.coordinator.worker_token("stranger")
    with change_watcher.nothing_changes() as events:
        answer = uploader.put("flesd", serialised(uploader.tensors("flesd")), token=stranger)
    assert answer.status_code == 404
    assert [event.kind for event in events] == ["assignment.foreign"]


def test_after_all_refusals_the_right_similarities_are_accepted_once(
    uploader: Uploader, change_watcher: ChangeWatcher
) -> None:
    item = uploader.items["flesd"]
    first, other = (serialised(uploader.tensors("flesd", value)) for value in (0.5, 0.25))
    assert uploader.put("flesd", first).status_code == 201
    submit = Submit(assignment_id=item.assignment_id, update=digest(first), num_examples=10)
    uploader.worker.submit(submit)
    with change_watcher.nothing_changes() as events:
        answer = uploader.put("flesd", other)
    assert answer.status_code == 409
    assert answer.json()["type"] == "urn:fedssl:problem:duplicate-update"
    assert [event.kind for event in events] == ["artifact.refused"]


# --- Besides the tensors ------------------------------------------------------------------------------------------

HUGE = int.from_bytes(PAYLOAD)
CHANNELS: dict[str, tuple[str, dict[str, Any]]] = {
    "a step that is a message": (
        "heartbeat",
        {"progress": {"phase": "training", "epoch": 0, "num_epochs": 0, "step": HUGE, "num_steps": 0}},
    ),
    "an epoch that is a message": (
        "heartbeat",
        {"progress": {"phase": "training", "epoch": HUGE, "num_epochs": 0, "step": 0, "num_steps": 0}},
    ),
    "a phase that is a message": (
        "heartbeat",
        {"progress": {"phase": "jane", "epoch": 0, "num_epochs": 0, "step": 0, "num_steps": 0}},
    ),
    "a method that is a message": ("register", {"methods": {"jane doe " * 20: 1}}),
    "a version that is a message": ("register", {"methods": {"fedbyol": HUGE}}),
    "an encoder with a note": ("register", {"encoder": {"name": "resnet18", "note": "jane doe"}}),
    "an encoder of many layers": ("register", {"encoder": {"name": "convnet", "widths": [97, 110, 101] * 3}}),
    "a metric with a sentence for a name": ("submit", {"metrics": {"jane doe": 1.0}}),
    "a metric with a long name": ("submit", {"metrics": {"x" * 65: 1.0}}),
    "65 metrics": ("submit", {"metrics": {f"m{number}": 0.5 for number in range(65)}}),
    "a note beside the metrics": ("submit", {"note": "jane doe"}),
    "a message for the number of examples": ("submit", {"num_examples": HUGE}),
    "a reason of 501 letters": ("decline", {"reason": "x" * 501}),
    "a note beside the reason": ("decline", {"reason": "no", "note": "jane doe"}),
}


@pytest.mark.parametrize("case", CHANNELS)
def test_requests_with_additional_content_are_refused(
    uploader: Uploader, change_watcher: ChangeWatcher, case: str
) -> None:
    verb, changes = CHANNELS[case]
    assignment = {"assignment_id": str(uploader.items["fedsimclr"].assignment_id)}
    complete: dict[str, Any] = {
        "heartbeat": assignment,
        "decline": {**assignment, "reason": "no"},
        "submit": {**assignment, "update": "0" * 64, "num_examples": 1},
        "register": {
            "worker_version": "1", "methods": {}, "device": "cpu", "num_images": 1, "channels": 1, "image_size": 8
        },
    }[verb]  # fmt: skip
    with change_watcher.nothing_changes() as events, uploader.coordinator.http(uploader.token) as http:
        content = json.dumps({**complete, **changes})
        answer = http.post(f"/v1/work/{verb}", content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 422, answer.text
    assert answer.json()["type"] == "urn:fedssl:problem:invalid-request"
    [event] = events
    assert event.kind == "request.refused"
    assert len(event.message) <= 2100  # the audit log may quote what it refused, within bounds
    assert event.data == {}


def test_undeclared_headers_and_parameters_are_not_stored(uploader: Uploader, change_watcher: ChangeWatcher) -> None:
    """Data in headers and parameters that the API does not declare is ignored."""
    content = serialised(uploader.tensors("fedsimclr"))
    params = {"assignment": str(uploader.items["fedsimclr"].assignment_id), "note": PAYLOAD.decode()}
    headers = {"X-Note": PAYLOAD.decode(), "Content-Type": "text/plain; note=jane"}
    with uploader.coordinator.http(uploader.token) as http:
        answer = http.put(f"/v1/artifacts/{digest(content)}", params=params, content=content, headers=headers)
    assert answer.status_code == 201
    assert "Jane Doe" not in json.dumps(change_watcher.tables.dump())


def test_the_plan_of_each_method_declares_the_kinds_of_its_tensors(uploader: Uploader) -> None:
    kinds = {method: {tensor.kind for tensor in item.plan.update} for method, item in uploader.items.items()}
    assert kinds == {"flesd": {"similarity"}, "fedsimclr": {"weights"}, "fedrlc": {"weights", "centers"}}
