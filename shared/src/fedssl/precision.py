"""float32 as it is meant, wherever a network runs."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def exact_float32(device: torch.device | str) -> Iterator[None]:
    """float32 is float32 inside, also in a GPU's convolutions, which torch would round to TF32's 10 bits."""
    if torch.device(device).type != "cuda":
        yield
        return
    cudnn = torch.backends.cudnn
    with cudnn.flags(
        enabled=cudnn.enabled, benchmark=cudnn.benchmark, deterministic=cudnn.deterministic, allow_tf32=False
    ):
        yield
