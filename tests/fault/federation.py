"""A federation with its own servers, every part of which can be killed, stopped and disconnected."""

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, LiteralString, Self, TypeVar
from uuid import UUID

import psycopg
import redis

from fault import specs
from fault.injected import Injected
from fault.patience import scaled_timeout
from fault.proxy import Proxy
from fedssl.client import ClientError
from fedssl.data import ImageData
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.states import RunState
from fedssl.protocol.views import RunView
from fedssl_local import Postgres, Valkey
from fedssl_local.server import Server, choose_port
from support.environment import coordinator_environment, migrate
from support.processes import Federation
from support.tables import Tables

T = TypeVar("T")

POSTGRES, VALKEY = "postgres", "valkey"
COORDINATOR = ("api", "aggregator", "distiller", "beat")


class FaultFederation(Federation):
    """APIs, aggregator, distiller, beat, workers behind a proxy, Postgres and Valkey: all of them are real."""

    forks = False  # faults also affect starting interpreters, and the points allow for the time that a start takes

    def __init__(
        self,
        folder: Path,
        injected: Injected,
        *,
        num_apis: int = 1,
        images: Mapping[str, ImageData] | None = None,
        environment_of: Callable[[str], dict[str, str]] = lambda name: {},
        **settings: str,
    ) -> None:
        """Create the federation.

        `images`: each client's, by default those of two clients. `environment_of`: additional variables of the
        process with this name. `settings`: the coordinator's.
        """
        self.injected = injected
        self.postgres = Postgres(folder / POSTGRES)  # durable: an acknowledged commit survives a kill
        self.valkey = Valkey(folder / VALKEY)
        self._settings = {"FEDSSL_CHECKPOINT_SECONDS": "0", **settings}
        self._root = folder
        self._num_apis = num_apis
        self._images = specs.images() if images is None else images
        self._environment_of = environment_of
        self._names: set[str] = set()
        self.traced: set[UUID] = set()

    def __enter__(self) -> Self:
        try:
            return self._enter()
        except BaseException:
            self.__exit__()
            raise

    def _enter(self) -> Self:
        self.postgres.start()
        self.valkey.start()
        folder = self._root / "federation"
        folder.mkdir(exist_ok=True)
        super().__init__(self.postgres.url, self.valkey.url, folder, self._images, **self._settings)
        migrate(coordinator_environment(self.postgres.url, self.valkey.url, folder / "store"))
        self._ports = {"api": self._port, **{f"api-{n}": choose_port() for n in range(2, self._num_apis + 1)}}
        self.proxy = Proxy(list(self._ports.values()), self.injected).__enter__()
        super().__enter__()
        self.proxy.refuses_delivery = lambda token: token == self._tokens.get("client-1")  # so that both ways occur
        for name in [*list(self._ports)[1:], *self.clients]:
            self.start(name)
        self.until(lambda: self._num_registered() == len(self.clients), "the workers")
        return self

    def _num_registered(self) -> int:
        return sum(client.registered_at is not None for client in self.client.clients())

    def __exit__(self, *_: object) -> None:
        if hasattr(self, "_processes"):
            for name in list(self._processes):
                self.kill(name)
            self.proxy.__exit__()
        self.valkey.stop()
        self.postgres.stop()

    @property
    def store(self) -> Path:
        return self.folder / "store"

    @property
    def names(self) -> tuple[str, ...]:
        """The names of everything that can be killed."""
        return (*COORDINATOR, POSTGRES, VALKEY, *self.clients)

    def command(self, *arguments: str) -> str:
        """Run `fedssl-coordinator` next to the processes, and return what it prints. It must succeed."""
        return self._run(*arguments)

    def state(self, client: str) -> Path:
        """Return the state folder of a client's worker."""
        return self.folder / "state" / client

    def owner(self, token: str) -> str:
        """Return the client whose worker uses this token."""
        return next(name for name, own in self._tokens.items() if own == token)

    def start(self, name: str, **settings: str) -> None:
        self._names.add(name)
        super().start(name, **self._environment_of(name), **settings)

    def heal(self) -> None:
        """Restart all servers and processes that a failed test has left dead."""
        for server in (self.postgres, self.valkey):
            server.start()
        for name in sorted(self._names):
            if name not in self._processes or self._processes[name].poll() is not None:
                self.start(name)

    # Faults

    def crash(self, name: str, point: str = "at random") -> None:
        """Send SIGKILL to a process or a server, and wait for its end."""
        self.injected.note("SIGKILL", name, point)
        server = self._server(name)
        if server is None:
            self.kill(name, signal.SIGKILL)
            return
        assert server.pid is not None, f"{name} does not run"
        os.kill(server.pid, signal.SIGKILL)
        server.wait()

    def revive(self, name: str) -> None:
        """Restart a process or a server."""
        server = self._server(name)
        if server is None:
            self.start(name)
        else:
            server.start()

    def crash_and_revive(self, name: str, point: str = "at random", away_seconds: float = 0.0) -> None:
        self.crash(name, point)
        time.sleep(away_seconds)
        self.revive(name)

    @contextmanager
    def switched_off(self, name: str, seconds: float) -> Iterator[None]:
        """Shut a server down cleanly during the block, and for at least this many seconds."""
        self.injected.note("stop and start", name, f"for {seconds:g} s")
        server = self._server(name)
        assert server is not None, f"{name} is no server"
        end = time.monotonic() + seconds
        server.stop()
        try:
            yield
            time.sleep(max(0.0, end - time.monotonic()))
        finally:
            server.start()

    def forget_messages(self, point: str) -> None:
        """Delete everything in Redis."""
        self.injected.note("FLUSHALL", VALKEY, point)
        with redis.Redis.from_url(self.valkey.url) as connection:
            connection.flushall()

    @contextmanager
    def stopped(self, name: str, point: str = "at random") -> Iterator[None]:
        """Stop a process or a server with SIGSTOP, and continue it with SIGCONT at the end of the block."""
        self.injected.note("SIGSTOP", name, point)
        pids = self._family(name)
        _send(pids, signal.SIGSTOP)
        try:
            yield
        finally:
            _send(pids, signal.SIGCONT)

    def is_stopped(self, name: str) -> bool:
        """Return whether all processes with this name are stopped by a signal."""
        return all(
            Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "T"
            for pid in self._family(name)
        )

    def refusing_connections(self, seconds: float) -> AbstractContextManager[None]:
        """Let Postgres end all connections and accept none during the block and for at least this many seconds."""
        self.injected.note("refused connections", POSTGRES, f"for {seconds:g} s")
        return self._altered("ALLOW_CONNECTIONS false", "ALLOW_CONNECTIONS true", seconds)

    def read_only(self, seconds: float) -> AbstractContextManager[None]:
        """Make new connections read-only during the block and for at least this many seconds, and end the existing
        ones.

        Connections that are opened during this time stay read-only afterwards.
        """
        self.injected.note("takes no writes", POSTGRES, f"for {seconds:g} s")
        setting = "default_transaction_read_only"
        return self._altered(f"SET {setting} = on", f"RESET {setting}", seconds)

    @contextmanager
    def _altered(self, change: str, back: str, seconds: float) -> Iterator[None]:
        """Alter the database during the block and for at least this many seconds, after ending all connections."""
        end = time.monotonic() + seconds
        administrator = self.postgres.database_url("postgres").replace("+psycopg", "", 1)
        with psycopg.connect(administrator, autocommit=True) as connection:
            connection.execute(f"ALTER DATABASE fedssl {change}")
            try:
                connection.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = 'fedssl'")
                yield
                time.sleep(max(0.0, end - time.monotonic()))
            finally:
                connection.execute(f"ALTER DATABASE fedssl {back}")

    # Runs

    def begin(self, spec: RunSpec) -> UUID:
        """Create a run, even if the coordinator needs a long time to become available again."""
        return self.client.create_run(spec, idempotency_key=os.urandom(8).hex()).id

    def finished(self, run_id: UUID, seconds: float = 120) -> RunView:
        """Wait for the run's end, and return the run."""

        def look() -> RunView | None:
            run = self.client.run(run_id)
            return run if run.state == RunState.FINISHED else None

        return self.until(look, f"the end of run {run_id}: {self._where(run_id)}", seconds)

    # Looking

    def tables(self) -> Tables:
        """Return a separate connection to the database."""
        return Tables(self.postgres.url)

    def query(self, statement: LiteralString, *values: Any) -> list[tuple[Any, ...]]:
        with self.tables() as tables:
            return tables.query(statement, *values)

    def until(self, look: Callable[[], T | None], what: str, seconds: float = 60) -> T:
        """Poll until `look` returns a true value, even if Postgres or the API does not answer at times."""

        def patiently() -> T | None:
            with suppress(ClientError, psycopg.Error):
                return look()
            return None

        return self.wait_for(patiently, what, seconds)

    def wait_for(self, look: Callable[[], T | None], what: str, seconds: float = 90) -> T:
        return super().wait_for(look, what, scaled_timeout(seconds))

    def _where(self, run_id: UUID) -> str:
        with suppress(ClientError, psycopg.Error):
            rows = self.query(
                "SELECT round_number, client_id, attempt, state FROM assignments WHERE run_id = %s ORDER BY 1, 2, 3",
                run_id,
            )
            return str(rows[-4:])
        return "nobody can say where it stands"

    def _server(self, name: str) -> Server | None:
        return {POSTGRES: self.postgres, VALKEY: self.valkey}.get(name)

    def _family(self, name: str) -> list[int]:
        """Return the id of a process, or the ids of a server and its children that serve Postgres's connections."""
        server = self._server(name)
        if server is None:
            return [self.pid(name)]
        assert server.pid is not None, f"{name} does not run"
        children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
        return [server.pid, *map(int, children)]

    def _service(self, name: str) -> list[str]:
        if name in self._ports:
            return ["fedssl_coordinator", "api", "--port", str(self._ports[name])]
        return super()._service("beat" if name == "beat-2" else name)

    def _worker(self, name: str) -> list[str]:
        return [self.proxy.url if part == self.url else part for part in super()._worker(name)]


def _send(pids: list[int], signum: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signum)
