"""PgBouncer in transaction mode in front of a test's Postgres: the program of that name, or the one in $PGBOUNCER."""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

import psycopg

from support.processes import free_port

NUM_CONNECTIONS = 4
_PROGRAM = os.environ.get("PGBOUNCER", "pgbouncer")


def is_installed() -> bool:
    return shutil.which(_PROGRAM) is not None


class PgBouncer:
    """Passes connections to the database of a URL, over NUM_CONNECTIONS of its own; `url` is the address to use."""

    def __init__(self, database_url: str) -> None:
        parts = urlsplit(database_url)
        self._port = free_port()
        self._folder = tempfile.TemporaryDirectory()
        self.url = database_url.replace(f":{parts.port}/", f":{self._port}/")
        folder = Path(self._folder.name)
        folder.chmod(0o755)  # it does not run as root
        (folder / "users").write_text(f'"{parts.username}" "{parts.password}"\n')
        self._config = folder / "pgbouncer.ini"
        lines = [
            "[databases]", f"* = host={parts.hostname} port={parts.port}",
            "[pgbouncer]", "listen_addr = 127.0.0.1", f"listen_port = {self._port}", "unix_socket_dir =",
            "auth_type = scram-sha-256", f"auth_file = {folder / 'users'}", "pool_mode = transaction",
            f"default_pool_size = {NUM_CONNECTIONS}", "max_client_conn = 500", "server_lifetime = 3600",
            "log_connections = 0", "log_disconnections = 0", *(["user = nobody"] if os.geteuid() == 0 else []),
        ]  # fmt: skip
        self._config.write_text("\n".join(lines) + "\n")

    def __enter__(self) -> Self:
        self._process = subprocess.Popen([_PROGRAM, "-q", str(self._config)])
        end = time.monotonic() + 20
        while True:
            try:
                psycopg.connect(self.url.replace("+psycopg", ""), prepare_threshold=None).close()
                return self
            except psycopg.OperationalError:
                if time.monotonic() > end or self._process.poll() is not None:
                    self.__exit__()
                    raise
                time.sleep(0.05)

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(20)
        self._folder.cleanup()
