"""Where the command line finds data sets, and how it gets those that can be fetched."""

import os
from collections.abc import Callable
from pathlib import Path

FETCHABLE = "fashion-mnist"


def data_folder() -> Path:
    """The folder that fetched data sets are kept in, for all of a user's federations."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "fedssl"


def ensure(name: str, progress: Callable[[str], None]) -> bool:
    """Fetch a data set that is not here yet, where that is possible; False: it could not be had.

    Names and paths that nothing is known of count as present: reading them says what is wrong with them.
    """
    if name != FETCHABLE:
        return True
    from fedssl.data.fetch import fetch_fashion_mnist

    try:
        return fetch_fashion_mnist(data_folder(), progress) is not None
    except OSError as error:
        progress(
            f"data sets cannot be kept in {data_folder()} ({error.strerror}): set XDG_CACHE_HOME to another folder"
        )
        return False
