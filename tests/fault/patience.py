"""How long the tests wait for what must come: a machine that does much else needs a factor, `make fault PATIENCE=3`."""

import os

_FACTOR = float(os.environ.get("FEDSSL_FAULT_PATIENCE", "1"))


def patient(seconds: float) -> float:
    """So many seconds on two cores that do nothing else."""
    return seconds * _FACTOR
