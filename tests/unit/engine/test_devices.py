"""The devices of several processes, and memory errors on them."""

import weakref

import pytest
import torch

from fedssl.engine.devices import devices_of, memory_errors_explained
from fedssl.errors import DeviceError


def test_cuda_is_spread_over_all_gpus_and_any_other_device_serves_all_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    assert devices_of("cuda", 3) == ["cuda:0", "cuda:1", "cuda:0"]
    assert devices_of("cuda:1", 2) == ["cuda:1", "cuda:1"]
    assert devices_of("cpu", 2) == ["cpu", "cpu"]


def test_a_step_that_ran_out_of_memory_is_freed_while_its_error_is_handled() -> None:
    held = []

    def step() -> None:
        activations = torch.zeros(3)
        held.append(weakref.ref(activations))
        try:
            raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
        except RuntimeError as error:
            gradients = torch.zeros(3)
            held.append(weakref.ref(gradients))
            raise torch.OutOfMemoryError("CUDA out of memory") from error

    explained = memory_errors_explained("cuda", 8)
    with pytest.raises(DeviceError, match="out of memory on cuda with batch size 8") as refused, explained:
        step()
    assert refused.value.__cause__ is not None
    assert [reference() for reference in held] == [None, None]


def test_other_device_errors_are_not_reported_as_out_of_memory() -> None:
    with pytest.raises(RuntimeError, match="device-side assert"), memory_errors_explained("cuda", 8):
        raise RuntimeError("CUDA error: device-side assert triggered")
