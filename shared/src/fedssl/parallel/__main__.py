"""One of the processes that train a simulation's clients. `ClientProcesses` starts it, with open files as arguments."""

import sys

from fedssl.parallel.parent import end_with_parent

if __name__ == "__main__":
    end_with_parent()
    from fedssl.parallel.process import serve  # takes seconds, during which the thread is already waiting

    serve(*map(int, sys.argv[1:]))
