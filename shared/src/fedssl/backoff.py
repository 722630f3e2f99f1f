"""Exponential backoff: how long to wait after failures."""

import random
import time
from dataclasses import dataclass, field


def delay_seconds(num_failures: int, first: float, longest: float) -> float:
    """Return the wait after `num_failures` failures in a row, at least one: `first` seconds, then doubled each time.

    >>> [delay_seconds(failures, 0.5, 3.0) for failures in (1, 2, 3, 4, 5000)]
    [0.5, 1.0, 2.0, 3.0, 3.0]
    """
    return min(longest, first * 2.0 ** min(num_failures - 1, 64))


@dataclass(slots=True)
class Backoff:
    """The waits between failures: each is twice the one before, from `first` to `longest` seconds.

    With `jitter`, each wait is drawn between half of that and the whole, so that many clients do not retry at once.
    """

    first: float = 0.5
    longest: float = 30.0
    jitter: bool = False
    _num_failures: int = field(default=0, init=False)

    def next_delay(self, at_least: float = 0.0) -> float:
        """Count one more failure, and return the seconds to wait after it, at least `at_least`."""
        self._num_failures += 1
        delay = delay_seconds(self._num_failures, self.first, self.longest)
        if self.jitter:
            delay *= 0.5 + random.random() / 2
        return max(delay, at_least)

    def wait(self) -> None:
        """Count one more failure, and wait."""
        time.sleep(self.next_delay())

    def reset(self) -> None:
        """Begin with the first wait again, because something succeeded."""
        self._num_failures = 0
