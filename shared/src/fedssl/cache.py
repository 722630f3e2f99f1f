"""The folder for files that can be fetched or computed again, such as data sets and decoded images."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return `$XDG_CACHE_HOME/fedssl`, or `~/.cache/fedssl` if the variable is not set."""
    folder = os.environ.get("XDG_CACHE_HOME")
    return (Path(folder) if folder else Path.home() / ".cache") / "fedssl"
