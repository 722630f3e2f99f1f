"""The processor's cores."""

import os


def num_usable_cores() -> int:
    """Return the number of cores that this process may use. Only Linux can restrict a process to some of them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
