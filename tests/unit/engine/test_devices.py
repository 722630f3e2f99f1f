"""The devices of several processes."""

import pytest
import torch

from fedssl.engine.devices import devices_of


def test_cuda_is_all_gpus_and_any_other_device_is_that_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    assert devices_of("cuda", 3) == ["cuda:0", "cuda:1", "cuda:0"]
    assert devices_of("cuda:1", 2) == ["cuda:1", "cuda:1"]
    assert devices_of("cpu", 2) == ["cpu", "cpu"]
