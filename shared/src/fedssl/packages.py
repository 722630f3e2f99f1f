"""Which optional packages are installed."""

import importlib.util


def is_installed(package: str) -> bool:
    """Return whether a top-level package can be imported. Does not import it."""
    return importlib.util.find_spec(package) is not None
