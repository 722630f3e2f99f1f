"""The GPU memory that a process holds, for its metrics and reports."""

import sys


def gpu_bytes() -> float:
    """Return the reserved memory, summed over all GPUs, or 0 if this process has not used a GPU.

    Does not import torch: a process that never imported it holds no GPU memory.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return 0.0
    return float(sum(torch.cuda.memory_reserved(number) for number in range(torch.cuda.device_count())))
