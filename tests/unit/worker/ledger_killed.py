"""Write ledgers in processes that kill themselves after their 1st, 2nd, ... fsync.

This is a separate program, so that only its child processes replace `os.fsync`. FOLDER receives one folder per
point, with the ledger and the file `said`, which lists the salts of the entries that `append` had returned.
"""

import os
import signal
import sys
from pathlib import Path

from fedssl_worker.disclosure.ledger import Ledger
from fedssl_worker.disclosure.policy import LedgerRules


def write(folder: Path) -> None:
    said = os.open(folder / "said", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    ledger = Ledger(folder / "ledger", rules=LedgerRules(segment_entries=4))
    for number in range(1, 7):
        intent = ledger.append("intent", run="r", round=number, tensors=["encoder.w"])
        os.write(said, f"{intent.body['salt']}\n".encode())
        sent = ledger.append("sent", run="r", round=number, intent=intent.seq)
        os.write(said, f"{sent.body['salt']}\n".encode())


def killed_after(fsyncs: int, folder: Path) -> bool:
    """Return whether the process was killed, rather than finished first."""
    folder.mkdir()
    (folder / "said").touch()
    if (child := os.fork()) == 0:
        left, real = [fsyncs], os.fsync

        def fsync(file: int) -> None:
            real(file)
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        os.fsync = fsync
        write(folder)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status) and os.waitstatus_to_exitcode(status) != 0:
        sys.exit("the child failed by itself")
    return os.WIFSIGNALED(status)


if __name__ == "__main__":
    points = 1
    while killed_after(points, Path(sys.argv[1]) / f"{points:03d}"):
        points += 1
