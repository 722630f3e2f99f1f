"""An estimate of the time that is left."""

import time


class RemainingTime:
    """Estimates the remaining time from the progress observed so far. Time before the first observation is ignored."""

    def __init__(self, now: float | None = None) -> None:
        self._start = time.monotonic() if now is None else now
        self._first: float | None = None

    def seconds_left(self, share_done: float, now: float | None = None) -> float | None:
        """Return the estimate, or None until there has been enough progress."""
        moment = time.monotonic() if now is None else now
        if self._first is None:
            self._start, self._first = moment, share_done
        gained = share_done - self._first
        if gained < 0.01 or moment - self._start < 2:
            return None
        return (1 - share_done) * (moment - self._start) / gained
