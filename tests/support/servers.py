"""The servers that the tests start themselves."""

import contextlib
import itertools
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from fedssl_local import Postgres, Valkey
from support.databases import Databases
from support.environment import coordinator_environment, migrate

_TEMPLATE = "template_fedssl"


def unwind_when_terminated() -> None:
    """Let SIGTERM raise SystemExit in a program, so that every server that it has started is ended."""
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))


class Servers:
    """Postgres and Valkey in one folder. Each `database` is a separate one, migrated and without rows."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._postgres = Postgres(folder / "postgres", durable=False)
        self._valkey = Valkey(folder / "valkey")
        self._numbers = itertools.count()  # of the databases without tables

    def __enter__(self) -> Self:
        try:
            self._postgres.start()
            self._valkey.start()
            url = self._postgres.create_database(_TEMPLATE)
            migrate(coordinator_environment(url, self.redis_url, self._folder / "unused"))
            self._databases = Databases(self._postgres, _TEMPLATE)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._valkey.stop()
        self._postgres.stop()

    @property
    def redis_url(self) -> str:
        return self._valkey.url

    @property
    def second_redis_url(self) -> str:
        """Separate queues for a second federation: in shared ones, aggregators would take each other's tasks."""
        return f"{self._valkey.url.removesuffix('/0')}/1"

    @property
    def pids(self) -> dict[str, int]:
        """The ids of the two servers' processes, while they run."""
        pids = {"postgres": self._postgres.pid, "valkey": self._valkey.pid}
        return {name: pid for name, pid in pids.items() if pid is not None}

    @contextlib.contextmanager
    def database(self, *, empty: bool = False) -> Iterator[str]:
        """Yield the URL of a database that the block may use; `empty`: without tables."""
        if not empty:
            name = self._databases.take()
            try:
                yield self._postgres.database_url(name)
            finally:
                self._databases.give_back(name)
            return
        name = f"empty_{next(self._numbers)}"
        try:
            yield self._postgres.create_database(name)
        finally:
            self._postgres.drop_database(name)
