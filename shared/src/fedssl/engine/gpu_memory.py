"""What a process holds of GPUs, for its metrics."""

import sys


def gpu_bytes() -> float:
    """Of all GPUs; 0 where none is used yet. Without loading torch: who has not needed it holds nothing."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return 0.0
    return float(sum(torch.cuda.memory_reserved(number) for number in range(torch.cuda.device_count())))
