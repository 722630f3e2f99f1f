"""A duplicate, late or foreign submission gets a clear error and an event, and changes nothing."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest

from fedssl.client import Conflict, DuplicateUpdate, Gone, LeaseLost, NotFound, Rejected, WorkerClient
from fedssl.protocol.policy import AllowRule, PolicyNotice
from fedssl.protocol.states import AssignmentState
from fedssl.protocol.work import Submit, WorkItem
from support.coordinator import Coordinator
from support.federation import tensors_for, tiny_spec, upload, upload_and_submit
from support.tables import ChangeWatcher, Tables
from support.uploads import digest, safetensors_bytes

OTHER = "0" * 64
_SECURE = AllowRule(artifact="weights", methods=("*",), secure="required")


@pytest.fixture
def watching(coordinator: Coordinator, tables: Tables) -> ChangeWatcher:
    return ChangeWatcher(tables, coordinator.store)


@contextmanager
def _refused(change_watcher: ChangeWatcher, kind: str, client_id: str, item: WorkItem | None) -> Iterator[None]:
    """Check that the block only adds one event, of this kind, client, run and round."""
    with change_watcher.nothing_changes() as events:
        yield
    [event] = events
    assert (event.kind, event.client_id) == (kind, client_id)
    expected = (None, None) if item is None else (item.run_id, item.round_number)
    assert (event.run_id, event.round_number) == expected


def _leased(coordinator: Coordinator, **cohort: Any) -> tuple[WorkerClient, WorkItem]:
    worker = coordinator.worker("a")
    run = coordinator.client.create_run(tiny_spec(cohort={"clients": ["a"], **cohort}))
    coordinator.advance(run.id)
    item = worker.claim(0)
    assert item is not None
    return worker, item


def _submit(item: WorkItem, update: str, num_examples: int = 10) -> Submit:
    return Submit(assignment_id=item.assignment_id, update=update, num_examples=num_examples)


def test_a_submission_without_an_upload_is_refused(coordinator: Coordinator, watching: ChangeWatcher) -> None:
    worker, item = _leased(coordinator)
    with _refused(watching, "assignment.refused", "a", item), pytest.raises(Conflict, match="upload it with PUT first"):
        worker.submit(_submit(item, OTHER))


def test_a_submission_with_the_upload_of_another_assignment_is_refused(
    coordinator: Coordinator, watching: ChangeWatcher, tmp_path: Path
) -> None:
    """It is not enough that the artifact is stored: it must have been sent and checked for this assignment."""
    worker, item = _leased(coordinator)
    update = upload(worker, item, tensors_for(item.plan.update, 1.0), tmp_path)
    second = coordinator.client.create_run(tiny_spec(cohort={"clients": ["a"]}))
    coordinator.advance(second.id)
    coordinator.client.pause(item.run_id)
    other = worker.claim(0)
    assert other is not None
    assert other.run_id == second.id
    with _refused(watching, "assignment.refused", "a", other), pytest.raises(Conflict, match="has not been uploaded"):
        worker.submit(_submit(other, update))


def test_a_repeated_submission_gets_the_same_answer(
    coordinator: Coordinator, watching: ChangeWatcher, tmp_path: Path
) -> None:
    worker, item = _leased(coordinator)
    first = upload_and_submit(worker, item, tmp_path, 1.0)
    update = str(watching.tables.one("SELECT update_digest FROM assignments"))
    again = _submit(item, update).model_copy(update={"metrics": {"loss": 1.0}})
    with watching.nothing_changes() as events:
        assert worker.submit(again) == first
    assert events == []
    coordinator.advance(item.run_id)  # also after the close, when the coordinator has added its own metrics
    with watching.nothing_changes() as events:
        assert worker.submit(again).state == AssignmentState.ACCEPTED
    assert events == []


def test_changed_numbers_are_refused_after_an_update_was_accepted(
    coordinator: Coordinator, watching: ChangeWatcher, tmp_path: Path
) -> None:
    worker, item = _leased(coordinator)
    upload_and_submit(worker, item, tmp_path, 1.0)
    accepted = _submit(item, str(watching.tables.one("SELECT update_digest FROM assignments")))
    for changes, message in (
        ({"num_examples": 99, "metrics": {"loss": 1.0}}, r"num_examples 10, not 99, of a, and keeps it"),
        ({"metrics": {"loss": 2.0}}, r"this update with other metrics \(loss\) of a, and keeps it"),
        ({"metrics": {}}, r"other metrics \(loss\)"),
    ):
        with _refused(watching, "assignment.refused", "a", item), pytest.raises(DuplicateUpdate, match=message):
            worker.submit(accepted.model_copy(update=changes))


def test_more_images_than_were_registered_are_refused(
    coordinator: Coordinator, watching: ChangeWatcher, tmp_path: Path
) -> None:
    """The number of images is a client's weight: a client that sent 10^12 once replaced the model in one round."""
    worker, item = _leased(coordinator)
    update = upload(worker, item, tensors_for(item.plan.update, 1.0), tmp_path)
    message = r"num_examples is 1001, and a registered 1000 images"
    with _refused(watching, "update.weight_refused", "a", item), pytest.raises(Rejected, match=message):
        worker.submit(_submit(item, update, 1001))
    assert worker.submit(_submit(item, update, 1000)).state == AssignmentState.ACCEPTED


def test_a_client_that_keeps_its_number_of_images_cannot_submit_one(
    coordinator: Coordinator, watching: ChangeWatcher, tmp_path: Path
) -> None:
    """A client that withdrew its number in the middle of a round once replaced the model, with 10^12 images."""
    worker, item = _leased(coordinator)
    update = upload(worker, item, tensors_for(item.plan.update, 1.0), tmp_path)
    coordinator.worker("a", policy=PolicyNotice(digest=OTHER, allow=(_SECURE,)))
    message = "num_examples is 1000000000000, and a keeps its number of images"
    with _refused(watching, "update.weight_refused", "a", item), pytest.raises(Rejected, match=message):
        worker.submit(_submit(item, update, 10**12))
    other = tmp_path / "other"
    other.write_bytes(safetensors_bytes(tensors_for(item.plan.update, 2.0)))
    with _refused(watching, "update.weight_refused", "a", item), pytest.raises(Rejected, match=message):
        worker.deliver(_submit(item, digest(other.read_bytes()), 10**12), other)


def test_a_changed_number_of_images_is_an_event(coordinator: Coordinator, watching: ChangeWatcher) -> None:
    _leased(coordinator)
    token = coordinator.worker_token("a")
    with coordinator.http(token) as http:
        for num_images in (1000, 10**9, 10**9):
            body = {"worker_version": "1", "methods": {}, "device": "cpu", "num_images": num_images, "channels": 1}
            assert http.post("/v1/work/register", json={**body, "image_size": 8}).status_code == 200
    rows = watching.tables.query("SELECT message, data FROM events WHERE kind = 'client.images_changed'")
    assert [tuple(row) for row in rows] == [
        ("a registered with 1000000000 images, and with 1000 before", {"before": 1000, "after": 10**9})
    ]


def test_a_metric_that_only_the_coordinator_measures_is_refused(
    coordinator: Coordinator, watching: ChangeWatcher, tmp_path: Path
) -> None:
    worker, item = _leased(coordinator)
    update = upload(worker, item, tensors_for(item.plan.update, 1.0), tmp_path)
    forged = _submit(item, update).model_copy(update={"metrics": {"update_norm": 0.1}})
    with (
        _refused(watching, "assignment.refused", "a", item),
        pytest.raises(Rejected, match="the coordinator itself measures update_norm"),
    ):
        worker.submit(forged)


def test_another_update_is_refused_after_one_was_accepted(
    coordinator: Coordinator, watching: ChangeWatcher, tmp_path: Path
) -> None:
    worker, item = _leased(coordinator)
    upload_and_submit(worker, item, tmp_path, 1.0)
    with (
        _refused(watching, "assignment.refused", "a", item),
        pytest.raises(DuplicateUpdate, match="has already accepted another update of a, and keeps it"),
    ):
        worker.submit(_submit(item, OTHER))
    with _refused(watching, "artifact.refused", "a", item), pytest.raises(DuplicateUpdate, match="claim new work"):
        upload(worker, item, tensors_for(item.plan.update, 2.0), tmp_path)


def test_late_requests_are_refused_after_the_round_has_closed(
    coordinator: Coordinator, watching: ChangeWatcher, tmp_path: Path
) -> None:
    """Client b is late: the round closed with a's update at its deadline."""
    a, b = coordinator.worker("a"), coordinator.worker("b")
    run = coordinator.client.create_run(tiny_spec(cohort={"clients": ["a", "b"], "min_clients": 2, "min_updates": 1}))
    coordinator.advance(run.id)
    item_a, item_b = a.claim(0), b.claim(0)
    assert item_a is not None
    assert item_b is not None
    update = upload(b, item_b, tensors_for(item_b.plan.update, 9.0), tmp_path)
    upload_and_submit(a, item_a, tmp_path, 1.0)
    watching.tables.execute("UPDATE rounds SET deadline = now() - interval '1 second'")
    coordinator.advance(run.id)
    assert coordinator.client.run(run.id).rounds_closed == 1
    with _refused(watching, "assignment.refused", "b", item_b), pytest.raises(Gone, match="this came too late"):
        b.submit(_submit(item_b, update))
    with _refused(watching, "artifact.refused", "b", item_b), pytest.raises(Gone, match="claim new work"):
        upload(b, item_b, tensors_for(item_b.plan.update, 3.0), tmp_path)
    with _refused(watching, "assignment.refused", "b", item_b), pytest.raises(Gone, match="this came too late"):
        b.decline(item_b.assignment_id, "too slow")


def test_a_submission_is_refused_after_the_run_was_stopped(
    coordinator: Coordinator, watching: ChangeWatcher, tmp_path: Path
) -> None:
    worker, item = _leased(coordinator)
    update = upload(worker, item, tensors_for(item.plan.update, 1.0), tmp_path)
    coordinator.client.stop(item.run_id)
    with _refused(watching, "assignment.refused", "a", item), pytest.raises(Gone):
        worker.submit(_submit(item, update))


def test_requests_are_refused_after_the_lease_was_lost(
    coordinator: Coordinator, watching: ChangeWatcher, tmp_path: Path
) -> None:
    worker, item = _leased(coordinator)
    update = upload(worker, item, tensors_for(item.plan.update, 1.0), tmp_path)
    watching.tables.execute("UPDATE assignments SET lease_expires_at = now() - interval '1 second'")
    coordinator.advance(item.run_id)
    what = r"the assignment is expired \(no heartbeat within the lease\): claim again"
    with _refused(watching, "assignment.refused", "a", item), pytest.raises(LeaseLost, match=what):
        worker.submit(_submit(item, update))
    with _refused(watching, "artifact.refused", "a", item), pytest.raises(LeaseLost, match="claim again"):
        upload(worker, item, tensors_for(item.plan.update, 2.0), tmp_path)
    with _refused(watching, "assignment.refused", "a", item), pytest.raises(LeaseLost, match="claim again"):
        worker.decline(item.assignment_id, "whatever")
    again = worker.claim(0)  # as the message advises
    assert again is not None
    assert again.assignment_id != item.assignment_id


@pytest.mark.changes_states
def test_a_submission_for_an_assignment_that_was_only_offered_is_refused(
    coordinator: Coordinator, watching: ChangeWatcher
) -> None:
    worker, item = _leased(coordinator)
    watching.tables.execute("UPDATE assignments SET state = 'offered'")
    with _refused(watching, "assignment.refused", "a", item), pytest.raises(LeaseLost, match="is offered: claim again"):
        worker.submit(_submit(item, OTHER))


def test_the_assignment_of_another_client_is_answered_like_an_unknown_one(
    coordinator: Coordinator, watching: ChangeWatcher, tmp_path: Path
) -> None:
    """So a client does not find out that the assignment exists."""
    worker, item = _leased(coordinator)
    update = upload(worker, item, tensors_for(item.plan.update, 1.0), tmp_path)
    stranger = coordinator.worker("stranger")
    for assignment_id in (item.assignment_id, uuid4()):
        foreign = item.model_copy(update={"assignment_id": assignment_id})
        match = f"stranger has no assignment {assignment_id}: claim work and use the id that it carries"
        with _refused(watching, "assignment.foreign", "stranger", None), pytest.raises(NotFound, match=match):
            stranger.submit(_submit(foreign, update))
        with _refused(watching, "assignment.foreign", "stranger", None), pytest.raises(NotFound, match=match):
            stranger.decline(assignment_id, "mine now")
        with _refused(watching, "assignment.foreign", "stranger", None), pytest.raises(NotFound, match=match):
            stranger.heartbeat(assignment_id)


WORK: dict[str, tuple[str, dict[str, Any], str]] = {
    "no images": ("submit", {"num_examples": 0}, "num_examples"),
    "too many images": ("submit", {"num_examples": 10**13}, "num_examples"),
    "images as text": ("submit", {"num_examples": "many"}, "num_examples"),
    "a number as text": ("submit", {"num_examples": "7"}, "num_examples"),
    "true images": ("submit", {"num_examples": True}, "num_examples"),
    "images with a point": ("submit", {"num_examples": 7.0}, "num_examples"),
    "a metric as text": ("submit", {"metrics": {"loss": "0.5"}}, "metrics.loss"),
    "a true metric": ("submit", {"metrics": {"loss": True}}, "metrics.loss"),
    "registered images as text": ("register", {"num_images": "7"}, "num_images"),
    "more images than anyone has": ("register", {"num_images": 10**9 + 1}, "num_images"),
    "no digest": ("submit", {"update": "f" * 63}, "update"),
    "no assignment": ("submit", {"assignment_id": "7"}, "assignment_id"),
    "a metric that is no number": ("submit", {"metrics": {"loss": "low"}}, "metrics.loss"),
    "a metric of which no mean can be made": ("submit", {"metrics": {"loss": 1.7e308}}, "metrics.loss"),
    "a metric as far below": ("submit", {"metrics": {"loss": -1.1e30}}, "metrics.loss"),
    "a metric in capitals": ("submit", {"metrics": {"LOSS": 1}}, "metrics.LOSS"),
    "too many metrics": ("submit", {"metrics": {f"m{i}": 0 for i in range(65)}}, "metrics"),
    "an unknown key": ("submit", {"weight": 2}, "weight"),
    "a wait beyond a minute": ("claim", {"wait_seconds": 61}, "wait_seconds"),
    "a wait of the past": ("claim", {"wait_seconds": -1}, "wait_seconds"),
    "an unknown phase": (
        "heartbeat", {"progress": {"phase": "sleeping", "epoch": 0, "num_epochs": 0, "step": 0, "num_steps": 0}},
        "progress.phase",
    ),
    "a reason too long": ("decline", {"assignment_id": str(uuid4()), "reason": "x" * 501}, "reason"),
    "no channels": ("register", {"channels": 0}, "channels"),
    "an image of one pixel": ("register", {"image_size": 1}, "image_size"),
    "more images than fit": ("register", {"num_images": 2**63}, "num_images"),
    "a device with a NUL": ("register", {"device": "cpu\x00"}, "body"),
    "a device with half a character": ("register", {"device": "cpu\ud800"}, "device"),
    "another protocol": ("register", {"protocol_version": 99}, "update one"),
}  # fmt: skip
COMPLETE = {
    "submit": {"assignment_id": str(uuid4()), "update": OTHER, "num_examples": 1},
    "register": {"worker_version": "1", "methods": {}, "device": "cpu", "num_images": 1, "channels": 1,
                 "image_size": 8},
}  # fmt: skip


@pytest.mark.parametrize("case", WORK)
def test_invalid_values_in_a_workers_request_are_refused_with_the_field(
    shared_coordinator: Coordinator, change_watcher: ChangeWatcher, case: str
) -> None:
    verb, changes, where = WORK[case]
    token = shared_coordinator.worker_token("a")
    with change_watcher.nothing_changes() as events, shared_coordinator.http(token) as http:
        body = json.dumps({**COMPLETE.get(verb, {}), **changes})
        answer = http.post(f"/v1/work/{verb}", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 422, answer.text
    assert answer.json()["type"] == "urn:fedssl:problem:invalid-request"
    assert where in answer.json()["detail"]
    [event] = events
    assert event.client_id == "a"
    assert event.kind == ("client.refused" if "protocol_version" in changes else "request.refused")


def test_a_metric_that_is_not_finite_is_refused(shared_coordinator: Coordinator, change_watcher: ChangeWatcher) -> None:
    token = shared_coordinator.worker_token("a")
    body = f'{{"assignment_id": "{uuid4()}", "update": "{OTHER}", "num_examples": 1, "metrics": {{"loss": NaN}}}}'
    with change_watcher.nothing_changes() as events, shared_coordinator.http(token) as http:
        answer = http.post("/v1/work/submit", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["loc"] == ["metrics", "loss"]
    assert [event.client_id for event in events] == ["a"]


def test_a_decline_reason_with_control_characters_is_accepted(coordinator: Coordinator, tables: Tables) -> None:
    """The reason may quote any text. If it were refused, the client would keep the lease until it expires."""
    worker, item = _leased(coordinator)
    worker.decline(item.assignment_id, "no \x00 disk \x1b[31m")
    assert tables.one("SELECT reason FROM assignments") == "no \\x00 disk \x1b[31m"


def test_the_headers_that_name_and_type_a_file_are_ignored(coordinator: Coordinator) -> None:
    worker, item = _leased(coordinator)
    data = safetensors_bytes(tensors_for(item.plan.update, 1.0))
    token = coordinator.worker_token("a")
    with coordinator.http(token) as http:
        answer: httpx.Response = http.put(
            f"/v1/artifacts/{digest(data)}",
            params={"assignment": str(item.assignment_id)},
            content=data,
            headers={"Content-Type": "text/plain", "Content-Disposition": "attachment; filename=../../x"},
        )
    assert answer.status_code == 201
    assert worker.submit(_submit(item, digest(data))).state == AssignmentState.ACCEPTED
