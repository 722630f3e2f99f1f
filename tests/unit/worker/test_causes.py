"""The cause that a worker reports when it declines work."""

import math

import pytest

from fedssl.artifacts.tensors import Tensors
from fedssl.errors import DataError
from fedssl.protocol.states import Cause
from fedssl_worker import executor as executor_module
from fedssl_worker.causes import reason_of
from fedssl_worker.data import OwnImages

from .conftest import CPU, Setting, make_spec, write_images


def _scaled(setting: Setting, factor: float) -> Tensors:
    update = setting.train_directly(make_spec(), 1)[0]
    return {name: tensor * factor if tensor.is_floating_point() else tensor for name, tensor in update.items()}


def _cause(setting: Setting) -> Cause | None:
    setting.restart().step()
    assert setting.coordinator.submissions == []
    (decline,) = setting.coordinator.declined
    return decline.cause


def test_a_broadcast_of_nan_is_not_blamed_on_the_learning_rate(setting: Setting) -> None:
    setting.offer(make_spec(), 1, _scaled(setting, math.nan))
    assert _cause(setting) == Cause.COORDINATOR
    assert "holds NaN or infinity: no training can start from it" in setting.coordinator.declined[0].reason


@pytest.mark.parametrize("damage", ["missing", "damaged", "too large"])
def test_the_cause_of_a_broadcast_that_cannot_be_fetched_is_the_coordinator(setting: Setting, damage: str) -> None:
    item = setting.item(make_spec(), 1)
    content = setting.coordinator.artifacts.pop(item.broadcast)
    if damage != "missing":
        setting.coordinator.artifacts[item.broadcast] = content * 100 if damage == "too large" else content[:-1] + b"!"
    setting.coordinator.offer(item)
    assert _cause(setting) == Cause.COORDINATOR


def test_frozen_tensors_with_another_digest_are_declined(setting: Setting) -> None:
    model = make_spec().model_dump(mode="json")["model"]
    item = setting.item(make_spec(model={**model, "trainable": ["blocks.1.*"]}), 1)
    assert item.frozen is not None
    content = setting.coordinator.artifacts[item.frozen]
    setting.coordinator.artifacts[item.frozen] = content[:-1] + b"!"
    setting.coordinator.offer(item)
    assert _cause(setting) == Cause.COORDINATOR
    assert "came with sha256" in setting.coordinator.declined[0].reason


def test_the_cause_of_images_that_do_not_fit_is_the_clients_data(setting: Setting) -> None:
    path = write_images(setting.folder / "bounded.npz")
    setting.images = OwnImages(str(path), CPU, image_size=16, channels=1)
    setting.offer(make_spec(data={"channels": 3, "image_size": 16}), 1)
    assert _cause(setting) == Cause.CLIENT_DATA


def test_work_for_another_version_of_timm_is_declined_before_anything_is_fetched(setting: Setting) -> None:
    model = {"encoder": {"name": "timm:test_resnet", "timm_version": "0.9.0", "timm_width": 96}}
    item = setting.item(make_spec(), 1)
    setting.coordinator.offer(item.model_copy(update={"spec": make_spec(model=model)}))
    assert _cause(setting) == Cause.CLIENT_MACHINE
    assert "needs timm 0.9.0, and 1." in setting.coordinator.declined[0].reason
    assert "GET artifact" not in setting.coordinator.calls


def test_the_cause_of_divergence_is_the_spec(setting: Setting) -> None:
    spec = make_spec(training={"batch_size": 8, "local_epochs": 30, "optimizer": {"learning_rate": 100.0}})
    setting.offer(spec, 1, _scaled(setting, 1e30))
    assert _cause(setting) == Cause.SPEC


@pytest.mark.parametrize("error", [MemoryError(), ValueError("odd"), RuntimeError("no")])
def test_the_cause_of_device_and_system_errors_is_the_clients_machine(
    setting: Setting, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise error

    monkeypatch.setattr(executor_module, "run_local_round", fail)
    setting.offer(make_spec(), 1)
    assert _cause(setting) == Cause.CLIENT_MACHINE


def test_the_cause_of_an_unknown_method_is_the_clients_machine(setting: Setting) -> None:
    setting.offer(make_spec(), 1)
    setting.coordinator.rename = (b'"name":"fedbyol"', b'"name":"fednewest"')
    assert _cause(setting) == Cause.CLIENT_MACHINE


def test_the_cause_of_a_plan_that_differs_is_the_coordinator(setting: Setting) -> None:
    item = setting.item(make_spec(), 1)
    plan = item.plan.model_copy(update={"update": item.plan.update[:-1]})
    setting.coordinator.offer(item.model_copy(update={"plan": plan}))
    assert _cause(setting) == Cause.COORDINATOR


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
