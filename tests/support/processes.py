"""A federation of real processes, any of which a test may kill and start again."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Self, TypeVar

from fedssl.client import Client, ClientError, Retry
from fedssl.data import ImageData, save_npz
from fedssl_local.federation import AGGREGATORS
from support import traces
from support.environment import coordinator_environment
from support.preloaded import Forked, preloaded
from support.tables import Tables

T = TypeVar("T")


class Federation:
    """API, aggregators, beat and one worker per client, as they would run in production. Logs are in `folder`.

    Starts an aggregator for each of the queues `aggregate` and `distill` too. A test may also start "evaluator".
    """

    forks = True  # processes fork from one that has imported the libraries; otherwise each starts a new interpreter

    def __init__(
        self, database_url: str, redis_url: str, folder: Path, clients: Mapping[str, ImageData | Path], **settings: str
    ) -> None:
        self.folder = folder
        self.clients = clients
        self._database_url = database_url
        self._environment = coordinator_environment(
            database_url, redis_url, folder / "store", **{"FEDSSL_SWEEP_SECONDS": "0.5", **settings}
        )
        self._port = free_port()
        self._processes: dict[str, subprocess.Popen[bytes] | Forked] = {}
        self._tokens: dict[str, str] = {}
        self.url = f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> Self:
        try:
            for name in ("api", "aggregator", "distiller", "beat"):
                self.start(name)
            self._operator_token = self._run("token", "create", "--role", "admin")
            self.client = Client(self.url, self._operator_token, retry=Retry(seconds=30))
            self.wait_for(lambda: self.client.ready().status == "ok", "the API")
            for name, images in self.clients.items():
                if isinstance(images, ImageData):
                    save_npz(self._data(name), images)
                self._tokens[name] = self.client.create_token("worker", name).secret
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise
        return self

    def __exit__(self, error: object = None, *_: object) -> None:
        """End every process, and check that the events of every run are a path of the state machines."""
        for name in reversed(list(self._processes)):
            self._send(name, signal.SIGTERM)
        for name in list(self._processes):  # signalled together, because most of them take a second to end
            self._await_end(name)
        if error is None:
            with Tables(self._database_url) as tables:
                traces.check_all(tables)

    def start(self, name: str, **settings: str) -> None:
        """Start a service by its command's name, or a client's worker by the client's. `settings`: more environment."""
        command = self._worker(name) if name in self.clients else self._service(name)
        environment = dict(self._environment)
        if name in self.clients:
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "FEDSSL_WORKER_TOKEN": self._tokens[name]}
        environment |= settings
        with (self.folder / f"{name}.log").open("ab") as log:
            if self.forks and preloaded().suits(environment):
                self._processes[name] = preloaded().start(command[0], command[1:], environment, log)
            else:
                self._processes[name] = subprocess.Popen(
                    [sys.executable, "-m", *command], env=environment, stdout=log, stderr=log, start_new_session=True
                )

    def kill(self, name: str, signum: int = signal.SIGKILL) -> None:
        """End a process and wait for it."""
        self._send(name, signum)
        self._await_end(name)

    def _send(self, name: str, signum: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._processes[name].send_signal(signum)

    def _await_end(self, name: str) -> None:
        process = self._processes.pop(name)
        try:
            process.wait(60)  # a process that is killed before it has ended cleanly leaves other events
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def pid(self, name: str) -> int:
        """Return the id of a running process."""
        return self._processes[name].pid

    def wait_for(self, look: Callable[[], T | None], what: str, seconds: float = 90) -> T:
        """Poll until `look` returns something true. Fails with the end of the processes' logs."""
        beginning = time.monotonic()
        while (waited := time.monotonic() - beginning) < seconds:
            with contextlib.suppress(ClientError):
                if found := look():
                    return found
            for name, process in self._processes.items():
                if process.poll() is not None:
                    raise AssertionError(f"{name} ended with {process.returncode}\n{self.logs()}")
            time.sleep(min(0.02 + waited / 20, 0.1))  # an answer costs the API as much as a round of a small run
        raise AssertionError(f"waited {seconds} s in vain for {what}\n{self.logs()}")

    def logs(self) -> str:
        """Return the end of every log."""
        return "\n".join(f"--- {path.name}\n{_tail(path)}" for path in sorted(self.folder.glob("*.log")))

    def _run(self, *arguments: str) -> str:
        return preloaded().output("fedssl_coordinator", *arguments, environment=self._environment).strip()

    def _service(self, name: str) -> list[str]:
        arguments = [name]
        if name == "api":
            arguments += ["--port", str(self._port)]
        elif (kind := name.partition("-")[0]) in AGGREGATORS:  # "distiller-2" is a second distiller
            arguments = ["aggregator", "--queues", AGGREGATORS[kind]]
        return ["fedssl_coordinator", *arguments]

    def _worker(self, name: str) -> list[str]:
        return [
            "fedssl_worker", "run", "--coordinator", self.url, "--data", str(self._data(name)),
            "--state", str(self.folder / "state" / name), "--device", "cpu", "--threads", "1",
        ]  # fmt: skip

    def _data(self, name: str) -> Path:
        images = self.clients[name]
        return images if isinstance(images, Path) else self.folder / f"{name}.npz"


@contextlib.contextmanager
def federation(
    database_url: str, redis_url: str, folder: Path, clients: Mapping[str, ImageData | Path], **settings: str
) -> Iterator[Federation]:
    """Yield a running federation without its workers, which the test starts.

    `clients`: each client's images, or the path of a file that has them. `settings`: the coordinator's.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with Federation(database_url, redis_url, folder, clients, **settings) as running:
        yield running


def free_port() -> int:
    """Return a loopback port on which no process listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _tail(path: Path, num_bytes: int = 3000) -> str:
    return path.read_bytes()[-num_bytes:].decode(errors="replace")
