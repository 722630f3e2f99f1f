"""float32 as it is meant, wherever a network runs."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def exact_float32(device: torch.device | str, *, deterministic: bool = False) -> Iterator[None]:
    """float32 is float32 inside, also in a GPU's convolutions, which torch would round to TF32's 10 bits.

    So would matrix products be if the environment asks for it, as NVIDIA's images do
    (`TORCH_ALLOW_TF32_CUBLAS_OVERRIDE`). `deterministic`: convolutions on a GPU add up in the same order every time.
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
