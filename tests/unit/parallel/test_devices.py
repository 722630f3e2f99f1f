"""One client's round on several devices gives the result of one device for every method, or a clear error.

The devices are CPUs, whose processes communicate through gloo. Processes on GPUs do the same through NCCL.
"""

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from fedssl.artifacts.tensors import Tensors
from fedssl.engine import LocalProgress, LocalResult
from fedssl.errors import Cancelled, LocalError, MethodError
from fedssl.parallel.devices import train_on_devices
from fedssl.protocol.runs import RunSpec
from support.forked_clients import forked_processes
from support.methods import context
from support.preloaded import Forked
from support.rounds import client_data, local_round, start
from support.several_devices import assert_close, digits_spec

CPUS = ("cpu", "cpu")


@pytest.fixture(autouse=True)
def forks() -> Iterator[list[Forked]]:
    with forked_processes() as started:
        yield started


def _together(spec: RunSpec, received: Tensors, state: Tensors | None = None, number: int = 1) -> LocalResult:
    devices = CPUS if spec.training.batch_size > 2 else ("cpu",) * 3
    return train_on_devices(received, state, client_data(spec, "client-0"), context(spec, number, "client-0"), devices)


CASES: dict[str, dict[str, Any]] = {
    "fedsimclr": {},  # all images are negatives of each other
    "fedbyol": {},  # a target network by moving average, which is kept
    "feddino": {  # multi-crop, a center, and prototypes that are frozen in the first round
        "data": {"channels": 1, "image_size": 8, "local_crops": {"num_crops": 2, "image_size": 6}}
    },
}


@pytest.mark.parametrize(
    "name", ["fedsimclr", *(pytest.param(name, marks=pytest.mark.full) for name in ("fedbyol", "feddino"))]
)
def test_a_round_on_several_devices_equals_that_of_one_device(name: str) -> None:
    spec = digits_spec(name, **CASES[name])
    received = start(spec).received
    first = local_round(spec, received)
    assert_close(_together(spec, received), first, received)


@pytest.mark.full
@pytest.mark.parametrize("name", ["fedbarlow", "fedmae", "fedmoco", "fedx", "flesd", "orchestra", "scaffold"])
def test_a_second_round_on_several_devices_equals_that_of_one_device(name: str) -> None:
    spec = digits_spec(name)
    received = start(spec).received
    state = local_round(spec, received).state
    second = local_round(spec, received, number=2, state=state)
    assert_close(_together(spec, received, state, 2), second, received)


@pytest.mark.full
def test_micro_batches_and_checkpointing_give_the_result_of_one_device() -> None:
    training = {"batch_size": 32, "local_epochs": 1, "num_micro_batches": 2, "gradient_checkpointing": True}
    spec = digits_spec("fedsimclr", training={**training, "optimizer": {"max_gradient_norm": 1.0}})
    received = start(spec).received
    assert_close(_together(spec, received), local_round(spec, received), received)


@pytest.mark.full
def test_batches_with_fewer_images_than_devices_give_the_result_of_one_device() -> None:
    # Only a few steps: BatchNorm over two images gives signs, and their rounding errors grow from step to step.
    spec = digits_spec("fedbyol", 30, training={"batch_size": 2, "local_epochs": 1})
    received = start(spec).received
    assert_close(_together(spec, received), local_round(spec, received), received)


def test_a_killed_process_ends_the_round_with_the_reason(forks: list[Forked]) -> None:
    spec = digits_spec("fedsimclr", training={"batch_size": 4, "local_epochs": 400})
    received = start(spec).received
    descriptors = len(os.listdir("/proc/self/fd"))

    def kill_second(progress: LocalProgress) -> None:
        os.kill(forks[1].pid, signal.SIGKILL)

    with pytest.raises(LocalError, match=r"was ended by SIGKILL, .* \(it had client-0\)\. If memory ran out, lower"):
        train_on_devices(received, None, client_data(spec, "client-0"), context(spec, 1, "client-0"), CPUS, kill_second)
    assert [process.poll() for process in forks] == [-signal.SIGKILL] * 2
    assert len(os.listdir("/proc/self/fd")) == descriptors


@pytest.mark.full
def test_an_error_is_reported_as_on_one_device(forks: list[Forked]) -> None:
    diverging = {"batch_size": 32, "local_epochs": 5, "optimizer": {"learning_rate": 100, "weight_decay": 1}}
    spec = digits_spec("fedsimclr", training=diverging)
    received = start(spec).received
    with pytest.raises(MethodError, match="is not a finite number") as alone:
        local_round(spec, received)
    with pytest.raises(MethodError) as together:
        _together(spec, received)
    assert str(together.value) == str(alone.value)
    assert [process.poll() for process in forks] == [-signal.SIGKILL] * 2


@pytest.mark.full
def test_a_cancelled_round_ends_all_processes(forks: list[Forked]) -> None:
    spec = digits_spec("fedsimclr", training={"batch_size": 4, "local_epochs": 400})
    received = start(spec).received

    def cancel(progress: LocalProgress) -> None:
        raise Cancelled("enough")

    with pytest.raises(Cancelled, match="enough"):
        train_on_devices(received, None, client_data(spec, "client-0"), context(spec, 1, "client-0"), CPUS, cancel)
    assert [process.poll() for process in forks] == [-signal.SIGKILL] * 2
