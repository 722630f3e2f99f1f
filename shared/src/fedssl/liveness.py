"""Shows that a process without a port is alive and able to work, by a file that `python -m fedssl.liveness` reads.

It is meant for orchestrators. The file's age proves that the interpreter runs, even in the middle of a long
computation. Its content states whether the process can work and, if it cannot, why; `--ready` checks that too. A
process that reports nothing is ready as soon as it is alive.
"""

import os
import sys
import threading
import time
from enum import StrEnum
from pathlib import Path

from fedssl.files import write_atomically

VARIABLE = "FEDSSL_LIVENESS_FILE"
TOUCH_SECONDS = 5.0
DEAD_SECONDS = 60.0
START_SECONDS = 590.0
"""How long `--ready` waits for a process that is starting. An image's health check allows ten minutes."""


class Health(StrEnum):
    """The health that a process reports."""

    STARTING = "starting"
    READY = "ready"
    UNREADY = "unready"
    """The process cannot work now, and retries."""


def keep_touching() -> None:
    """Touch the file that FEDSSL_LIVENESS_FILE names every five seconds, for as long as this process lives.

    Does nothing if the variable is not set. Raises OSError if the file cannot be created.
    """
    if not (name := os.environ.get(VARIABLE)):
        return
    path = Path(name)
    path.touch()

    def touch() -> None:
        while True:
            time.sleep(TOUCH_SECONDS)
            path.touch()

    threading.Thread(target=touch, name="liveness", daemon=True).start()


def report(health: Health, reason: str = "") -> None:
    """Write this process's health, and, in one sentence, why it cannot work, to the file, if the variable names one.

    A report that cannot be written is lost: a full disk must not end a process.
    """
    if name := os.environ.get(VARIABLE):
        try:
            write_atomically(Path(name), f"{health}\n{reason}", durable=False)
        except OSError as error:
            sys.stderr.write(f"warning: cannot write {name}: {error.strerror}\n")


def why_dead(path: Path) -> str | None:
    """Return why the process of this file counts as dead, or None if it is alive."""
    try:
        age = time.time() - path.stat().st_mtime
    except OSError as error:
        return f"{path}: {error.strerror}"
    return f"{path} was last touched {age:.0f} s ago" if age > DEAD_SECONDS else None


def why_not_ready(path: Path, patience_seconds: float = 0.0) -> str | None:
    """Return why the process of this file cannot work, or None if it can. Waits for a process that is starting."""
    deadline = time.monotonic() + patience_seconds
    while True:
        if (dead := why_dead(path)) is not None:
            return dead
        health, _, reason = path.read_text(encoding="utf-8").partition("\n")
        if health in ("", Health.READY):
            return None
        if health != Health.STARTING or time.monotonic() >= deadline:
            return reason or health
        time.sleep(0.5)


if __name__ == "__main__":
    file = Path(os.environ.get(VARIABLE, "/tmp/alive"))
    sys.exit(why_not_ready(file, START_SECONDS) if sys.argv[1:] == ["--ready"] else why_dead(file))
