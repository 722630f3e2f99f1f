"""A child process that leaves no descendants behind, even if it or this process is killed.

Every child runs below a subreaper (`subreaper.py`), in its own session, so that a terminal's Ctrl-C does not reach it.
The subreaper ends when the child does, and kills the child and all of its descendants when this process ends.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Self

from fedssl_local.unprivileged import User

SUBREAPER = Path(__file__).with_name("subreaper.py")
LOG_BYTES = 8 * 2**20
LAST_LINES = 15
POLL_SECONDS = 0.02
SUBREAPER_SECONDS = 15.0
NEWLINE = b"\n"


@contextmanager
def append_log(path: Path) -> Iterator[IO[bytes]]:
    """Open a log to append to. A log of more than 8 MiB is first moved to `<name>.1`, replacing the earlier one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileNotFoundError):
        if path.stat().st_size > LOG_BYTES:
            path.replace(path.with_name(path.name + ".1"))
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    with os.fdopen(descriptor, "ab", buffering=0) as log:
        yield log


def describe_end(returncode: int) -> str:
    """Describe how a process ended: `exited with status 3`, `was killed by SIGKILL`."""
    if returncode >= 0:
        return f"exited with status {returncode}"
    with suppress(ValueError):
        return f"was killed by {signal.Signals(-returncode).name}"
    return f"was killed by signal {-returncode}"


class Process:
    """A running command below its subreaper, which appends its output to a log.

    `env` is the whole environment, and `user` is the user to run as; if they are None, they are those of this process.
    `pass_fds` are descriptors that the command inherits. `held_fds` stay open, with any lock on them, until no process
    of the command is left. A command that cannot be executed exits with status 127, and its log gives the reason.

    Raises:
        OSError: the subreaper cannot be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        log_path: Path,
        env: Mapping[str, str] | None = None,
        user: User | None = None,
        cwd: Path | None = None,
        stdin: IO[bytes] | None = None,
        pass_fds: Sequence[int] = (),
        held_fds: Sequence[int] = (),
    ) -> None:
        self.log_path = log_path
        self.pid = 0
        self._ending = threading.Lock()
        self._ended = False
        self._channel, theirs = socket.socketpair()
        with theirs, append_log(log_path) as log:
            self._log_start = log.tell()
            subreaper = [sys.executable, "-I", "-S", str(SUBREAPER), str(theirs.fileno())]
            self._subreaper = subprocess.Popen(
                [*subreaper, ",".join(map(str, held_fds)), f"{user.uid}:{user.gid}" if user else "-", *command],
                stdin=stdin or subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=env,
                cwd=cwd,
                start_new_session=True,
                pass_fds=[theirs.fileno(), *pass_fds, *held_fds],
            )
        try:
            self.pid = self._read_pid()
        except BaseException:
            self.kill()
            raise

    def _read_pid(self) -> int:
        self._channel.settimeout(SUBREAPER_SECONDS)
        with self._channel.makefile("rb", buffering=0) as channel:
            text = channel.readline()
        self._channel.settimeout(None)
        if not text.endswith(NEWLINE):
            raise OSError(f"the subreaper of {self.log_path.stem} could not start: {self.last_lines()}")
        return int(text)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal, or None while the command runs."""
        returncode = self._subreaper.poll()
        if returncode is not None:
            self._clear_away()
        return returncode

    def wait(self) -> int:
        """Block until no process of the command is left; return the exit status, negative for a signal."""
        returncode = self._subreaper.wait()
        self._clear_away()
        return returncode

    def wait_for(self, timeout_seconds: float, condition: Callable[[], bool] = lambda: False) -> bool:
        """Block until the command has ended or `condition` holds; return False if the time runs out first."""
        deadline = time.monotonic() + timeout_seconds
        while self.poll() is None and not condition():
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_SECONDS)
        return True

    def signal_group(self, signum: int) -> None:
        """Send a signal to the command's process group, if it has not ended."""
        with suppress(OSError):
            self._channel.send(bytes([signum]))

    def stop(self, signum: int, timeout_seconds: float, hurry: Callable[[], bool] = lambda: False) -> int:
        """Send `signum` to the group, kill it after the timeout or once `hurry()` is true, and return the status."""
        self.signal_group(signum)
        self.wait_for(timeout_seconds, hurry)
        return self.kill()

    def kill(self) -> int:
        """Kill the command and all its descendants, and return the exit status when none is left."""
        with suppress(OSError):
            self._channel.shutdown(socket.SHUT_WR)
        try:
            self._subreaper.wait(SUBREAPER_SECONDS)
        except subprocess.TimeoutExpired:
            self._subreaper.kill()
        return self.wait()

    def last_lines(self) -> str:
        """Return the last lines that this process, not an earlier one, wrote to the log."""
        with suppress(FileNotFoundError), self.log_path.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(min(self._log_start, size), size - 8192))
            return "\n".join(log.read().decode(errors="replace").splitlines()[-LAST_LINES:])
        return ""

    def _clear_away(self) -> None:
        """Clean up after the subreaper has ended. If it was killed, kill the group that it can no longer kill."""
        with self._ending:
            if self._ended:
                return
            self._ended = True
            said = b""
            with suppress(OSError):
                said = self._channel.recv(1, socket.MSG_DONTWAIT)
            self._channel.close()
            if not said and self.pid:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.pid, signal.SIGKILL)
