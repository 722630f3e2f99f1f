"""Uploads of data sets: only for operators, checked at their header, and limited in size."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import numpy as np
import pytest
from safetensors.numpy import save

from fedssl.artifacts.weight_files import MAX_HEADER_BYTES
from support.coordinator import Coordinator
from support.data_sets import labelled_bytes, public_bytes
from support.servers import Servers
from support.tables import ChangeWatcher
from support.uploads import build_file, digest, split_file

DATA = public_bytes()


def _upload(
    coordinator: Coordinator, content: Any, *, name: str | None = None, token: str | None = None, **params: str
) -> httpx.Response:
    with coordinator.http(token) as http:
        return http.put(f"/v1/artifacts/{name or digest(content)}", params=params, content=content)


def _assert_refused(answer: httpx.Response, events: list[Any], status: int, slug: str, what: str) -> None:
    assert answer.status_code == status, answer.text
    assert answer.json()["type"] == f"urn:fedssl:problem:{slug}"
    assert what in answer.json()["detail"]
    assert [(event.kind, event.message) for event in events] == [("artifact.refused", answer.json()["detail"])]


Change = Callable[[dict[str, Any], bytes], bytes]

TRICKS: dict[str, tuple[bytes | Change, str]] = {
    "a header of weights": (lambda h, b: build_file(json.dumps(h) + " " * 8192, b), "has at most 4096 bytes"),
    "other weights": (save({"projector.weight": np.zeros((4, 4), np.float32)}), "the file is not a data set"),
    "floats": (save({"images": np.zeros((4, 1, 8, 8), np.float32)}), "must be U8 images"),
    "wrong shape": (save({"images": np.zeros((4, 8, 8), np.uint8)}), "must be U8 images"),
    "half a labelled set": (save({"train_images": np.zeros((4, 1, 8, 8), np.uint8)}), "the file is not a data set"),
    "an undeclared tensor": (
        save({"images": np.zeros((4, 1, 8, 8), np.uint8), "secret": np.zeros(1, np.uint8)}),
        "the file is not a data set",
    ),
    "metadata": (lambda h, b: build_file({**h, "__metadata__": {"a": "b"}}, b), "__metadata__"),
    "a gap": (
        lambda h, b: build_file({"images": {**h["images"], "data_offsets": [8, len(b) + 8]}}, b + bytes(8)), "gap",
    ),
    "sizes whose product overflows": (
        lambda h, b: build_file({"images": {**h["images"], "shape": [2**62, 1, 2**62, 8]}}, b),
        "more bytes than can be addressed",
    ),
    "not JSON": (lambda h, b: build_file("{" * 50, b), "cannot be read"),
    "nested deeply": (lambda h, b: build_file('{"a":' * 500, b), "cannot be read"),
    "a name twice": (
        lambda h, b: build_file(json.dumps(h)[:-1] + ", " + json.dumps(h)[1:], b), "a name occurs twice",
    ),
    "less than the header says": (lambda h, b: build_file(h, b[:-1]), "were announced"),
    "more than the header says": (lambda h, b: build_file(h, b + b"\0"), "were announced"),
    "only the header": (lambda h, b: build_file(h), "were announced"),
    "four bytes": (b"\x08\0\0\0", "ended within its safetensors header"),
    "nothing": (b"", "ended within its safetensors header"),
}  # fmt: skip


@pytest.mark.parametrize("case", TRICKS)
def test_a_file_that_is_not_a_data_set_is_refused(
    shared_coordinator: Coordinator, change_watcher: ChangeWatcher, case: str
) -> None:
    content, what = TRICKS[case]
    with change_watcher.nothing_changes() as events:
        answer = _upload(shared_coordinator, content if isinstance(content, bytes) else content(*split_file(DATA)))
    _assert_refused(answer, events, 422, "artifact-rejected", what)


@pytest.mark.parametrize("length", [MAX_HEADER_BYTES + 1, 2**40, 2**64 - 1])
def test_a_header_that_claims_to_be_too_long_is_refused(
    shared_coordinator: Coordinator, change_watcher: ChangeWatcher, length: int
) -> None:
    with change_watcher.nothing_changes() as events:
        answer = _upload(shared_coordinator, build_file(*split_file(DATA), length=length))
    _assert_refused(
        answer, events, 413, "artifact-too-large", f"the header claims {length} bytes; at most {MAX_HEADER_BYTES}"
    )


def test_a_file_with_another_digest_is_refused(shared_coordinator: Coordinator, change_watcher: ChangeWatcher) -> None:
    with change_watcher.nothing_changes() as events:
        answer = _upload(shared_coordinator, DATA, name="0" * 64)
    _assert_refused(answer, events, 422, "artifact-rejected", f"the announced one is {'0' * 64}")


def test_an_upload_without_a_length_is_refused(shared_coordinator: Coordinator, change_watcher: ChangeWatcher) -> None:
    with change_watcher.nothing_changes() as events:
        answer = _upload(shared_coordinator, iter([DATA]), name=digest(DATA))
    _assert_refused(answer, events, 411, "length-required", "send Content-Length")


def test_a_setting_limits_the_size_of_data_sets(servers: Servers, tmp_path: Path) -> None:
    with (
        servers.database() as url,
        Coordinator(url, servers.redis_url, tmp_path / "store", FEDSSL_MAX_DATASET_BYTES=str(len(DATA))) as small,
    ):
        assert _upload(small, DATA).status_code == 201
        answer = _upload(small, public_bytes(num_images=13))
        assert answer.status_code == 413
        assert f"FEDSSL_MAX_DATASET_BYTES allows at most {len(DATA)}" in answer.json()["detail"]


def test_workers_cannot_fetch_data_sets_that_are_not_registered(coordinator: Coordinator) -> None:
    """This holds between upload and registration, and permanently if no registration follows."""
    for content in (DATA, labelled_bytes()):
        assert _upload(coordinator, content).status_code == 201
        assert _upload(coordinator, content).status_code == 200
        with coordinator.http(coordinator.worker_token("a")) as http:
            assert http.get(f"/v1/artifacts/{digest(content)}").status_code == 404


def test_an_operator_cannot_send_an_update_and_a_worker_cannot_send_a_data_set(
    shared_coordinator: Coordinator, change_watcher: ChangeWatcher
) -> None:
    token = shared_coordinator.worker_token("a")
    with change_watcher.nothing_changes() as events:
        answer = _upload(shared_coordinator, DATA, assignment=str(uuid4()))
        assert (answer.status_code, answer.json()["type"]) == (403, "urn:fedssl:problem:forbidden")
        assert "yours is an operator's" in answer.json()["detail"]
        assert events == []
        answer = _upload(shared_coordinator, DATA, token=token)
        assert (answer.status_code, answer.json()["errors"][0]["loc"]) == (422, ["query", "assignment"])
        answer = _upload(shared_coordinator, DATA, token=token, assignment=str(uuid4()))
        assert answer.status_code == 404
