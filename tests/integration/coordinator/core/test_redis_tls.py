"""Redis behind TLS, with a certificate of a private authority (FEDSSL_REDIS_CA_FILE)."""

import socket
import ssl
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from support.certificates import Authority
from support.environment import coordinator_environment
from support.proxy import BreakingProxy
from support.servers import Servers

pytestmark = pytest.mark.integration

# Each Redis client of a coordinator process: sending, the broker, listening, and limits.
# Their timeouts are short and the machine may be busy, so each retries after a timeout, and only then.
EVERY_CLIENT = """
import asyncio
import redis.asyncio
from fedssl_coordinator.core import queues
from fedssl_coordinator.core.celery_app import app
from fedssl_coordinator.core.settings import settings
from fedssl_coordinator.http import rate_limits

rate_limits._REDIS.update(socket_timeout=30, socket_connect_timeout=30)

def send():
    return queues.redis_connection().ping()

def queue():
    with app.connection_for_write() as connection:
        return connection.ensure_connection(max_retries=20, interval_start=0, interval_step=0)

async def listen():
    async with redis.asyncio.Redis.from_url(settings().redis_address) as client:
        return await client.ping()

async def limit():
    return await rate_limits.RequestCounts(settings().redis_address)._shared.storage.check()

for ask in (send, queue, lambda: asyncio.run(listen()), lambda: asyncio.run(limit())):
    for _ in range(20):
        try:
            if ask():
                break
        except redis.exceptions.TimeoutError:
            pass
    else:
        raise SystemExit(f"{ask} was not answered")
print("answered")
"""


class TlsProxy(BreakingProxy):
    """Terminates TLS in front of a server."""

    def __init__(self, url: str, certificate: Path, key: Path) -> None:
        super().__init__(url)
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificate, key)

    def _serve(self, client: socket.socket) -> None:
        with suppress(OSError):
            super()._serve(self._context.wrap_socket(client, server_side=True))


def _every_client(url: str, ca_file: Path, store: Path) -> subprocess.CompletedProcess[str]:
    environment = coordinator_environment("postgresql+psycopg://unused", url, store, FEDSSL_REDIS_CA_FILE=str(ca_file))
    command = [sys.executable, "-c", EVERY_CLIENT]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=140)


@pytest.mark.full
def test_every_redis_client_trusts_only_the_configured_authority(servers: Servers, tmp_path: Path) -> None:
    authority, other = Authority(tmp_path), Authority(tmp_path, "other")
    pair = authority.sign("redis", "127.0.0.1")
    with TlsProxy(servers.redis_url, pair.certificate, pair.key) as proxy:
        password = urlsplit(servers.redis_url).password
        url = f"rediss://:{password}@127.0.0.1:{urlsplit(proxy.url).port}/0"
        done = _every_client(url, authority.file, tmp_path)
        assert done.stdout == "answered\n", done.stderr
        refused = _every_client(url, other.file, tmp_path)
        assert "answered" not in refused.stdout
        assert "CERTIFICATE_VERIFY_FAILED" in refused.stderr
