"""Named tensors in memory that several processes map, so that no pipe carries them."""

import mmap
import os
from collections.abc import Mapping, Sequence

import torch

from fedssl.artifacts.tensors import Tensors

_ALIGNMENT = 64  # bytes, like torch's own tensors: the choice of kernels may depend on the alignment

Layout = Sequence[tuple[str, str, Sequence[int], int]]
"""For each tensor: its name, its dtype, its shape, and the byte at which it starts. It can be sent as JSON."""


class SharedTensors:
    """An unnamed file in memory, which one process writes to while no other reads it.

    `descriptor`: the file that another process created; if it is None, a new one is created. The system frees the
    memory when the last process that holds the file ends, even if it is killed.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = os.memfd_create("fedssl") if descriptor is None else descriptor
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def write(self, tensors: Mapping[str, torch.Tensor]) -> Layout:
        """Replace the tensors in the file, and return the layout that `read` needs. The file grows as needed."""
        layout, end = [], 0
        for name, tensor in tensors.items():
            layout.append((name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), end))
            end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        if end > os.fstat(self.descriptor).st_size:
            os.ftruncate(self.descriptor, end)
        for name, view in self.read(layout).items():
            view.copy_(tensors[name].detach())
        return layout

    def read(self, layout: Layout) -> Tensors:
        """Return the tensors that were written, without a copy. They are valid until the next `write`."""
        if (size := os.fstat(self.descriptor).st_size) > len(self._bytes):
            self._bytes = torch.frombuffer(mmap.mmap(self.descriptor, size), dtype=torch.uint8)
        return {name: self._view(getattr(torch, dtype), shape, start) for name, dtype, shape, start in layout}

    def close(self) -> None:
        """Close the file. The memory is freed with the last tensor that was read from it, in every process."""
        self._bytes = torch.empty(0, dtype=torch.uint8)
        os.close(self.descriptor)

    def _view(self, dtype: torch.dtype, shape: Sequence[int], start: int) -> torch.Tensor:
        size = torch.Size(shape).numel() * dtype.itemsize
        return self._bytes[start : start + size].view(dtype).view(tuple(shape))
