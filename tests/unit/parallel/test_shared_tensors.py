"""Tensors that processes share: each holder of the file reads what another wrote, and the file grows."""

import os

import pytest
import torch

from fedssl.parallel.shared_tensors import SharedTensors

TENSORS = {
    "weights": torch.arange(12.0).view(3, 4).t(),  # not contiguous
    "count": torch.tensor(7),
    "none": torch.empty(0, 5),
    "halves": torch.arange(5, dtype=torch.bfloat16),
    "images": torch.arange(60, dtype=torch.uint8).view(5, 3, 2, 2),
    "mask": torch.tensor([True, False]),
}


@pytest.fixture
def ours() -> SharedTensors:
    return SharedTensors()


def test_another_holder_of_the_file_reads_what_was_written(ours: SharedTensors) -> None:
    layout = ours.write(TENSORS)
    theirs = SharedTensors(os.dup(ours.descriptor))

    found = theirs.read(layout)

    assert list(found) == list(TENSORS)
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].is_contiguous()
        assert torch.equal(found[name], tensor)
        assert found[name].data_ptr() % 64 == 0
    found["count"] += 1
    assert ours.read(layout)["count"] == 8, "both map the same memory"
    theirs.close()
    ours.close()


def test_the_file_grows_and_each_write_replaces_the_previous_one(ours: SharedTensors) -> None:
    theirs = SharedTensors(os.dup(ours.descriptor))
    for size in (3, 300_000, 7):
        tensor = torch.full((size,), float(size))
        assert torch.equal(theirs.read(ours.write({"values": tensor}))["values"], tensor)
    assert theirs.read(ours.write({})) == {}
    theirs.close()
    ours.close()


def test_tensors_that_were_read_outlive_the_file(ours: SharedTensors) -> None:
    found = ours.read(ours.write(TENSORS))
    ours.close()

    assert torch.equal(found["weights"], TENSORS["weights"])
