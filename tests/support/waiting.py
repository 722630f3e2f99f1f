"""Waiting for other threads and processes."""

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    """Poll until the condition is true. Fails if it is still false after `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds:g} s in vain"
        time.sleep(0.02)
