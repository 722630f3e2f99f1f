"""A whole federation on one machine: servers, coordinator and one worker per client, each in its own process.

The coordinator and the worker are started as `python -m ...` and never imported: this package depends on neither.
Secrets reach the processes through the environment or files of mode 0600, never through a command line.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedssl.client import Client, ClientError, Retry
from fedssl.errors import SpecError
from fedssl.files import write_private
from fedssl.local import HOST
from fedssl.packages import is_installed
from fedssl.protocol.data import DataConfig, PartitionConfig
from fedssl.protocol.model import EncoderConfig
from fedssl.wording import plural
from fedssl_local.errors import LocalError, PortTakenError
from fedssl_local.folder import Folder, Record
from fedssl_local.postgres import Postgres
from fedssl_local.process import append_log
from fedssl_local.server import choose_port, port_is_free
from fedssl_local.service import Service
from fedssl_local.supervisor import Supervisor
from fedssl_local.valkey import Valkey

DEFAULT_PORT = 8000
STEP_SECONDS = 120.0
WORKERS_SECONDS = 120.0
SWEEP_SECONDS = 1.0
AGGREGATORS = {"aggregator": "aggregate", "distiller": "distill", "evaluator": "evaluate", "notifier": "notify"}
"""The queue of each process that serves one. Notifications wait for other servers, so they have their own queue."""
WORKER_UNUSABLE, WORKER_REFUSED = 2, 3  # exit statuses of a worker: unusable settings or images; refused
# -P: Python must not import a user's file instead of a module of ours, or of a library, that has the same name.
PYTHON = (sys.executable, "-P", "-m")


@dataclass(frozen=True, slots=True, kw_only=True)
class Dealing:
    """The images that the clients will own.

    `partition` and `data` are used if the folder has no images yet; the images keep their own shape if `data` is None.
    If the folder has images already, the values in `required` must not differ from its record. `data_root` is a folder
    in which to search for the data set. `sources`, if there are any, are each client's own images (a folder or an .npz
    file); nothing is partitioned then.
    """

    partition: PartitionConfig = field(default_factory=PartitionConfig)
    sources: Mapping[str, str] = field(default_factory=dict)
    data: DataConfig | None = None
    required: Mapping[str, Any]
    data_root: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """How the processes run.

    `port` is the API's port. If it is 0, any free port is used; if it is None, the folder's last port, else 8000, else
    any free port. `encoders` are those that the workers of some clients declare from now on; a client that is not named
    keeps its own.
    """

    port: int | None = None
    device: str = "cpu"
    threads: int = 1
    encoders: Mapping[str, EncoderConfig] = field(default_factory=dict)


class Federation:
    """A running federation."""

    def __init__(self, folder: Folder, record: Record, supervisor: Supervisor) -> None:
        self.folder = folder
        self.record = record
        self._supervisor = supervisor

    @property
    def url(self) -> str:
        """The address of the API."""
        return f"http://{HOST}:{self.record.port}"

    def client(self, patience_seconds: float = 30.0) -> Client:
        """Return an operator's client, which the caller must close."""
        token = self.folder.operator_token.read_text(encoding="ascii").strip()
        return Client(self.url, token, retry=Retry(seconds=patience_seconds))

    def raise_if_failed(self) -> None:
        """Raise LocalError if an essential process died repeatedly."""
        self._supervisor.raise_if_failed()

    def raise_if_given_up(self) -> None:
        """Raise LocalError if a process that is not essential died repeatedly, and the rest continues without it."""
        self._supervisor.raise_if_given_up()

    def run_until_stopped(self) -> None:
        """Block until Ctrl-C or SIGTERM, then stop everything. Raises LocalError."""
        self._supervisor.run_until_stopped()


@contextmanager
def running_federation(
    folder: Folder,
    dealing: Dealing,
    machine: Machine,
    *,
    on_step: Callable[[str], None] = lambda what: None,
    on_event: Callable[[str, str], None] = lambda name, what: None,
) -> Iterator[Federation]:
    """Start, or start again, the federation in the folder, and stop everything when the block ends.

    Raises LocalError, DataError, ClientError, and SpecError if the folder was partitioned differently.
    """
    require_installed()
    folder.require_usable()
    with _own_variables(), Supervisor(folder.root, on_event=on_event) as supervisor:
        folder.root.chmod(0o700)
        kept = folder.read()
        record = _deal(folder, dealing, on_step) if kept is None else kept
        folder.require_same(record, dealing.required)
        record = _as_the_machine_says(record, machine)
        folder.write(record)
        federation = Federation(folder, record, supervisor)
        _Starter(federation, supervisor, machine, on_step).start()
        yield federation
    if supervisor.is_hurried:
        raise KeyboardInterrupt  # the supervisor handled the Ctrl-C; the code after the block must not run either


def require_installed() -> None:
    """Raise LocalError if the coordinator or the worker is not installed along with this package."""
    missing = [name for name in ("fedssl_coordinator", "fedssl_worker") if not is_installed(name)]
    if missing:
        wheels = " ".join(name.replace("_", "-") for name in missing)
        raise LocalError(f"a local federation needs {' and '.join(missing)}: install with pip install {wheels}")


@contextmanager
def _own_variables() -> Iterator[None]:
    """Hide the user's FEDSSL_* variables from the processes: they may belong to, or be a secret of, something else."""
    hidden = {name: value for name, value in os.environ.items() if name.startswith("FEDSSL_") and name != "FEDSSL_DATA"}
    for name in hidden:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(hidden)


def _deal(folder: Folder, dealing: Dealing, on_step: Callable[[str], None]) -> Record:
    if dealing.sources:
        on_step(f"reading the images of {plural(len(dealing.sources), 'client')}")
        data = dealing.data or _own_shape(dealing, on_step)
        return folder.copy_sources(dealing.sources, data, dealing.data_root)
    on_step(f"partitioning {dealing.partition.dataset}, number of clients: {dealing.partition.num_clients}")
    data = dealing.data or _own_shape(dealing, on_step)
    return folder.partition_dataset(dealing.partition, data, dealing.data_root)


def _as_the_machine_says(record: Record, machine: Machine) -> Record:
    unknown = sorted(set(machine.encoders) - set(record.clients))
    if unknown:
        raise SpecError(f"no client is called {unknown[0]}: there are {', '.join(record.clients[:12])}")
    encoders = record.encoders | dict(machine.encoders)
    return record.model_copy(update={"port": _choose_port(machine.port, record.port), "encoders": encoders})


def _own_shape(dealing: Dealing, on_step: Callable[[str], None]) -> DataConfig:
    """Return the images' own number of channels, and their shorter side within the limits of a run.

    If the clients' images differ, the size is that of the smallest, so that none are enlarged, and the images are RGB
    if any of them are.
    """
    from fedssl.artifacts.images import MAX_SIZE, MIN_SIZE

    names = list(dealing.sources.values()) or [dealing.partition.dataset]
    found = {_shape_of(name, dealing.data_root) for name in names}
    channels, own = max(each[0] for each in found), min(each[1] for each in found)
    size = min(max(own, MIN_SIZE), MAX_SIZE)
    if len(found) > 1:
        on_step(f"the clients' images differ in shape: all are converted to {channels} channels of {size} pixels")
    elif size != own:
        on_step(f"the images of {own} pixels are scaled to {size}: give --spec with a data.image_size for another size")
    return DataConfig(channels=channels, image_size=size)


def _shape_of(name: str, root: Path | None) -> tuple[int, int]:
    """Return the channels and the shorter side of a data set's images."""
    from fedssl.data.datasets import file_shape, load_arrays

    if (found := file_shape(name, "train", root)) is not None:
        return found
    shape = load_arrays(name, "train", root).pixels.shape
    return shape[1], min(shape[2:])


def _choose_port(wanted: int | None, last: int | None) -> int:
    if wanted:
        if not port_is_free(wanted):
            raise PortTakenError("the API", wanted)
        return wanted
    candidates = [last] if wanted == 0 else [last, DEFAULT_PORT]
    return next((port for port in candidates if port is not None and port_is_free(port)), None) or choose_port()


class _Starter:
    """Starts every process after those that it needs."""

    def __init__(
        self, federation: Federation, supervisor: Supervisor, machine: Machine, on_step: Callable[[str], None]
    ) -> None:
        self._federation = federation
        self._folder = federation.folder
        self._record = federation.record
        self._supervisor = supervisor
        self._machine = machine
        self._on_step = on_step
        threads = str(machine.threads)
        self._threads = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}

    def start(self) -> None:
        self._on_step("starting Postgres and Valkey")
        if not (self._folder.postgres / "pgdata").exists():
            # A new database does not have the tokens of an earlier one.
            for token in self._folder.tokens.glob("*"):
                token.unlink()
        postgres, valkey = Postgres(self._folder.postgres), Valkey(self._folder.valkey)
        self._supervisor.start(postgres)
        self._supervisor.start(valkey)
        coordinator = {
            "FEDSSL_DATABASE_URL": postgres.url,
            "FEDSSL_REDIS_URL": valkey.url,
            "FEDSSL_STORE_PATH": str(self._folder.store.absolute()),
            "FEDSSL_SWEEP_SECONDS": str(SWEEP_SECONDS),
        }
        self._start_coordinator(coordinator)
        self._make_tokens(coordinator)
        self._start_workers()

    def _start_coordinator(self, env: dict[str, str]) -> None:
        self._on_step("bringing the database up to date")
        self._run_once("migrate", ["migrate"], env)
        self._on_step("starting the coordinator")
        # One process per queue: work that takes hours delays no other work. An idle process is small, because torch is
        # imported with the first work.
        on_device = env | self._threads | {"FEDSSL_DEVICE": self._machine.device}
        for name, queue in AGGREGATORS.items():
            arguments = ["fedssl_coordinator", "aggregator", "--queues", queue]
            self._start_service(name, arguments, on_device, is_essential=queue == "aggregate")
        # It has no state, so there is no need to wait for its end.
        self._start_service("beat", ["fedssl_coordinator", "beat"], env, stop_timeout_seconds=0.2)
        arguments = ["fedssl_coordinator", "api", "--host", HOST, "--port", str(self._record.port)]
        self._start_service("api", arguments, env, ready=self._api_answers)

    def _start_workers(self) -> None:
        self._on_step("starting the workers")
        since = datetime.now(UTC)
        with self._federation.client() as client:
            revoked = {known.id for known in client.clients() if known.revoked_at is not None}
            wanted = [name for name in self._record.clients if name not in revoked]
            for name in sorted(revoked & set(self._record.clients)):
                self._on_step(f"{name} was revoked: its worker is not started")
            for name in wanted:
                self._start_worker(name)
            self._await_workers(client, set(wanted), since)

    def _start_worker(self, name: str) -> None:
        settings = {
            "FEDSSL_WORKER_COORDINATOR": self._federation.url,
            "FEDSSL_WORKER_DATA": str(self._folder.shard(name).absolute()),
            "FEDSSL_WORKER_STATE": str(self._folder.worker_state(name).absolute()),
            "FEDSSL_WORKER_TOKEN_FILE": str(self._folder.worker_token(name).absolute()),
            "FEDSSL_WORKER_DEVICE": self._machine.device,
            "FEDSSL_WORKER_THREADS": str(self._machine.threads),
        }
        if (encoder := self._record.encoders.get(name)) is not None:
            settings["FEDSSL_WORKER_ENCODER"] = encoder.model_dump_json()
        # A worker that was refused would be refused again, and the other clients continue without it.
        self._start_service(
            name,
            ["fedssl_worker", "run"],
            settings | self._threads,
            final_statuses=(WORKER_REFUSED,),
            hopeless_statuses=(WORKER_UNUSABLE,),
            is_essential=False,
        )

    def _await_workers(self, client: Client, names: set[str], since: datetime) -> None:
        """Wait until all workers have registered, so that a run that is submitted next has the whole cohort."""
        deadline = time.monotonic() + WORKERS_SECONDS
        while True:
            self._supervisor.raise_if_failed()
            seen = {known.id for known in client.clients() if known.last_seen_at and known.last_seen_at >= since}
            if names <= seen | set(self._supervisor.given_up):
                return
            if time.monotonic() > deadline:
                late = ", ".join(sorted(names - seen))
                self._on_step(f"continuing without {late}: no heartbeat within {WORKERS_SECONDS:g} s, see its log")
                return
            time.sleep(0.2)

    def _make_tokens(self, env: dict[str, str]) -> None:
        self._folder.tokens.mkdir(mode=0o700, exist_ok=True)
        if not self._folder.operator_token.exists():
            arguments = ["token", "create", "--role", "admin", "--label", "fedssl up"]
            write_private(self._folder.operator_token, self._run_once("token", arguments, env))
        missing = [name for name in self._record.clients if not self._folder.worker_token(name).exists()]
        if not missing:
            return
        with self._federation.client() as client:
            for name in missing:
                secret = client.create_token("worker", client_id=name, label="fedssl up").secret
                write_private(self._folder.worker_token(name), secret)

    def _start_service(self, name: str, arguments: list[str], env: dict[str, str], **options: Any) -> None:
        log_path = self._folder.log(name).absolute()
        self._supervisor.start(Service(name=name, command=[*PYTHON, *arguments], log_path=log_path, env=env, **options))

    def _run_once(self, name: str, arguments: list[str], env: dict[str, str]) -> str:
        """Run one of the coordinator's commands to its end and return what it printed. Raises LocalError."""
        path = self._folder.log(name)
        with append_log(path) as log:
            try:
                done = subprocess.run(
                    [*PYTHON, "fedssl_coordinator", *arguments],
                    env={**os.environ, **env},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    timeout=STEP_SECONDS,
                    check=False,
                    start_new_session=True,  # a terminal's Ctrl-C is for us, and leaving kills the command
                )
            except subprocess.TimeoutExpired:
                what = f"fedssl_coordinator {arguments[0]} did not end within {STEP_SECONDS:g} s"
                raise LocalError(f"{what}: see {path}") from None
        if done.returncode != 0:
            last = "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-15:])
            raise LocalError(f"fedssl_coordinator {arguments[0]} failed. The end of {path}:\n{last}")
        return done.stdout.strip()

    def _api_answers(self) -> bool:
        try:
            with Client(self._federation.url, timeout=2.0) as client:
                return client.ready().status == "ok"
        except ClientError:
            return False
