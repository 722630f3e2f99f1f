"""How long to fuzz: a little with every test run, and forty times as long with `make fuzz` and `make explore`."""

import os


def examples(number: int) -> int:
    """Return `number` times FEDSSL_FUZZ_FACTOR."""
    return number * int(os.environ.get("FEDSSL_FUZZ_FACTOR", "1"))
