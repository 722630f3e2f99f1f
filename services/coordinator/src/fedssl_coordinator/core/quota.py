"""How much of what is written for ever one caller may cause: each process counts for itself."""

import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass


@dataclass(slots=True)
class _Window:
    end: float
    num: int = 0


class Budget:
    """So many a window for each caller; a window begins with the first that comes after the last one's end."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._windows: dict[Hashable, _Window] = {}
        self._lock = threading.Lock()
        self._left_out: dict[Hashable, int] = {}

    def take(self, who: Hashable, most: int) -> bool:
        """Count one; whether it is within the budget of `most`."""
        with self._lock:
            now = self._clock()
            window = self._windows.get(who)
            if window is None or now >= window.end:
                window = self._windows[who] = _Window(now + self._seconds)
            window.num += 1
            if window.num > most:
                self._left_out[who] = self._left_out.get(who, 0) + 1
            return window.num <= most

    def left_out(self, who: Hashable) -> int:
        """How many were beyond the budget since this was asked last."""
        with self._lock:
            return self._left_out.pop(who, 0)
