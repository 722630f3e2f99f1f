"""Data sets in a run's spec: pinned when the run is created, and fetched only by workers whose work names them."""

from pathlib import Path
from typing import Any

import pytest

from fedssl.client import Conflict, NotFound, Rejected
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.views import PublicDatasetView
from support.coordinator import Coordinator
from support.data_sets import labelled_bytes, public_bytes, write_file
from support.federation import deliver, tiny_spec
from support.servers import Servers
from support.tables import ChangeWatcher, Tables
from support.uploads import digest


@pytest.fixture
def scans(coordinator: Coordinator, tmp_path: Path) -> PublicDatasetView:
    """Return twelve registered public images."""
    return coordinator.client.add_public_dataset("scans", write_file(tmp_path, public_bytes()))


def _spec(dataset: str = "scans", **public: Any) -> RunSpec:
    return tiny_spec(public_data={"dataset": dataset, "num_images": 10, **public})


def _pinned(coordinator: Coordinator, spec: RunSpec, **options: Any) -> str | None:
    view = coordinator.client.create_run(spec, start=False, **options)
    assert view.spec.public_data is not None
    assert view == coordinator.client.run(view.id)
    return view.spec.public_data.digest


def test_a_new_run_is_pinned_to_the_registered_images(coordinator: Coordinator, scans: PublicDatasetView) -> None:
    assert _pinned(coordinator, _spec()) == scans.digest
    assert _pinned(coordinator, _spec(digest=scans.digest)) == scans.digest
    assert _pinned(coordinator, _spec("digits", num_images=300)) is None  # every machine finds them by name


def test_a_built_in_name_refers_to_the_registered_images_once_there_are_any(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    registered = coordinator.client.add_public_dataset("digits", write_file(tmp_path, public_bytes()), split="test")
    assert _pinned(coordinator, _spec("digits", split="test")) == registered.digest
    with pytest.raises(Rejected, match="what is registered as digits is the test split: use that"):
        coordinator.client.create_run(_spec("digits"))


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "an unknown name": ({"dataset": "scams"}, "dataset", "no public data set scams is registered: register it"),
    "a path": ({"dataset": "/etc/passwd"}, "dataset", "no public data set /etc/passwd is registered"),
    "a path out of somewhere": ({"dataset": "../scans"}, "dataset", "is registered: register it"),
    "the name of an evaluation set": ({"dataset": "held-out"}, "dataset", "no public data set held-out is registered"),
    "the digest of other images": ({"digest": "0" * 64}, "digest", "the images registered as scans have digest"),
    "the digest of an evaluation set": ({"digest": digest(labelled_bytes())}, "digest", "have digest"),
    "a digest without a name": (
        {"dataset": "digits", "digest": digest(public_bytes())}, "digest", "no public data set digits is registered",
    ),
    "the evaluation set by name and digest": (
        {"dataset": "held-out", "digest": digest(labelled_bytes())}, "digest", "no public data set held-out",
    ),
    "more images than there are": ({"num_images": 13}, "num_images", "scans has 12 images: ask for no more"),
    "the other split": ({"split": "test"}, "split", "is the train split"),
}  # fmt: skip


def test_invalid_public_data_is_refused_with_the_field(
    coordinator: Coordinator, change_watcher: ChangeWatcher, scans: PublicDatasetView, tmp_path: Path
) -> None:
    coordinator.client.add_evaluation_dataset("held-out", write_file(tmp_path, labelled_bytes()))
    for case, (changes, key, what) in REFUSED.items():
        with change_watcher.nothing_changes() as events, coordinator.http() as http:
            spec = _spec(**{"dataset": "scans", **changes}).model_dump(mode="json")
            answer = http.post("/v1/runs", json={"spec": spec})
        assert answer.status_code == 422, (case, answer.text)
        [error] = answer.json()["errors"]
        assert error["loc"] == ["spec", "public_data", key], case
        assert what in error["msg"], case
        assert [event.kind for event in events] == ["request.refused"], case


@pytest.mark.parametrize("name", ["a\x00b", "\ud800"])
def test_names_that_cannot_be_stored_are_refused(
    shared_coordinator: Coordinator, change_watcher: ChangeWatcher, name: str
) -> None:
    import json

    spec = _spec().model_dump(mode="json")
    for section in ("public_data", "evaluation"):
        body = json.dumps({"spec": {**spec, "public_data": None, section: {"dataset": name}}})
        with change_watcher.nothing_changes(), shared_coordinator.http() as http:
            answer = http.post("/v1/runs", content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == 422


def test_weights_cannot_be_used_as_public_data(coordinator: Coordinator, scans: PublicDatasetView) -> None:
    coordinator.worker("a").close()
    run = coordinator.client.create_run(tiny_spec())
    coordinator.advance(run.id)
    weights = coordinator.client.run(run.id).model
    for dataset in ("scans", str(weights)):
        with pytest.raises(Rejected, match=r"public_data\.digest"):
            coordinator.client.create_run(_spec(dataset, digest=weights))


def test_unregistered_names_are_allowed_if_a_folder_of_public_data_is_set(servers: Servers, tmp_path: Path) -> None:
    """If the folder is set, every machine finds such a data set in its own folder, without registration."""
    (tmp_path / "public").mkdir()
    with (
        servers.database() as url,
        Coordinator(
            url, servers.redis_url, tmp_path / "store", FEDSSL_PUBLIC_DATA=str(tmp_path / "public")
        ) as coordinator,
    ):
        assert _pinned(coordinator, _spec("shared.npz")) is None
        with pytest.raises(Rejected, match="or leave the digest out"):
            coordinator.client.create_run(_spec("shared.npz", digest="0" * 64))


def test_repeating_a_request_returns_the_same_run(coordinator: Coordinator, tmp_path: Path) -> None:
    """This holds whatever was registered meanwhile, because the first answer may have been lost."""
    before = coordinator.client.create_run(_spec("digits"), start=False, idempotency_key="before")
    registered = coordinator.client.add_public_dataset("digits", write_file(tmp_path, public_bytes()))
    spec = _spec("digits")
    after = coordinator.client.create_run(spec, start=False, idempotency_key="after")
    assert after.spec.public_data is not None
    assert after.spec.public_data.digest == registered.digest
    for run, key in ((before, "before"), (after, "after")):
        for _ in range(2):
            assert coordinator.client.create_run(spec, start=False, idempotency_key=key).id == run.id
    pinned = _spec("digits", digest=registered.digest)
    assert coordinator.client.create_run(pinned, start=False, idempotency_key="after").id == after.id
    for other, key in ((pinned, "before"), (_spec("digits", num_images=11), "after"), (tiny_spec(), "after")):
        with pytest.raises(Conflict, match="which has another spec"):
            coordinator.client.create_run(other, start=False, idempotency_key=key)


def test_the_evaluation_set_must_be_registered(
    coordinator: Coordinator, change_watcher: ChangeWatcher, tmp_path: Path
) -> None:
    with change_watcher.nothing_changes():
        for dataset in ("digits", "held-out", "/etc/passwd"):
            with pytest.raises(Rejected, match=rf"no evaluation data set {dataset} is registered: register it"):
                coordinator.client.create_run(tiny_spec(evaluation={"dataset": dataset}))
    coordinator.client.add_evaluation_dataset("held-out", write_file(tmp_path, labelled_bytes()))
    made = coordinator.client.create_run(tiny_spec(evaluation={"dataset": "held-out"}), start=False)
    assert made.spec.evaluation is not None


def test_the_aggregator_reads_public_images_from_its_store(coordinator: Coordinator, scans: PublicDatasetView) -> None:
    """No machine here knows images of that name. If the store loses them, the run waits and gives the reason."""
    coordinator.worker("a").close()
    run = coordinator.client.create_run(_spec())
    path = coordinator.store / scans.digest[:2] / scans.digest[2:4] / scans.digest
    content = path.read_bytes()
    path.unlink()
    coordinator.advance(run.id)
    waiting = coordinator.client.run(run.id)
    assert waiting.model is None
    assert scans.digest in str(waiting.reason)
    path.write_bytes(content)
    coordinator.client.pause(run.id)
    coordinator.client.resume(run.id)  # a resumed run is retried at once
    coordinator.advance(run.id)
    assert coordinator.client.run(run.id).model is not None


def test_a_worker_can_fetch_only_the_public_images_of_its_own_work(
    coordinator: Coordinator, scans: PublicDatasetView, tmp_path: Path
) -> None:
    other = coordinator.client.add_public_dataset("others", write_file(tmp_path, public_bytes(seed=1)))
    workers = {name: coordinator.worker(name) for name in ("a", "b", "c")}
    run = coordinator.client.create_run(
        _spec().model_copy(update={"cohort": tiny_spec(cohort={"clients": ["a", "b"], "min_clients": 2}).cohort})
    )
    coordinator.advance(run.id)

    def may(name: str, wanted: str) -> bool:
        try:
            workers[name].download(wanted, tmp_path / "fetched")
        except NotFound:
            return False
        return digest((tmp_path / "fetched").read_bytes()) == wanted

    assert not may("a", scans.digest)  # offered, but not held yet
    item = workers["a"].claim(0)
    assert item is not None
    assert item.spec.public_data is not None
    assert item.spec.public_data.digest == scans.digest
    assert may("a", scans.digest)
    assert not may("a", other.digest)
    assert not may("b", scans.digest)  # in the cohort, but has claimed nothing
    assert not may("c", scans.digest)  # in another run, or in none
    deliver(workers["a"], item, tmp_path)
    assert may("a", scans.digest)  # it has held the assignment
    coordinator.client.stop(run.id)
    assert may("a", scans.digest)


def test_no_worker_can_fetch_an_evaluation_set(coordinator: Coordinator, tables: Tables, tmp_path: Path) -> None:
    """This includes a worker that knows the digest and takes part in the run that is evaluated on it."""
    labelled = coordinator.client.add_evaluation_dataset("held-out", write_file(tmp_path, labelled_bytes()))
    worker = coordinator.worker("a")
    run = coordinator.client.create_run(tiny_spec(evaluation={"dataset": "held-out"}))
    coordinator.advance(run.id)
    item = worker.claim(0)
    assert item is not None
    with pytest.raises(NotFound, match="no artifact"):
        worker.download(labelled.digest, tmp_path / "fetched")
    # A spec that names it as public images cannot be created. Even one that is written into the table gives no access.
    tables.execute(
        "UPDATE runs SET spec = jsonb_set(spec, '{public_data}', jsonb_build_object('digest', %s::text)) WHERE id = %s",
        labelled.digest,
        run.id,
    )
    with pytest.raises(NotFound, match="no artifact"):
        worker.download(labelled.digest, tmp_path / "fetched")
    with coordinator.http(coordinator.worker_token("a")) as http:
        for headers in ({}, {"Range": "bytes=0-10"}):
            assert http.get(f"/v1/artifacts/{labelled.digest}", headers=headers).status_code == 404
        for path in ("/v1/evaluation-datasets", "/v1/evaluation-datasets/held-out"):
            assert http.get(path).status_code == 403


OTHER_IMAGES: list[tuple[dict[str, Any], str]] = [
    ({"channels": 5}, "held-out are grey or RGB, and the run needs 5 channels"),
    ({"window": {"values": [-1000, 400]}}, "have 8 bits per value: the window of the spec is from -1,000 to 400"),
]


@pytest.mark.parametrize(("data", "words"), OTHER_IMAGES)
def test_images_that_do_not_fit_the_runs_window_or_channels_are_refused(
    coordinator: Coordinator, tmp_path: Path, data: dict[str, Any], words: str
) -> None:
    coordinator.client.add_public_dataset("held-out", write_file(tmp_path, public_bytes()))
    coordinator.client.add_evaluation_dataset("held-out", write_file(tmp_path, labelled_bytes()))
    shape = {"channels": 1, "image_size": 8, **data}
    for spec in (
        tiny_spec(data=shape, evaluation={"dataset": "held-out"}),
        tiny_spec(data=shape, public_data={"dataset": "held-out", "num_images": 10}),
    ):
        with pytest.raises(Rejected, match=words):
            coordinator.client.create_run(spec)
