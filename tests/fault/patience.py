"""How long the tests wait for what must happen. A busy machine needs a factor: `make fault PATIENCE=3`."""

import os

_FACTOR = float(os.environ.get("FEDSSL_FAULT_PATIENCE", "1"))


def scaled_timeout(seconds: float) -> float:
    """Return how long to wait for something that takes at most `seconds` on two idle cores."""
    return seconds * _FACTOR
