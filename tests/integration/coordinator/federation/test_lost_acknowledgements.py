"""An aggregator that cannot tell Redis that a message has arrived takes the next one all the same."""

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import redis
from celery import Celery

from support.environment import coordinator_environment
from support.listening import Listener
from support.servers import Servers

DATABASE = 8  # of Redis's: no other test uses it
QUEUE = "evaluate"


class _Line(Listener):
    """Passes everything on to Redis; while it `breaks`, a connection ends that acknowledges a message."""

    def __init__(self, url: str) -> None:
        super().__init__()
        parts = urlsplit(url)
        self._target = (parts.hostname or "", parts.port or 0)
        self.breaks = True

    def _serve(self, client: socket.socket) -> None:
        server = socket.create_connection(self._target)
        threading.Thread(target=self._pass_on, args=(server, client), daemon=True).start()
        self._pass_on(client, server)

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if self.breaks and b"HDEL" in data:
                    break
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def broker(servers: Servers) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(servers.redis_url.removesuffix("/0") + f"/{DATABASE}") as connection:
        connection.flushdb()
        yield connection


@contextmanager
def _aggregating(url: str, folder: Path) -> Iterator[None]:
    environment = coordinator_environment("postgresql+psycopg://nobody@127.0.0.1:9/none", url, folder)
    command = [sys.executable, "-m", "fedssl_coordinator", "aggregator", "--queues", QUEUE]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def test_messages_are_taken_after_some_that_could_not_be_acknowledged(
    servers: Servers, broker: redis.Redis, tmp_path: Path
) -> None:
    direct = f"{servers.redis_url.removesuffix('/0')}/{DATABASE}"
    log = tmp_path / "log"
    with _Line(direct) as line, Celery(broker=direct, set_as_current=False) as sending:
        address = urlsplit(direct).netloc.rpartition("@")[2]
        with _aggregating(direct.replace(address, line.url.removeprefix("http://")), tmp_path):
            for _ in range(4):
                sending.send_task("fedssl.collect", queue=QUEUE)
            _wait(lambda: log.read_text().count("Couldn't ack") >= 2, log)  # two cores: it took no more then
            line.breaks = False
            _wait(lambda: broker.llen(QUEUE) == 0, log)


def _wait(condition: Callable[[], bool], log: Path) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.02)
