"""The local Valkey server."""

import os
import signal
import socket
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from fedssl_local import FolderInUseError, Valkey


def test_valkey_requires_a_password_and_stores_it_privately(tmp_path: Path) -> None:
    with Valkey(tmp_path / "valkey") as server:
        with redis.Redis.from_url(server.url) as client:
            client.set("key", "value")
            assert client.get("key") == b"value"
            assert client.config_get("appendonly") == {"appendonly": "no"}
            assert client.config_get("bind") == {"bind": "127.0.0.1"}
        with (
            redis.Redis(port=server.port, retry=Retry(NoBackoff(), 0)) as stranger,
            pytest.raises(redis.AuthenticationError),
        ):
            stranger.ping()
        password = (server.directory / "password").read_text()
        assert server.url == f"redis://:{password}@127.0.0.1:{server.port}/0"
        assert password not in Path(f"/proc/{server.pid}/cmdline").read_text()
        if os.geteuid() == 0:
            assert Path(f"/proc/{server.pid}").stat().st_uid != 0
        with pytest.raises(FolderInUseError):
            Valkey(server.directory).start()
    for name in ("password", "valkey.conf"):
        assert stat.S_IMODE((server.directory / name).stat().st_mode) == 0o600


def test_a_killed_valkey_starts_again_at_the_same_url(tmp_path: Path, until: Callable[..., None]) -> None:
    with Valkey(tmp_path / "valkey") as server:
        url = server.url
        assert server.pid is not None
        os.kill(server.pid, signal.SIGKILL)
        until(lambda: not server.is_running)
        server.start()
        assert server.url == url
        with redis.Redis.from_url(url) as client:
            assert client.ping()
    with Valkey(tmp_path / "valkey") as server:
        assert server.url == url


@pytest.mark.parametrize("answer", [b"", b"-ERR not yours\r\n", b"-ERR not yours\r\n+PONG\r\n"])
def test_another_server_on_the_port_is_not_taken_for_it(tmp_path: Path, answer: bytes) -> None:
    def refuse(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1000)
            connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=refuse, args=(listener,), daemon=True).start()
        server = Valkey(tmp_path / "valkey")
        server.directory.mkdir()
        server._port = listener.getsockname()[1]
        assert not server._answers()
