"""The cause that a worker reports when it declines work."""

import math

import pytest

from fedssl.artifacts.tensors import Tensors
from fedssl.errors import DataError
from fedssl.protocol.states import Cause
from fedssl_worker import executor as executor_module
from fedssl_worker.causes import reason_of
from fedssl_worker.data import OwnImages

from .conftest import CPU, WorkerHarness, make_spec, write_images


def _scaled(harness: WorkerHarness, factor: float) -> Tensors:
    update = harness.train_directly(make_spec(), 1)[0]
    return {name: tensor * factor if tensor.is_floating_point() else tensor for name, tensor in update.items()}


def _cause(harness: WorkerHarness) -> Cause | None:
    harness.restart().step()
    assert harness.coordinator.submissions == []
    (decline,) = harness.coordinator.declined
    return decline.cause


def test_a_broadcast_of_nan_is_not_blamed_on_the_learning_rate(harness: WorkerHarness) -> None:
    harness.offer(make_spec(), 1, _scaled(harness, math.nan))
    assert _cause(harness) == Cause.COORDINATOR
    assert "holds NaN or infinity: no training can start from it" in harness.coordinator.declined[0].reason


@pytest.mark.parametrize("damage", ["missing", "damaged", "too large"])
def test_the_cause_of_a_broadcast_that_cannot_be_fetched_is_the_coordinator(
    harness: WorkerHarness, damage: str
) -> None:
    item = harness.item(make_spec(), 1)
    content = harness.coordinator.artifacts.pop(item.broadcast)
    if damage != "missing":
        harness.coordinator.artifacts[item.broadcast] = content * 100 if damage == "too large" else content[:-1] + b"!"
    harness.coordinator.offer(item)
    assert _cause(harness) == Cause.COORDINATOR


def test_frozen_tensors_with_another_digest_are_declined(harness: WorkerHarness) -> None:
    model = make_spec().model_dump(mode="json")["model"]
    item = harness.item(make_spec(model={**model, "trainable": ["blocks.1.*"]}), 1)
    assert item.frozen is not None
    content = harness.coordinator.artifacts[item.frozen]
    harness.coordinator.artifacts[item.frozen] = content[:-1] + b"!"
    harness.coordinator.offer(item)
    assert _cause(harness) == Cause.COORDINATOR
    assert "came with sha256" in harness.coordinator.declined[0].reason


def test_the_cause_of_images_that_do_not_fit_is_the_clients_data(harness: WorkerHarness) -> None:
    path = write_images(harness.folder / "bounded.npz")
    harness.images = OwnImages(str(path), CPU, image_size=16, channels=1)
    harness.offer(make_spec(data={"channels": 3, "image_size": 16}), 1)
    assert _cause(harness) == Cause.CLIENT_DATA


def test_work_for_another_version_of_timm_is_declined_before_anything_is_fetched(harness: WorkerHarness) -> None:
    model = {"encoder": {"name": "timm:test_resnet", "timm_version": "0.9.0", "timm_width": 96}}
    item = harness.item(make_spec(), 1)
    harness.coordinator.offer(item.model_copy(update={"spec": make_spec(model=model)}))
    assert _cause(harness) == Cause.CLIENT_MACHINE
    assert "needs timm 0.9.0, and 1." in harness.coordinator.declined[0].reason
    assert "GET artifact" not in harness.coordinator.calls


def test_the_cause_of_divergence_is_the_spec(harness: WorkerHarness) -> None:
    spec = make_spec(training={"batch_size": 8, "local_epochs": 3, "optimizer": {"learning_rate": 100.0}})
    harness.offer(spec, 1, _scaled(harness, 1e30))
    assert _cause(harness) == Cause.SPEC


@pytest.mark.parametrize("error", [MemoryError(), ValueError("odd"), RuntimeError("no")])
def test_the_cause_of_device_and_system_errors_is_the_clients_machine(
    harness: WorkerHarness, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise error

    monkeypatch.setattr(executor_module, "run_local_round", fail)
    harness.offer(make_spec(), 1)
    assert _cause(harness) == Cause.CLIENT_MACHINE


def test_the_cause_of_an_unknown_method_is_the_clients_machine(harness: WorkerHarness) -> None:
    harness.offer(make_spec(), 1)
    harness.coordinator.rename = (b'"name":"fedbyol"', b'"name":"fednewest"')
    assert _cause(harness) == Cause.CLIENT_MACHINE


def test_the_cause_of_a_plan_that_differs_is_the_coordinator(harness: WorkerHarness) -> None:
    item = harness.item(make_spec(), 1)
    plan = item.plan.model_copy(update={"update": item.plan.update[:-1]})
    harness.coordinator.offer(item.model_copy(update={"plan": plan}))
    assert _cause(harness) == Cause.COORDINATOR


@pytest.mark.parametrize(
    ("message", "is_sent"),
    [
        ("it cannot be read: [Errno 21] Is a directory: '/home/ada/.fedssl-worker/runs/1/note.json'", False),
        ("the cached images in ~/.cache/fedssl are damaged", False),
        ("/v1/artifacts/93fe came with sha256 6ba7", True),
        ("https://fed.example.org/fedssl shows a certificate that is not trusted; 1 / 2 and and/or are no paths", True),
    ],
)
def test_reasons_with_paths_of_this_machine_are_replaced(message: str, is_sent: bool) -> None:  # noqa: FBT001
    expected = message if is_sent else "this worker cannot do the work (DataError): see its log"
    assert reason_of(DataError(message)) == expected
