"""Where downloaded data sets are kept, and how a command downloads one that it needs."""

import logging
from collections.abc import Callable
from pathlib import Path

from fedssl.cache import cache_folder

FETCHED_AUTOMATICALLY = "fashion-mnist"


def data_folder() -> Path:
    """Return the folder of downloaded data sets, which all federations of a user share."""
    return cache_folder()


def ensure(name: str, progress: Callable[[str], None]) -> bool:
    """Download a data set if it is not here and is one that is downloaded automatically. Return False if that fails.

    Unknown names and paths count as present: reading them reports what is wrong. From now on, `progress` also receives
    what is logged while the images are read.
    """
    _forward_logs(progress)
    return fetch(name, progress) if name == FETCHED_AUTOMATICALLY else True


def would_download(name: str, progress: Callable[[str], None]) -> bool:
    """Return and report whether `ensure` would download a data set. `progress` also receives logs, as in `ensure`."""
    from fedssl.data import KNOWN, find_dataset

    _forward_logs(progress)
    if name != FETCHED_AUTOMATICALLY or find_dataset(name) is not None:
        return False
    progress(f"{KNOWN[name].title} would be downloaded into {data_folder()}")
    return True


def fetch(name: str, progress: Callable[[str], None]) -> bool:
    """Download a data set if it is not here. Return False if that fails."""
    from fedssl.data.download import download
    from fedssl.data.fetch import fetch_fashion_mnist

    try:
        if name == FETCHED_AUTOMATICALLY:
            return fetch_fashion_mnist(data_folder(), progress) is not None
        return download(name, data_folder(), progress) is not None
    except OSError as error:
        progress(
            f"data sets cannot be kept in {data_folder()} ({error.strerror}): set XDG_CACHE_HOME to another folder"
        )
        return False


class _Forwarder(logging.Handler):
    def __init__(self, progress: Callable[[str], None]) -> None:
        super().__init__()
        self._progress = progress

    def emit(self, record: logging.LogRecord) -> None:
        self._progress(record.getMessage())


def _forward_logs(progress: Callable[[str], None]) -> None:
    """Forward what is logged while data sets are read, to one receiver at a time."""
    logger = logging.getLogger("fedssl.data")
    for handler in [handler for handler in logger.handlers if isinstance(handler, _Forwarder)]:
        logger.removeHandler(handler)
    logger.addHandler(_Forwarder(progress))
    logger.setLevel(logging.INFO)
