"""A `fedssl up`, or another long-running command, as a person would start it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

FEDSSL = [sys.executable, "-m", "fedssl.cli.main"]


class RunningCommand:
    """A `fedssl up`, or another long-running command, in its own process group, as in a terminal."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.errors = (folder / "stderr").open("w+")
        self.process = subprocess.Popen(
            [*FEDSSL, *arguments], cwd=folder, stdout=subprocess.PIPE, stderr=self.errors, text=True, process_group=0
        )

    def ready_document(self) -> dict[str, Any]:
        """Return the JSON document that the command prints when everything is up."""
        assert self.process.stdout is not None
        lines = []
        for line in self.process.stdout:
            lines.append(line)
            if line == "}\n":
                found: dict[str, Any] = json.loads("".join(lines))
                return found
        raise AssertionError(f"it ended with {self.process.wait()}: {self.output()}")

    def output(self) -> str:
        self.errors.seek(0)
        return self.errors.read()

    def descendants(self) -> set[int]:
        """Return the ids of all processes that descend from the command."""
        parents = {}
        for entry in Path("/proc").glob("[0-9]*/stat"):
            try:
                parents[int(entry.parent.name)] = int(entry.read_text().rpartition(")")[2].split()[1])
            except (OSError, ValueError):
                continue
        found, seen = {self.process.pid}, set[int]()
        while found != seen:
            seen = set(found)
            found |= {pid for pid, parent in parents.items() if parent in seen}
        return found - {self.process.pid}

    def interrupt(self) -> int:
        """Press Ctrl-C and wait for the end."""
        os.killpg(self.process.pid, signal.SIGINT)
        return self.process.wait(40)
