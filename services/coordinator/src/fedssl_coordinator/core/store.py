"""The process's artifact store, according to the settings."""

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from fedssl.artifacts.store import FileStore, Store
from fedssl_coordinator.core.db import exclusive
from fedssl_coordinator.core.settings import Settings, settings

_LOCKS_AT_ONCE = threading.BoundedSemaphore(8)  # each holds a connection, and its holder needs another


@functools.lru_cache
def store() -> Store:
    """Return the process's artifact store."""
    config = settings()
    if config.store_url is not None:
        return _object_store(config, config.store_url)
    assert config.store_path is not None, "the settings require one of the two"
    return FileStore(config.store_path)


def _object_store(config: Settings, url: str) -> Store:
    from fedssl.artifacts.s3.address import S3Address
    from fedssl.artifacts.s3.bucket import Bucket
    from fedssl.artifacts.s3.cache import Cache
    from fedssl.artifacts.s3.store import S3Store

    keys = (config.s3_access_key_id, config.s3_secret_access_key)
    bucket = Bucket(S3Address.parse(url), *(None if key is None else key.get_secret_value() for key in keys))
    assert config.store_cache_path is not None, "the settings require it"
    return S3Store(bucket, Cache(config.store_cache_path, config.store_cache_bytes), _lock)


@contextmanager
def _lock(name: str) -> Iterator[bool]:
    """Yield whether the lock was acquired. False also if this process holds too many locks: no thread waits for one."""
    if not _LOCKS_AT_ONCE.acquire(blocking=False):
        yield False
        return
    try:
        with exclusive(name) as connection:
            yield connection is not None
    finally:
        _LOCKS_AT_ONCE.release()
