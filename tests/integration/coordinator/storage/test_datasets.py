"""Data sets: registered once, listed, and never changed under their name."""

import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from fedssl.client import Conflict, NotAllowed, NotFound, Rejected
from fedssl.protocol.views import EvaluationDatasetView, PublicDatasetView
from support.coordinator import Coordinator
from support.data_sets import labelled_bytes, public_bytes, write_file
from support.tables import ChangeWatcher, Tables
from support.uploads import digest


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_file(tmp_path, public_bytes())


def _upload(coordinator: Coordinator, content: bytes) -> httpx.Response:
    with coordinator.http() as http:
        return http.put(f"/v1/artifacts/{digest(content)}", content=content)


def _register(coordinator: Coordinator, kind: str, body: dict[str, Any]) -> httpx.Response:
    with coordinator.http() as http:
        return http.post(f"/v1/{kind}-datasets", json=body)


def test_public_images_are_registered_and_shown(coordinator: Coordinator, tables: Tables, source: Path) -> None:
    sent: list[int] = []
    view = coordinator.client.add_public_dataset("scans", source, split="test", on_bytes=sent.append)
    content = source.read_bytes()
    assert view == PublicDatasetView(
        name="scans",
        digest=digest(content),
        split="test",
        num_images=12,
        channels=1,
        image_size=8,
        created_at=view.created_at,
    )
    assert sent == [len(content)]
    assert coordinator.client.public_dataset("scans") == view
    assert list(coordinator.client.public_datasets()) == [view]
    assert list(coordinator.client.evaluation_datasets()) == []
    with coordinator.http() as http:
        assert http.get(f"/v1/artifacts/{view.digest}").content == content
    [(kind, message)] = tables.query("SELECT kind, message FROM events WHERE kind LIKE 'dataset.%%'")
    assert (kind, message) == ("dataset.registered", "public data set scans: 12 images of its test split")


def test_labelled_images_are_registered_and_shown(coordinator: Coordinator, tmp_path: Path) -> None:
    source = write_file(tmp_path, labelled_bytes())
    view = coordinator.client.add_evaluation_dataset("held-out", source)
    assert view == EvaluationDatasetView(
        name="held-out",
        digest=digest(source.read_bytes()),
        num_train=8,
        num_test=4,
        num_classes=4,
        channels=1,
        image_size=8,
        created_at=view.created_at,
    )
    assert coordinator.client.evaluation_dataset("held-out") == view
    assert list(coordinator.client.evaluation_datasets()) == [view]
    assert list(coordinator.client.public_datasets()) == []


def test_registering_the_same_images_again_changes_nothing_and_sends_no_bytes(
    coordinator: Coordinator, change_watcher: ChangeWatcher, source: Path
) -> None:
    first = coordinator.client.add_public_dataset("scans", source)
    sent: list[int] = []
    with change_watcher.nothing_changes() as events:
        assert coordinator.client.add_public_dataset("scans", source, on_bytes=sent.append) == first
        body = {"name": "scans", "digest": first.digest}
        assert _register(coordinator, "public", body).status_code == 200
        assert _upload(coordinator, source.read_bytes()).status_code == 200
    assert (sent, events) == ([], [])
    other = coordinator.client.add_public_dataset("scans-again", source, on_bytes=sent.append)
    assert other.digest == first.digest
    assert sent == []  # the images were already there


def test_a_name_always_refers_to_the_same_images(
    coordinator: Coordinator, change_watcher: ChangeWatcher, tmp_path: Path
) -> None:
    first = coordinator.client.add_public_dataset("scans", write_file(tmp_path, public_bytes()))
    coordinator.client.add_evaluation_dataset("scans", write_file(tmp_path, labelled_bytes()))  # in a separate list
    others = {"public": digest(public_bytes(seed=1)), "evaluation": digest(labelled_bytes(seed=1))}
    _upload(coordinator, public_bytes(seed=1))
    _upload(coordinator, labelled_bytes(seed=1))
    with change_watcher.nothing_changes():
        for kind, other in others.items():
            answer = _register(coordinator, kind, {"name": "scans", "digest": other})
            assert (answer.status_code, answer.json()["type"]) == (409, "urn:fedssl:problem:conflict")
            assert "scans already names other images" in answer.json()["detail"]
        with pytest.raises(Conflict, match="choose another name"):
            coordinator.client.add_public_dataset("scans", write_file(tmp_path, public_bytes()), split="test")
    assert coordinator.client.public_dataset("scans") == first


def test_concurrent_registrations_of_one_name_accept_only_one_file(coordinator: Coordinator, tables: Tables) -> None:
    contents = [public_bytes(seed=seed) for seed in range(2)]
    for content in contents:
        _upload(coordinator, content)
    statuses: list[int] = []

    def register(content: bytes) -> None:
        statuses.append(_register(coordinator, "public", {"name": "s", "digest": digest(content)}).status_code)

    threads = [threading.Thread(target=register, args=(contents[i % 2],)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(statuses) == [200, 200, 201, 409, 409, 409]
    assert tables.one("SELECT count(*) FROM public_datasets") == 1


def test_lists_are_paged_by_name(coordinator: Coordinator, source: Path, tmp_path: Path) -> None:
    names = ["b", "a.1", "a", "z9", "0"]
    labelled = tmp_path / "labelled"
    labelled.write_bytes(labelled_bytes())
    for name in names:
        coordinator.client.add_public_dataset(name, source)
        coordinator.client.add_evaluation_dataset(name, labelled)
    for kind in ("public", "evaluation"):
        seen: list[str] = []
        with coordinator.http() as http:
            query: dict[str, Any] = {"limit": 2}
            while True:
                page = http.get(f"/v1/{kind}-datasets", params=query).json()
                seen += [item["name"] for item in page["items"]]
                if page["next_cursor"] is None:
                    break
                query["cursor"] = page["next_cursor"]
            assert http.get(f"/v1/{kind}-datasets", params={"cursor": "x"}).status_code == 422
        assert seen == sorted(names)


@pytest.mark.parametrize("kind", ["public", "evaluation"])
@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../etc/passwd", "/etc/passwd", "a/b", "a\\b", "a..b", ".a", "a.", "-a", "A", "a b", "a\n", "a\x00",
     "é", "a" * 64, "%2e%2e", "~", "$HOME", None, 7],
)  # fmt: skip
def test_invalid_names_are_refused(
    shared_coordinator: Coordinator, change_watcher: ChangeWatcher, kind: str, name: object
) -> None:
    with change_watcher.nothing_changes():
        answer = _register(shared_coordinator, kind, {"name": name, "digest": "0" * 64})
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["loc"] == ["name"]


@pytest.mark.parametrize("kind", ["public", "evaluation"])
def test_invalid_registrations_are_refused_with_the_field(
    shared_coordinator: Coordinator, change_watcher: ChangeWatcher, kind: str
) -> None:
    bodies: list[tuple[dict[str, Any], str]] = [
        ({"name": "new"}, "digest"),
        ({"digest": "0" * 64}, "name"),
        ({"name": "new", "digest": "../../etc/passwd"}, "digest"),
        ({"name": "new", "digest": "0" * 64, "path": "/etc/passwd"}, "path"),
        ({"name": "new", "digest": "0" * 64, "split": "validation"}, "split"),
    ]
    with change_watcher.nothing_changes():
        for body, where in bodies:
            answer = _register(shared_coordinator, kind, body)
            assert answer.status_code == 422, body
            assert answer.json()["errors"][0]["loc"] == [where]
        answer = _register(shared_coordinator, kind, {"name": "new", "digest": "0" * 64})
        assert (answer.status_code, answer.json()["type"]) == (404, "urn:fedssl:problem:not-found")
        assert "PUT it to /v1/artifacts first" in answer.json()["detail"]


def test_asking_for_an_unknown_or_invalid_name_is_an_error(coordinator: Coordinator) -> None:
    with pytest.raises(NotFound, match=r"no data set scans: `GET /v1/public-datasets` lists"):
        coordinator.client.public_dataset("scans")
    with pytest.raises(NotFound, match=r"no data set scans: `GET /v1/evaluation-datasets` lists"):
        coordinator.client.evaluation_dataset("scans")
    for name, error in (("A", Rejected), ("..%2fruns", Rejected), ("../runs", NotFound), (".hidden", Rejected)):
        with pytest.raises(error):
            coordinator.client.public_dataset(name)


def test_a_file_of_the_other_kind_is_refused(coordinator: Coordinator, change_watcher: ChangeWatcher) -> None:
    """In particular, images that encoders are evaluated on cannot be made public by their digest."""
    _upload(coordinator, public_bytes())
    _upload(coordinator, labelled_bytes())
    with change_watcher.nothing_changes():
        for kind, content in (("public", labelled_bytes()), ("evaluation", public_bytes())):
            answer = _register(coordinator, kind, {"name": "a", "digest": digest(content)})
            assert (answer.status_code, answer.json()["type"]) == (422, "urn:fedssl:problem:artifact-rejected")
            assert "the file is no" in answer.json()["detail"]


def test_the_weights_of_a_run_cannot_be_registered_as_a_data_set(
    coordinator: Coordinator, change_watcher: ChangeWatcher
) -> None:
    from support.federation import tiny_spec

    coordinator.worker("a").close()
    run = coordinator.client.create_run(tiny_spec())
    coordinator.advance(run.id)
    weights = coordinator.client.run(run.id).model
    with change_watcher.nothing_changes():
        for kind in ("public", "evaluation"):
            answer = _register(coordinator, kind, {"name": "a", "digest": weights})
            assert (answer.status_code, answer.json()["type"]) == (422, "urn:fedssl:problem:artifact-rejected")


def test_invalid_labels_are_refused(coordinator: Coordinator, change_watcher: ChangeWatcher) -> None:
    import numpy as np
    from safetensors.numpy import load, save

    arrays = load(labelled_bytes())
    content = save({**arrays, "test_labels": np.array([0, 1, 2, -1])})
    assert _upload(coordinator, content).status_code == 201
    with change_watcher.nothing_changes():
        answer = _register(coordinator, "evaluation", {"name": "a", "digest": digest(content)})
    assert answer.status_code == 422
    assert "they are -1 to 3" in answer.json()["detail"]


def test_images_that_the_store_has_lost_are_uploaded_again(coordinator: Coordinator, source: Path) -> None:
    """Their digest is known, but it cannot be registered until they were sent again."""
    known = digest(source.read_bytes())
    _upload(coordinator, source.read_bytes())
    (coordinator.store / known[:2] / known[2:4] / known).unlink()
    assert _register(coordinator, "public", {"name": "a", "digest": known}).status_code == 404
    assert coordinator.client.add_public_dataset("a", source).digest == known


def test_a_worker_can_neither_register_nor_list_data_sets(coordinator: Coordinator, source: Path) -> None:
    from fedssl.client import Client, Retry

    with Client(coordinator.url, coordinator.worker_token("a"), retry=Retry(seconds=0)) as client:
        for call in (client.public_datasets, client.evaluation_datasets):
            with pytest.raises(NotAllowed, match="yours is a worker's"):
                list(call())
        with pytest.raises(NotAllowed, match="yours is a worker's"):
            client.add_public_dataset("a", source)
