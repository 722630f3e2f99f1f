"""The common part of a local Postgres and a local Valkey: their folder, port, password and lifetime."""

import importlib.util
import os
import secrets
import socket
import threading
from abc import abstractmethod
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import ClassVar, Self

from fedssl.files import write_private
from fedssl.local import HOST
from fedssl.locks import FolderLock
from fedssl_local.errors import MissingServerError, PortTakenError, ServerFailedError
from fedssl_local.kept import Kept
from fedssl_local.process import Process, describe_end

PORT_ATTEMPTS = 5
START_TIMEOUT_SECONDS, STOP_TIMEOUT_SECONDS = 60.0, 15.0
# The environment of a server. Ours is not passed on, so that no PG* or LC_* variable changes what the server does.
SERVER_ENVIRONMENT = {"PATH": os.defpath, "LC_ALL": "C", "TZ": "UTC"}


def wheel_root(package: str, wheel: str) -> Path:
    """Return the folder in which `package` is installed. The package, which starts its own servers, is not imported.

    Raises:
        MissingServerError: the package is not installed.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise MissingServerError(wheel, "not installed")
    return Path(spec.submodule_search_locations[0]).parent


def port_is_free(port: int) -> bool:
    """Return whether a server could listen on 127.0.0.1:`port` now."""
    with socket.socket() as candidate:
        candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            candidate.bind((HOST, port))
        except OSError:
            return False
    return True


def choose_port() -> int:
    """Return a port on 127.0.0.1 that is free now."""
    with socket.socket() as candidate:
        candidate.bind((HOST, 0))
        port: int = candidate.getsockname()[1]
        return port


class Server(Kept):
    """A server on 127.0.0.1 that keeps all of its data in one folder.

    The folder holds the password and the port, which stay the same from start to start. Only if `port` is None and
    another process has taken the port in the meantime does `start` of a new object choose another. Once an object has
    returned a URL, that URL stays valid for all of its later starts. Methods may be called from any thread.
    """

    stop_signal: ClassVar[int]

    def __init__(self, directory: Path, port: int | None = None) -> None:
        self.directory = directory.absolute()
        self.log_path = self.directory / f"{self.name}.log"
        self._fixed_port = port
        self._port: int | None = None
        self._lock = FolderLock(self.directory, "lock")
        self._starting = threading.Lock()

    @property
    @abstractmethod
    def url(self) -> str:
        """The server's URL, with its password, available only after the first start."""

    @property
    def port(self) -> int:
        """The port on 127.0.0.1, available only after the first start."""
        if self._port is None:
            raise RuntimeError(f"{self.name} has no port before its first start")
        return self._port

    @property
    def is_running(self) -> bool:
        """True while the server's process runs."""
        return self.pid is not None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the server, unless it runs already, and block until it responds.

        Raises:
            FolderInUseError: another process runs a server in the folder.
            PortTakenError: another process uses the port that the server must have.
            ServerFailedError: the server died, or did not respond in time.
            MissingServerError, UnprivilegedError: the server cannot be run on this machine at all.
        """
        with self._starting:
            if self.is_running:
                return
            self._lock.acquire()
            try:
                self._prepare()
                self._start_on_a_port()
                self._settle()
            except BaseException:
                self.stop()
                raise

    def stop(self, hurry: Callable[[], bool] = lambda: False) -> None:
        """Stop the server gracefully, kill it after 15 s or as soon as `hurry()` is true, and unlock the folder."""
        if self._process is not None:
            self._process.stop(self.stop_signal, STOP_TIMEOUT_SECONDS, hurry)
        self._lock.release()

    @abstractmethod
    def _prepare(self) -> None:
        """Prepare the start of the process. The folder is locked."""

    @abstractmethod
    def _launch(self, port: int) -> Process:
        """Start the process."""

    @abstractmethod
    def _answers(self) -> bool:
        """Return whether our server, not another one on the port, responds."""

    def _settle(self) -> None:
        """Complete the start after the server's first response."""

    def _start_on_a_port(self) -> None:
        for _ in range(PORT_ATTEMPTS):
            port = self._pick_port()
            process = self._process = self._launch(port)
            previous, self._port = self._port, port
            in_time = process.wait_for(START_TIMEOUT_SECONDS, self._answers)
            if in_time and process.poll() is None:
                return
            what = "died" if in_time else f"did not answer within {START_TIMEOUT_SECONDS:g} s and was stopped"
            how = describe_end(process.kill())
            self._port = previous
            if not in_time or port_is_free(port):
                raise ServerFailedError(
                    self.name, f"{what} when it was started ({how})", process.last_lines(), self.log_path
                )
            # Another process took the port first: the next attempt chooses another port, or raises if it may not.
        raise PortTakenError(self.name, port)

    def _pick_port(self) -> int:
        required = self._fixed_port if self._port is None else self._port
        if required is not None:
            if not port_is_free(required):
                raise PortTakenError(self.name, required)
            return required
        path = self.directory / "port"
        with suppress(FileNotFoundError, ValueError):
            port = int(path.read_text(encoding="ascii"))
            if port_is_free(port):
                return port
        port = choose_port()
        write_private(path, f"{port}\n")
        return port

    def _password(self) -> str:
        """Return the password in the folder, which is created at the first start."""
        path = self.directory / "password"
        if not path.exists():
            write_private(path, secrets.token_urlsafe(24))
        return path.read_text(encoding="ascii")
