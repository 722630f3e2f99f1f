"""The computations of processes that train together. Whole rounds: `tests/unit/parallel/test_devices.py`."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import distributed, nn

from fedssl.data_parallel import Ranks, SplitBatchNorm2d, _BatchNorm, split_rows


@pytest.mark.parametrize(("num_rows", "size", "sizes"), [(8, 2, [4, 4]), (7, 3, [2, 2, 3]), (2, 2, [1, 1])])
def test_the_rows_of_all_processes_make_up_all_rows(num_rows: int, size: int, sizes: list[int]) -> None:
    rows = list(range(num_rows))
    parts = [rows[Ranks(rank, size).rows(num_rows)] for rank in range(size)]
    assert [len(part) for part in parts] == sizes
    assert [row for part in parts for row in part] == rows


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run the test in a process group that has only this process."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    distributed.init_process_group(
        "gloo", store=distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    yield
    distributed.destroy_process_group()


def test_batch_norm_and_its_gradients_equal_torchs(group: None) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 3, 4, 2, dtype=torch.float64) * 3 + 1
    weight, bias = torch.randn(2, 3, dtype=torch.float64)
    direction = torch.randn_like(x)
    results = []
    for own in (True, False):
        inputs = [each.clone().requires_grad_() for each in (x, weight, bias)]
        if own:
            y, mean, variance, count = _BatchNorm.apply(*inputs, 1e-5)
            assert count.tolist() == [40, 40, 40]
            torch.testing.assert_close(mean, x.mean(dim=(0, 2, 3)))
            torch.testing.assert_close(variance, x.var(dim=(0, 2, 3), correction=0))
        else:
            y = nn.functional.batch_norm(inputs[0], None, None, inputs[1], inputs[2], training=True, eps=1e-5)
        results.append([y.detach(), *torch.autograd.grad((y * direction).sum(), inputs)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_outside_a_multi_device_step_nothing_is_split() -> None:
    torch.manual_seed(0)
    x, own, other = torch.randn(4, 3, 2, 2), SplitBatchNorm2d(3), nn.BatchNorm2d(3)
    assert torch.equal(split_rows(own, x), other(x))
    for name, buffer in other.named_buffers():
        assert torch.equal(own.get_buffer(name), buffer)
