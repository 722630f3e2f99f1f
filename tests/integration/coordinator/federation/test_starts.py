"""Runs that start from registered weights, or from a finished run."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from fedssl.artifacts.tensors import Tensors
from fedssl.client import NotFound
from fedssl.client.model_card import card, lineage_of
from fedssl.protocol.model import EncoderConfig
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.states import Outcome, RunState
from fedssl.protocol.views import RunView
from fedssl_coordinator.storage.retention import collection
from support.coordinator import Coordinator
from support.federation import tiny_spec
from support.scenario import Scenario
from support.tables import ChangeWatcher, Tables
from support.tensors import are_equal
from support.weights import TINY_ENCODER, encoder_file, encoder_tensors

NOBODY = "00000000-0000-0000-0000-000000000000"


def starting(**initial: Any) -> RunSpec:
    model = tiny_spec().model_dump(mode="json")["model"]
    return tiny_spec(model={**model, "initial": initial})


def encoder_of(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name.startswith("encoder.")}


def prepared(coordinator: Coordinator, spec: RunSpec) -> RunView:
    run = coordinator.client.create_run(spec)
    coordinator.advance(run.id)
    return coordinator.client.run(run.id)


@pytest.fixture
def finished(coordinator: Coordinator, tables: Tables, tmp_path: Path) -> Scenario:
    """Return a completed run of two rounds."""
    scenario = Scenario(coordinator, tables, tmp_path, "a")
    for value in (1.0, 2.0):
        scenario.work("a", value=value)
        scenario.advance()
    assert scenario.run.outcome is Outcome.COMPLETED
    return scenario


def test_the_first_broadcast_is_the_registered_encoder(
    coordinator: Coordinator, tables: Tables, tmp_path: Path
) -> None:
    added = coordinator.client.add_weights("start", encoder_file(tmp_path))
    run = prepared(coordinator, starting(weights="start"))
    assert run.spec.model.initial is not None
    assert run.spec.model.initial.digest == added.digest
    first = coordinator.tensors(str(run.initial_model))
    assert are_equal(encoder_of(first), encoder_tensors())
    random = coordinator.tensors(str(prepared(coordinator, tiny_spec()).initial_model))
    heads = [name for name in random if not name.startswith("encoder.")]
    assert heads
    assert all(torch.equal(first[name], random[name]) for name in heads)
    [(message, data)] = tables.query(
        "SELECT message, data FROM events WHERE run_id = %s AND kind = 'run.prepared'", run.id
    )
    assert message == "encoder from weights start: 12 tensors loaded; heads made from seed 0"
    assert data["initial_weights"] == added.digest
    lineage = lineage_of(run, [], "m", "e")
    assert lineage["start"] == {"weights": "start", "adapt": [], "digest": added.digest}
    assert f"| weights start | {added.digest} |" in card(run, [], [], lineage)


def test_a_run_can_start_from_any_round_of_a_finished_run(coordinator: Coordinator, finished: Scenario) -> None:
    source = finished.run
    weights = [source.initial_model, finished.rounds[1].broadcast, source.model]
    for number, digest in enumerate(weights):
        run = prepared(coordinator, starting(run=str(source.id), round=number))
        assert run.spec.model.initial is not None
        assert run.spec.model.initial.digest == digest
        first = coordinator.tensors(str(run.initial_model))
        assert are_equal(encoder_of(first), encoder_of(coordinator.tensors(str(digest))))
    last = prepared(coordinator, starting(run=str(source.id)))
    assert last.spec.model.initial is not None
    assert (last.spec.model.initial.round, last.spec.model.initial.digest) == (2, source.model)


def test_images_that_are_prepared_differently_from_those_of_the_start_are_an_event(
    coordinator: Coordinator, finished: Scenario
) -> None:
    spec = starting(run=str(finished.id))
    events = []
    for changes in ({}, {"mean": [0.5], "std": [0.2], "image_size": 12}):
        changed = spec.model_copy(update={"data": spec.data.model_validate({**spec.data.model_dump(), **changes})})
        log = coordinator.client.event_log(coordinator.client.create_run(changed, start=False).id)
        events.append([event.message for event in log if event.kind == "run.start_differs"])
    assert events == [
        [],
        [
            f"run {finished.id}, whose weights are the start, had other images: data.mean was not set, and is [0.5]; "
            "data.std was not set, and is [0.2]; data.image_size was 8, and is 12"
        ],
    ]


def test_repeating_a_request_returns_the_same_run(coordinator: Coordinator, finished: Scenario, tmp_path: Path) -> None:
    coordinator.client.add_weights("start", encoder_file(tmp_path))
    for spec in (starting(weights="start"), starting(run=str(finished.id))):
        key = f"key-{spec.model.initial}".replace(" ", "")[:100]
        first, again = (coordinator.client.create_run(spec, idempotency_key=key, start=False) for _ in range(2))
        assert first == again


def test_weights_are_kept_for_a_run_that_names_them(
    coordinator: Coordinator, finished: Scenario, tables: Tables, tmp_path: Path
) -> None:
    """The registered name, or the run that the weights come from, may be deleted before the new run begins."""
    added = coordinator.client.add_weights("start", encoder_file(tmp_path))
    one = coordinator.client.create_run(starting(weights="start"), start=False)
    other = coordinator.client.create_run(starting(run=str(finished.id)), start=False)
    digest, unused = str(finished.run.model), str(finished.run.initial_model)
    coordinator.client.remove_weights("start")
    coordinator.client.delete_run(finished.id)
    tables.execute("UPDATE artifacts SET touched_at = now() - interval '1 year'")
    collection.collect()
    with pytest.raises(NotFound):
        coordinator.client.download_artifact(unused, tmp_path / "unused")
    for run, expected in ((one, added.digest), (other, digest)):
        coordinator.client.start(run.id)
        coordinator.advance(run.id)
        first = coordinator.tensors(str(coordinator.client.run(run.id).initial_model))
        assert are_equal(encoder_of(first), encoder_of(coordinator.tensors(expected)))


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "an unknown name": ({"weights": "nobody"}, "weights", "no weights nobody are registered"),
    "a path": ({"weights": "/etc/passwd"}, "weights", "no weights /etc/passwd are registered"),
    "another digest": ({"weights": "start", "digest": "0" * 64}, "digest", "have digest"),
    "a run that does not exist": ({"run": NOBODY}, "run", "it does not exist, or was deleted"),
    "a round that was not trained": ({"run": "finished", "round": 3}, "round", "has 2 rounds"),
    "another digest of a run": ({"run": "finished", "digest": "0" * 64}, "digest", "have digest"),
    "a run that goes on": ({"run": "unfinished"}, "run", "only a finished run"),
}


def test_an_invalid_start_is_refused_with_the_key_and_the_reason(
    coordinator: Coordinator, finished: Scenario, change_watcher: ChangeWatcher, tmp_path: Path
) -> None:
    coordinator.client.add_weights("start", encoder_file(tmp_path))
    runs = {"finished": str(finished.id), "unfinished": str(coordinator.client.create_run(tiny_spec()).id)}
    for case, (given, key, reason) in REFUSED.items():
        initial = {name: runs.get(str(value), value) for name, value in given.items()}
        with change_watcher.nothing_changes() as events, coordinator.http() as http:
            answer = http.post("/v1/runs", json={"spec": starting(**initial).model_dump(mode="json")})
        assert answer.status_code == 422, (case, answer.text)
        [error] = answer.json()["errors"]
        assert error["loc"] == ["spec", "model", "initial", key], case
        assert reason in error["msg"], case
        assert [event.kind for event in events] == ["request.refused"], case


def test_a_run_with_another_encoder_is_refused(coordinator: Coordinator, finished: Scenario) -> None:
    spec = starting(run=str(finished.id))
    wider = spec.model.model_copy(update={"encoder": EncoderConfig(widths=(4, 9))})
    with pytest.raises(Exception, match="trained the encoder convnet 4-8, and this one has convnet 4-9"):
        coordinator.client.create_run(spec.model_copy(update={"model": wider}))
    with pytest.raises(Exception, match="name the first convolution here"):
        coordinator.client.create_run(starting(run=str(finished.id)).model_copy(update={"data": RunSpec().data}))


def test_weights_that_do_not_fit_end_the_run_before_any_training(coordinator: Coordinator, tmp_path: Path) -> None:
    coordinator.client.add_weights("start", encoder_file(tmp_path, EncoderConfig(widths=(4, 9))))
    run = prepared(coordinator, starting(weights="start"))
    assert (run.state, run.outcome, run.current_round) == (RunState.FINISHED, Outcome.FAILED, None)
    assert "the weights do not fit model.encoder: 7 tensors loaded; 5 misfit (" in str(run.reason)
    assert "blocks.1.conv.weight: [9, 4, 3, 3] in the file, [8, 4, 3, 3] in the network" in str(run.reason)


def test_input_channels_are_adapted_as_the_spec_asks(coordinator: Coordinator, tmp_path: Path) -> None:
    coordinator.client.add_weights("colour", encoder_file(tmp_path, TINY_ENCODER, channels=3))
    run = prepared(coordinator, starting(weights="colour", adapt=["blocks.0.conv"]))
    kernel = encoder_tensors(TINY_ENCODER, channels=3)["encoder.blocks.0.conv.weight"]
    found = coordinator.tensors(str(run.initial_model))["encoder.blocks.0.conv.weight"]
    assert torch.equal(found, kernel.double().sum(1, keepdim=True).float())


@pytest.mark.parametrize("damage", ["rotten", "missing"])
def test_a_run_waits_for_weights_that_the_store_has_lost(
    coordinator: Coordinator, tables: Tables, tmp_path: Path, damage: str
) -> None:
    file = encoder_file(tmp_path)
    added = coordinator.client.add_weights("start", file)
    path = coordinator.store / added.digest[:2] / added.digest[2:4] / added.digest
    content = path.read_bytes()
    if damage == "rotten":
        path.write_bytes(content[:-1] + b"\xff")
        os.utime(path, (0, 0))  # a new file may be a backup that is being restored
    else:
        path.unlink()
    run = prepared(coordinator, starting(weights="start"))
    assert (run.state, run.initial_model, run.current_round) == (RunState.RUNNING, None, None)
    assert "start of the run, weights start" in str(run.reason)
    path.write_bytes(content)
    tables.execute("UPDATE runs SET retry_at = now() - interval '1 second'")
    coordinator.advance(run.id)
    first = coordinator.tensors(str(coordinator.client.run(run.id).initial_model))
    assert are_equal(encoder_of(first), encoder_tensors())


def test_weights_and_runs_of_another_project_cannot_be_a_start(
    coordinator: Coordinator, finished: Scenario, tmp_path: Path
) -> None:
    coordinator.client.create_project("hearts")
    coordinator.client.add_weights("start", encoder_file(tmp_path))
    digest = str(finished.run.model)
    for initial in ({"weights": "start"}, {"run": str(finished.id)}, {"run": str(finished.id), "digest": digest}):
        with pytest.raises(Exception, match=r"no weights start|there is no run"):
            coordinator.client.create_run(starting(**initial), project="hearts")


def test_a_worker_cannot_download_the_weights_of_the_start(coordinator: Coordinator, tmp_path: Path) -> None:
    added = coordinator.client.add_weights("start", encoder_file(tmp_path))
    with coordinator.worker("a") as worker:
        run = prepared(coordinator, starting(weights="start"))
        item = worker.claim(0)
        assert item is not None
        assert item.spec.model.initial == run.spec.model.initial
        with pytest.raises(NotFound):
            worker.download(added.digest, tmp_path / "stolen")
