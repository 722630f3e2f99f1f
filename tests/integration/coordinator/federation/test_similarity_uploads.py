"""Uploads of similarities: late ones, and those of clients with different encoders."""

from pathlib import Path
from typing import Any

import pytest

from fedssl.client import Gone
from support.coordinator import Coordinator
from support.federation import tensors_for, tiny_spec, upload
from support.tables import ChangeWatcher, Tables

REDUCER = {"name": "distillation", "num_anchors": 16, "batch_size": 8, "num_epochs": 2}
PUBLIC = {"dataset": "digits", "num_images": 40}
NO_PROJECTOR = {"encoder": {"widths": [4, 8]}, "projector": None}


def _flesd(**reducer: Any) -> dict[str, Any]:
    return {"method": {"name": "flesd", "reducer": {**REDUCER, **reducer}}, "public_data": PUBLIC}


def test_similarities_are_refused_after_the_run_was_stopped(
    coordinator: Coordinator, change_watcher: ChangeWatcher, tmp_path: Path
) -> None:
    worker = coordinator.worker("a")
    run = coordinator.client.create_run(tiny_spec(cohort={"clients": ["a"]}, **_flesd()))
    coordinator.advance(run.id)
    item = worker.claim(0)
    assert item is not None
    coordinator.client.stop(run.id)
    with (
        change_watcher.nothing_changes() as events,
        pytest.raises(Gone, match="this came too late and changes nothing"),
    ):
        upload(worker, item, tensors_for(item.plan.update, 0.5), tmp_path)
    assert [event.kind for event in events] == ["artifact.refused"]


def test_clients_with_different_encoders_send_one_shape(
    coordinator: Coordinator, tables: Tables, tmp_path: Path
) -> None:
    """All clients have the plan of the run: none may send more than another."""
    spec = tiny_spec(
        **_flesd(client_encoders={"wide": {"name": "convnet", "widths": [4, 16]}}),
        model=NO_PROJECTOR,
        cohort={"clients": ["narrow", "wide"], "min_clients": 2},
    )
    workers = {name: coordinator.worker(name) for name in ("narrow", "wide")}
    run = coordinator.client.create_run(spec)
    coordinator.advance(run.id)
    for worker in workers.values():
        item = worker.claim(0)
        assert item is not None
        (tensor,) = item.plan.update
        assert (tensor.name, tensor.shape) == ("factor", (40, 16))
        upload(worker, item, tensors_for(item.plan.update, 0.5), tmp_path)
    assert tables.one("SELECT count(*) FROM uploads") == 2
