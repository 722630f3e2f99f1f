"""Weights that are registered under a name: sent once, shown, removed, and restricted to one project."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from fedssl.artifacts.header import header_bytes
from fedssl.artifacts.store import digest_of
from fedssl.artifacts.weight_files import read_weights, registered_digest
from fedssl.client import ApiError, Conflict, NotFound
from fedssl.protocol.plan import TensorSpec
from fedssl_coordinator.storage.artifacts.service import OperatorPermit
from support.coordinator import Coordinator
from support.tables import ChangeWatcher, Tables
from support.weights import encoder_file


def test_registered_weights_are_listed_shown_and_removed(
    coordinator: Coordinator, tables: Tables, tmp_path: Path
) -> None:
    file = encoder_file(tmp_path)
    added = coordinator.client.add_weights("start", file)
    assert added.digest == registered_digest(read_weights(file))
    assert added.source_digest == digest_of(file)
    assert (added.family, added.num_tensors, added.project) == ("fedssl", 12, "default")
    assert added.num_parameters == read_weights(file).num_parameters == 4 * 9 + 8 * 4 * 9 + 4 * (4 + 8)
    assert coordinator.client.add_weights("start", file) == added
    assert [*coordinator.client.weights()] == [added] == [coordinator.client.weights_named("start")]
    assert set(coordinator.tensors(added.digest)) == set(read_weights(file).arrays)
    coordinator.client.remove_weights("start")
    assert [*coordinator.client.weights()] == []
    for gone in (coordinator.client.weights_named, coordinator.client.remove_weights):
        with pytest.raises(NotFound, match="no weights start"):
            gone("start")
    kinds = tables.query("SELECT kind FROM events WHERE kind LIKE 'weights.%%' ORDER BY id")
    assert kinds == [("weights.registered",), ("weights.removed",)]


def test_a_name_always_refers_to_the_same_weights(coordinator: Coordinator, tmp_path: Path) -> None:
    coordinator.client.add_weights("start", encoder_file(tmp_path))
    with pytest.raises(Conflict, match="already names other weights"):
        coordinator.client.add_weights("start", encoder_file(tmp_path, seed=10))


def test_weights_that_were_not_sent_cannot_be_registered(
    coordinator: Coordinator, change_watcher: ChangeWatcher
) -> None:
    body = {"name": "start", "digest": "0" * 64, "family": "fedssl", "source_digest": "0" * 64}
    with change_watcher.nothing_changes(), coordinator.http() as http:
        answer = http.post("/v1/weights", json=body)
    assert answer.status_code == 404, answer.text
    assert "PUT it to /v1/artifacts first" in answer.json()["detail"]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (save({"conv1.weight": torch.zeros(2)}), "is not a data set"),
        (save({"encoder.conv1.weight": torch.zeros(2, dtype=torch.float16)}), "is F16"),
        (save({"encoder.conv1.weight": torch.tensor([1.0, float("nan")])}), "NaN or infinity"),
        (save({"encoder.conv1.weight": torch.zeros(2)}, {"format": "pt"}), "__metadata__"),
    ],
)
def test_weights_that_are_not_in_the_registered_form_are_refused(
    coordinator: Coordinator, tmp_path: Path, data: bytes, reason: str
) -> None:
    path = tmp_path / "sent.safetensors"
    path.write_bytes(data)
    with coordinator.http() as http:
        answer = http.put(f"/v1/artifacts/{digest_of(path)}", content=data)
    assert answer.status_code == 422, answer.text
    assert reason in json.dumps(answer.json())


def test_a_header_longer_than_any_weights_have_is_refused_before_it_is_read(coordinator: Coordinator) -> None:
    length = (10 << 30).to_bytes(8, "little")
    with coordinator.http() as http:
        answer = http.put(f"/v1/artifacts/{'0' * 64}", content=length + b"{" * 100)
    assert answer.status_code in (413, 422), answer.text
    assert "the header claims 10737418240 bytes" in answer.json()["detail"]


def test_a_data_set_cannot_be_registered_as_weights(coordinator: Coordinator, tmp_path: Path) -> None:
    data = save({"images": torch.zeros(3, 1, 8, 8, dtype=torch.uint8)})
    path = tmp_path / "images.safetensors"
    path.write_bytes(data)
    digest = coordinator.client.add_public_dataset("scans", path).digest
    body = {"name": "start", "digest": digest, "family": "fedssl", "source_digest": digest}
    with coordinator.http() as http:
        answer = http.post("/v1/weights", json=body)
    assert answer.status_code == 422, answer.text
    assert "registered weights have names that begin with encoder." in answer.json()["detail"]


def test_the_longest_header_of_weights_is_allowed() -> None:
    tensors = [TensorSpec(name=f"encoder.{'x' * 240}.{n:04}", dtype="F32", shape=(1, 1, 1, 1)) for n in range(8000)]
    assert len(header_bytes(tensors)) < OperatorPermit(1).max_header_bytes


def test_a_digest_gives_no_access_to_the_weights_of_another_project(coordinator: Coordinator, tmp_path: Path) -> None:
    admin = coordinator.client
    admin.create_project("hearts")
    added = admin.add_weights("start", encoder_file(tmp_path))
    token = admin.create_token("operator", project="hearts").secret
    with coordinator.http(token) as http:
        body = {"name": "mine", "digest": added.digest, "family": "fedssl", "source_digest": added.digest}
        assert http.post("/v1/weights", json=body).status_code == 404
        assert http.post("/v1/weights", json={**body, "name": "start"}).status_code == 409
        assert http.get("/v1/weights").json()["items"] == []
        assert http.get("/v1/weights/start").status_code == 404
        assert http.delete("/v1/weights/start").status_code == 404
        assert http.get(f"/v1/artifacts/{added.digest}").status_code == 404
    with pytest.raises(ApiError, match="no project lungs"):
        admin.add_weights("other", encoder_file(tmp_path, seed=10), project="lungs")
    assert admin.add_weights("theirs", encoder_file(tmp_path), project="hearts").digest == added.digest
    with coordinator.http(token) as http:
        assert [row["name"] for row in http.get("/v1/weights").json()["items"]] == ["theirs"]
