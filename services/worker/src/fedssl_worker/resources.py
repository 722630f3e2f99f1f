"""Measures the memory that this process holds and how busy its GPUs are, for the people who watch a run."""

import os
import sys
from pathlib import Path
from statistics import mean

from fedssl.engine.gpu_memory import gpu_bytes
from fedssl.protocol.work import Resources

_STATM = Path("/proc/self/statm")


def measured_resources(statm: Path = _STATM) -> Resources:
    """Return the memory of this process, its part of the GPUs' memory, and how busy these GPUs are."""
    return Resources(
        memory_bytes=_resident_bytes(statm),
        gpu_memory_bytes=int(gpu_bytes()) or None,
        gpu_utilisation=_gpu_utilisation(),
    )


def _gpu_utilisation() -> float | None:
    """Return the share of NVML's last sample, up to a second, in which the GPUs of this process computed.

    It is the mean over the GPUs on which this process holds memory; other processes on them count too. Returns None if
    there is no such GPU, or if its driver does not measure this (MIG slices, GPUs that are not NVIDIA's). Does not
    import torch.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized() or torch.version.hip:
        return None
    from pynvml import NVMLError  # only a process with a GPU needs it

    used = [number for number in range(torch.cuda.device_count()) if torch.cuda.memory_reserved(number)]
    try:
        return mean(torch.cuda.utilization(number) for number in used) / 100 if used else None
    except (RuntimeError, NVMLError):
        return None


def _resident_bytes(statm: Path) -> int | None:
    """Return the resident memory, or None if the system does not report it as Linux does."""
    try:
        pages = int(statm.read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")
