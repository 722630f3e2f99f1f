"""The processor's cores."""

import os


def num_usable_cores() -> int:
    """Return on how many cores this process may run. Only Linux can restrict a process to some of the machine's."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
