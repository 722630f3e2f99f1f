"""Where things are kept that can be had again: fetched data sets and decoded images."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/fedssl`, or `~/.cache/fedssl`."""
    folder = os.environ.get("XDG_CACHE_HOME")
    return (Path(folder) if folder else Path.home() / ".cache") / "fedssl"
