"""One of the processes that train a simulation's clients. `ClientProcesses` starts it, with open files as arguments."""

import os
import sys
import threading


def _end_with_parent() -> None:
    """Wait for the end of the standard input, which comes when the simulation's process ends in any way, and exit."""
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    from fedssl.parallel.process import serve  # takes seconds, during which the thread is already waiting

    serve(*map(int, sys.argv[1:]))
