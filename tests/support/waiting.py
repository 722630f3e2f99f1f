"""Waiting for what other threads and processes do."""

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    """Poll until the condition is true. Fails if it is not within the time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds:g} s in vain"
        time.sleep(0.02)
