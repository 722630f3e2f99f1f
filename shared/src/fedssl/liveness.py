"""Shows that a process without a port lives: it touches a file, and `python -m fedssl.liveness` looks how old that is.

For orchestrators. What it proves is that the interpreter runs, also in the middle of a long computation; whether a
process gets anywhere is seen in the run's events.
"""

import os
import sys
import threading
import time
from pathlib import Path

VARIABLE = "FEDSSL_LIVENESS_FILE"
TOUCH_SECONDS = 5.0
DEAD_SECONDS = 60.0


def keep_touching() -> None:
    """Touch the file that FEDSSL_LIVENESS_FILE names every five seconds, for as long as this process lives.

    Does nothing where the variable is not set. Raises OSError where the file cannot be made.
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


def why_dead(path: Path) -> str | None:
    """Why the process of this file counts as dead; None: it lives."""
    try:
        age = time.time() - path.stat().st_mtime
    except OSError as error:
        return f"{path}: {error.strerror}"
    return f"{path} was last touched {age:.0f} s ago" if age > DEAD_SECONDS else None


if __name__ == "__main__":
    sys.exit(why_dead(Path(os.environ.get(VARIABLE, "/tmp/alive"))))
