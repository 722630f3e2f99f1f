"""Keeps float32 at its full precision wherever a network runs."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def exact_float32(device: torch.device | str, *, deterministic: bool = False) -> Iterator[None]:
    """Keep float32 at full precision in the block, even in a GPU's convolutions, which torch would round to 10 bits.

    torch would also round matrix products if the environment asks for it, as NVIDIA's images do
    (`TORCH_ALLOW_TF32_CUBLAS_OVERRIDE`). With `deterministic`, convolutions on a GPU add in the same order every time.
    """
    if torch.device(device).type != "cuda":
        yield
        return
    cudnn, products = torch.backends.cudnn, torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with cudnn.flags(
            enabled=cudnn.enabled,
            benchmark=cudnn.benchmark,
            deterministic=deterministic or cudnn.deterministic,
            allow_tf32=False,
        ):
            yield
    finally:
        torch.set_float32_matmul_precision(products)


def exact_layout(device: torch.device | str) -> torch.memory_format:
    """Return the memory format in which convolutions in exact float32 are fastest on a device.

    On a GPU, cuDNN computes most of them channel by channel and would first have to convert images in `channels_last`,
    which is the fastest format of its bf16 convolutions and of those on a CPU.
    """
    return torch.contiguous_format if torch.device(device).type == "cuda" else torch.channels_last
