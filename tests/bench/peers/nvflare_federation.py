"""An NVFlare federation of real processes in POC mode: a server, one process per site and job, with TLS."""

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from bench.peers.processes import kill, named, running, wait_for

_JOB = Path(__file__).with_name("nvflare_job.py")


class NVFlare:
    """Server and sites in a folder. They start with the job."""

    def __init__(self, environments: Path, folder: Path, num_clients: int) -> None:
        self._python = environments / "nvflare" / "bin" / "python"
        self.folder = folder
        self._num_clients = num_clients
        self._environment = {
            **os.environ, "HOME": str(folder), "NVFLARE_POC_WORKSPACE": str(folder / "poc"), "OMP_NUM_THREADS": "1",
            "PATH": f"{self._python.parent}:{os.environ['PATH']}",
        }  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        kill(named(str(self.folder), "sub_start.sh"))  # otherwise it would restart what is killed next
        kill(named(str(self.folder), "nvflare"))

    @contextmanager
    def job(
        self, num_rounds: int, megabytes: float, *options: str, recipe: str = "numpy", task: str = "add"
    ) -> Iterator["subprocess.Popen[bytes]"]:
        """Start everything and submit a job. The process ends some time after the job, and prints its result."""
        command = [str(self._python), str(_JOB), "--clients", str(self._num_clients), "--megabytes", str(megabytes),
                   "--rounds", str(num_rounds), "--out", str(self.folder), "--recipe", recipe, "--task", task,
                   *options]  # fmt: skip
        with running(command, self._environment, self.folder) as process:
            yield process

    def server_pids(self) -> list[int]:
        """Return the server and its job's process."""
        return named(str(self.folder), "/server", "nvflare.private")

    def wait_for_rounds(self, num_rounds: int, seconds: float) -> None:
        """Wait until every site has answered `num_rounds` broadcasts."""
        wait_for(lambda: min(map(self.num_answered, self._paths())) >= num_rounds, f"{num_rounds} broadcasts", seconds)

    @staticmethod
    def num_answered(path: Path) -> int:
        """Return how many broadcasts a site has answered, according to its file so far."""
        try:
            return len(json.loads(path.read_text())["times"])
        except (OSError, json.JSONDecodeError):  # it has written nothing yet, or is writing now
            return 0

    def sites(self) -> list[dict[str, Any]]:
        """Return what each site wrote last."""
        return [json.loads(path.read_text()) for path in self._paths()]

    def _paths(self) -> list[Path]:
        return [self.folder / f"site-{number}.json" for number in range(1, self._num_clients + 1)]
