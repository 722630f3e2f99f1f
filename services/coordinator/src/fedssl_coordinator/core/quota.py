"""Limits how many permanent rows one caller can create. Each process counts separately.

The `limits` library is not used here: its windows follow the wall clock, so setting a machine's clock back would extend
them, and it does not count what was refused, which the audit log reports.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass


@dataclass(slots=True)
class _Window:
    end: float
    count: int = 0


class Quota:
    """A quota per caller and window. A window starts with the caller's first request after the last window's end."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._windows: dict[Hashable, _Window] = {}
        self._lock = threading.Lock()
        self._num_refused: Counter[Hashable] = Counter()

    def take(self, caller: Hashable, limit: int) -> bool:
        """Count one request, and return whether it is among the first `limit` of the window."""
        with self._lock:
            now = self._clock()
            window = self._windows.get(caller)
            if window is None or now >= window.end:
                window = self._windows[caller] = _Window(now + self._seconds)
            window.count += 1
            if window.count > limit:
                self._num_refused[caller] += 1
            return window.count <= limit

    def has_room(self, caller: Hashable, limit: int) -> bool:
        """Return whether `take` would return True. Counts nothing."""
        with self._lock:
            window = self._windows.get(caller)
            return window is None or self._clock() >= window.end or window.count < limit

    def pop_num_refused(self, caller: Hashable) -> int:
        """Return how many requests of the caller were beyond the limit since the last call."""
        with self._lock:
            return self._num_refused.pop(caller, 0)
