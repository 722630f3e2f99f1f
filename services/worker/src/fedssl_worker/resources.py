"""Measures the memory that this process holds, for the people who watch a run."""

import os
from pathlib import Path

from fedssl.engine.gpu_memory import gpu_bytes
from fedssl.protocol.work import Resources

_STATM = Path("/proc/self/statm")


def measured_resources(statm: Path = _STATM) -> Resources:
    """Return the memory of this process and its part of the GPUs' memory."""
    return Resources(memory_bytes=_resident_bytes(statm), gpu_memory_bytes=int(gpu_bytes()) or None)


def _resident_bytes(statm: Path) -> int | None:
    """Return the resident memory, or None if the system does not report it as Linux does."""
    try:
        pages = int(statm.read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")
