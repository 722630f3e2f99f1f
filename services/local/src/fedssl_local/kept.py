"""The common part of servers and services, which the supervisor keeps running."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

from fedssl_local.process import Process


class Kept(ABC):
    """Runs one process at a time, which may be started again after its end."""

    name: str
    log_path: Path
    is_essential = True
    _process: Process | None = None

    @property
    def pid(self) -> int | None:
        """The pid of the process, or None while it does not run."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    @property
    def ended_for_good(self) -> bool:
        """True if the process is not to be started again after its end."""
        return False

    @property
    def is_hopeless(self) -> bool:
        """True if the process has ended with a status that another start would repeat."""
        return False

    @abstractmethod
    def start(self) -> None:
        """Start the process and block until it is ready. Raises LocalError."""

    @abstractmethod
    def stop(self, hurry: Callable[[], bool] = lambda: False) -> None:
        """Stop the process gracefully, and kill it after its timeout or as soon as `hurry()` is true."""

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal, or None if the process runs or was never started."""
        return None if self._process is None else self._process.poll()

    def wait(self) -> int:
        """Block until the process ends; return its exit status, negative for a signal."""
        if self._process is None:
            raise RuntimeError(f"{self.name} was never started")
        return self._process.wait()

    def last_lines(self) -> str:
        """Return the last lines that the last process wrote to the log."""
        return "" if self._process is None else self._process.last_lines()
