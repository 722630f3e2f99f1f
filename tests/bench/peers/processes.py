"""Starting and finding processes of this machine, and what they use."""

import bisect
import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

_TICKS, _PAGE_BYTES = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class _Process:
    """The line of /proc/PID/stat. Memory is resident."""

    pid: int
    name: str
    parent: int
    cpu_seconds: float
    memory_mb: float


class Usage:
    """Samples the memory and the processor time of the processes that `find` returns, five times per second.

    Processes that end keep the processor time of their last sample. Memory excludes Postgres, whose processes share
    most of theirs.
    """

    def __init__(self, find: Callable[[], list[int]]) -> None:
        self._find = find
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._cpu_seconds: dict[int, float] = {}
        self._times: list[float] = []
        self._totals: list[float] = []
        self.most_mb = 0.0

    def __enter__(self) -> "Usage":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def cpu_seconds(self, begin: float, end: float) -> float:
        """Return the user and system time between two times of `time.time`."""
        at = (min(bisect.bisect(self._times, when), len(self._times) - 1) for when in (begin, end))
        first, last = (self._totals[index] for index in at)
        return last - first

    def _sample(self) -> None:
        while not self._stop.wait(0.2):
            found = [process for pid in self._find() if (process := _process(pid))]
            self._cpu_seconds |= {process.pid: process.cpu_seconds for process in found}
            self._times.append(time.time())
            self._totals.append(sum(self._cpu_seconds.values()))
            memory_mb = sum(process.memory_mb for process in found if process.name != "postgres")
            self.most_mb = max(self.most_mb, memory_mb)


def descendants(root: int) -> list[int]:
    """Return the direct and indirect child processes of a process."""
    parents = {process.pid: process.parent for pid in _pids() if (process := _process(pid))}
    found = [root]
    for ancestor in found:  # the list grows during the loop
        found += [pid for pid, parent in parents.items() if parent == ancestor]
    return found[1:]


def named(*words: str) -> list[int]:
    """Return the processes whose command lines contain all of the words."""
    return [pid for pid in _pids() if all(word in command(pid) for word in words)]


def command(pid: int) -> str:
    """Return a process's command line, or nothing if it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode()
    return ""


@contextlib.contextmanager
def running(arguments: list[str], environment: dict[str, str], folder: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a command in its own session, which is ended when the block ends."""
    process = start(arguments, environment, folder)
    try:
        yield process
    finally:
        end(process)


def start(arguments: list[str], environment: dict[str, str], folder: Path) -> "subprocess.Popen[bytes]":
    """Start a command in its own session. Its log is in the folder."""
    with (folder / f"{Path(arguments[0]).name}.log").open("ab") as log:
        return subprocess.Popen(arguments, env=environment, stdout=log, stderr=log, cwd=folder, start_new_session=True)


def end(process: "subprocess.Popen[bytes]") -> None:
    """End all processes of a session."""
    for signum in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signum)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)


def kill(pids: list[int]) -> None:
    """Send SIGKILL to processes, some of which may already have ended."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def wait_for(condition: Callable[[], object], what: str, seconds: float) -> None:
    """Poll until the condition is true.

    Raises:
        AssertionError: the condition was still false after `seconds`.
    """
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, f"waited {seconds:.0f} s for {what}"
        time.sleep(0.1)


def is_listening(port: int) -> bool:
    """Return whether a loopback port accepts connections."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def _pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").glob("[0-9]*")]


def _process(pid: int) -> _Process | None:
    """Return the process, or None if it has ended."""
    try:
        beginning, _, rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
    except OSError:
        return None
    fields = rest.split()
    cpu_seconds, memory_mb = sum(map(int, fields[11:13])) / _TICKS, int(fields[21]) * _PAGE_BYTES / 1e6
    return _Process(pid, beginning.partition("(")[2], int(fields[1]), cpu_seconds, memory_mb)
