"""float32 as it is meant, wherever a network runs, and sums whose order is fixed."""

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


def sums_by_index(index_N: torch.Tensor, rows_N: torch.Tensor, num_sums: int) -> torch.Tensor:
    """Return for each of `num_sums` indices the sum of the rows that have it, in the same order every time.

    A GPU's `index_add` adds in another order each time; its `index_put` sorts first.

    >>> sums_by_index(torch.tensor([2, 0, 2]), torch.tensor([1.0, 2.0, 3.0]), 3)
    tensor([2., 0., 4.])
    """
    sums = rows_N.new_zeros(num_sums, *rows_N.shape[1:])
    if rows_N.is_cuda:
        return sums.index_put((index_N,), rows_N, accumulate=True)
    return sums.index_add(0, index_N, rows_N)
