"""One child process of which nothing is left behind, whatever happens to this process or to it.

Every child runs below a keeper (`keeper.py`), in a session of its own, so that a terminal's Ctrl-C does not reach it.
The keeper ends when the child does, and kills the child and all of its descendants when this process ends.
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

from fedssl.local.unprivileged import User

KEEPER = Path(__file__).with_name("keeper.py")
LOG_BYTES = 8 * 2**20
LAST_LINES = 15
POLL_SECONDS = 0.02
KEEPER_SECONDS = 15.0
NEWLINE = b"\n"


@contextmanager
def append_log(path: Path) -> Iterator[IO[bytes]]:
    """Open a log to append to; one of more than 8 MiB is first moved to `<name>.1`, replacing the one before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileNotFoundError):
        if path.stat().st_size > LOG_BYTES:
            path.replace(path.with_name(path.name + ".1"))
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    with os.fdopen(descriptor, "ab", buffering=0) as log:
        yield log


def describe_end(returncode: int) -> str:
    """How a process ended, in words: `exited with status 3`, `was killed by SIGKILL`."""
    if returncode >= 0:
        return f"exited with status {returncode}"
    with suppress(ValueError):
        return f"was killed by {signal.Signals(-returncode).name}"
    return f"was killed by signal {-returncode}"


class Process:
    """A running command below its keeper, writing its output to the end of a log.

    `env` is the whole environment (None: this process's); `user` is whom to become (None: nobody else);
    `pass_fds` are descriptors that the command inherits; `held_fds` stay open, and any lock on them held,
    until nothing of the command is left. A command that cannot be executed exits with status 127 and its log says why.

    Raises:
        OSError: the keeper cannot be started.
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
            keeper = [sys.executable, "-I", "-S", str(KEEPER), str(theirs.fileno())]
            self._keeper = subprocess.Popen(
                [*keeper, ",".join(map(str, held_fds)), f"{user.uid}:{user.gid}" if user else "-", *command],
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
        self._channel.settimeout(KEEPER_SECONDS)
        with self._channel.makefile("rb", buffering=0) as channel:
            text = channel.readline()
        self._channel.settimeout(None)
        if not text.endswith(NEWLINE):
            raise OSError(f"the keeper of {self.log_path.stem} could not start: {self.last_lines()}")
        return int(text)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        returncode = self._keeper.poll()
        if returncode is not None:
            self._clear_away()
        return returncode

    def wait(self) -> int:
        """Block until it has ended and nothing of it is left; return the exit status, negative for a signal."""
        returncode = self._keeper.wait()
        self._clear_away()
        return returncode

    def wait_for(self, timeout_seconds: float, condition: Callable[[], bool] = lambda: False) -> bool:
        """Block until it has ended, `condition` holds or the time is over; return whether the time did not run out."""
        deadline = time.monotonic() + timeout_seconds
        while self.poll() is None and not condition():
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_SECONDS)
        return True

    def signal_group(self, signum: int) -> None:
        """Send a signal to the command and its process group; nothing happens if it has ended."""
        with suppress(OSError):
            self._channel.send(bytes([signum]))

    def stop(self, signum: int, timeout_seconds: float, hurry: Callable[[], bool] = lambda: False) -> int:
        """Send `signum` to the group, SIGKILL to all of it after the timeout or once `hurry()`; return the status."""
        self.signal_group(signum)
        self.wait_for(timeout_seconds, hurry)
        return self.kill()

    def kill(self) -> int:
        """Kill it and everything below it, and return the exit status once nothing is left."""
        with suppress(OSError):
            self._channel.shutdown(socket.SHUT_WR)
        try:
            self._keeper.wait(KEEPER_SECONDS)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
        return self.wait()

    def last_lines(self) -> str:
        """The last lines that this process, not one before it, wrote to the log."""
        with suppress(FileNotFoundError), self.log_path.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(min(self._log_start, size), size - 8192))
            return "\n".join(log.read().decode(errors="replace").splitlines()[-LAST_LINES:])
        return ""

    def _clear_away(self) -> None:
        """After the keeper's end: if somebody killed it, kill the group that it can no longer kill."""
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
