"""A Flower federation of real processes: SuperLink, one SuperNode per client, and `flwr run`, without TLS."""

import contextlib
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any, Self

from bench.peers.processes import descendants, is_listening, kill, running, start, wait_for
from support.processes import free_port

_APP = Path(__file__).with_name("flower")
_FIRST_NODE_PORT = 20_000  # below the range of ports that a system gives to connections, which may be in use


class Flower:
    """A SuperLink and SuperNodes in a folder. With `database`, the SuperLink keeps its state in a file, not in
    memory."""

    def __init__(self, environments: Path, folder: Path, num_clients: int, *, database: bool = False) -> None:
        own = environments / "flower" / "bin"
        self.folder = folder
        self._num_clients = num_clients
        self._nodes: list[subprocess.Popen[bytes]] = []
        self._port = free_port()
        self._database = ["--database", str(folder / "state.db")] if database else []
        self._stack = contextlib.ExitStack()
        self._environment = {
            **os.environ, "HOME": str(folder), "FLWR_HOME": str(folder / ".flwr"), "OMP_NUM_THREADS": "1",
            "FLWR_TELEMETRY_ENABLED": "0", "PATH": f"{own}:{os.environ['PATH']}",
        }  # fmt: skip

    def __enter__(self) -> Self:
        config = self.folder / ".flwr" / "config.toml"
        config.parent.mkdir()
        config.write_text(
            f'[superlink]\ndefault = "bench"\n[superlink.bench]\naddress = "127.0.0.1:{self._port}"\ninsecure = true\n'
        )
        shutil.copytree(_APP, self.folder / "app")
        self._stack.callback(self.kill_server)
        self.start_server()
        for number in range(1, self._num_clients + 1):
            node = ["flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{self._port}",
                    "--port", str(_FIRST_NODE_PORT + number), "--node-config", f"number={number}"]  # fmt: skip
            self._nodes.append(self._stack.enter_context(running(node, self._environment, self.folder)))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start_server(self) -> None:
        """Start the SuperLink, which starts a SuperExec and one ServerApp per run."""
        command = ["flower-superlink", "--insecure", "--port", str(self._port),
                   "--disable-runtime-dependency-installation", *self._database]  # fmt: skip
        self._link = start(command, self._environment, self.folder)
        wait_for(lambda: is_listening(self._port), "the SuperLink", 60)

    def kill_server(self) -> None:
        """Send SIGKILL to the SuperLink and to the processes that it has started."""
        kill(self.server_pids())
        self._link.wait()

    def server_pids(self) -> list[int]:
        """Return the SuperLink, the SuperExec and the ServerApp."""
        return [self._link.pid, *descendants(self._link.pid)]

    def run(self, out: Path, num_rounds: int, megabytes: float, task: str = "add") -> None:
        """Submit the app. It writes its times and weights to `out` at its end, and a line per round next to it."""
        config = (f"num-clients={self._num_clients} num-rounds={num_rounds} megabytes={megabytes} "
                  f'task="{task}" out="{out}"')  # fmt: skip
        self._flwr("run", str(self.folder / "app"), "bench", "--run-config", config)

    def has_ended(self, out: Path) -> bool:
        """Return whether the app has written its result. Raises AssertionError if a SuperNode has ended."""
        assert all(node.poll() is None for node in self._nodes), "a SuperNode has ended, and its app waits for all"
        return out.exists() and out.stat().st_size > 0

    def statuses(self) -> list[str]:
        """Return the states of all runs, the newest first."""
        runs: list[dict[str, Any]] = json.loads(self._flwr("ls", "bench", "--format", "json"))["runs"]
        return [run["status"] for run in runs]

    def _flwr(self, *arguments: str) -> str:
        done = subprocess.run(["flwr", *arguments], env=self._environment, check=True, capture_output=True, text=True,
                              cwd=self.folder, timeout=60)  # fmt: skip
        return done.stdout


def rounds_closed(out: Path) -> list[float]:
    """Return when each round was closed, according to what the app has written so far. The first time is the
    beginning."""
    path = out.with_suffix(".rounds")
    return [float(line) for line in path.read_text().splitlines()] if path.exists() else []
