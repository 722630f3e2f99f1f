"""The process's artifact store, as the settings say."""

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from fedssl.artifacts.store import FileStore, Store
from fedssl_coordinator.core.db import exclusive
from fedssl_coordinator.core.settings import Settings, settings

_LOCKS_AT_ONCE = threading.BoundedSemaphore(8)  # each holds a connection, and whoever holds one needs another


@functools.lru_cache
def store() -> Store:
    """The process's artifact store."""
    config = settings()
    if config.store_url is not None:
        return _object_store(config, config.store_url)
    assert config.store_path is not None, "the settings ask for one of the two"
    return FileStore(config.store_path)


def _object_store(config: Settings, url: str) -> Store:
    from fedssl.artifacts.s3.address import S3Address
    from fedssl.artifacts.s3.bucket import Bucket
    from fedssl.artifacts.s3.cache import Cache
    from fedssl.artifacts.s3.store import S3Store

    keys = (config.s3_access_key_id, config.s3_secret_access_key)
    bucket = Bucket(S3Address.parse(url), *(None if key is None else key.get_secret_value() for key in keys))
    assert config.store_cache_path is not None, "the settings ask for it"
    return S3Store(bucket, Cache(config.store_cache_path, config.store_cache_bytes), _lock)


@contextmanager
def _lock(name: str) -> Iterator[bool]:
    """False, too, where this process holds as many as it may: whoever asks comes again, and no thread waits for it."""
    if not _LOCKS_AT_ONCE.acquire(blocking=False):
        yield False
        return
    try:
        with exclusive(name) as connection:
            yield connection is not None
    finally:
        _LOCKS_AT_ONCE.release()
