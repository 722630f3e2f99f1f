"""The supervisor, with real processes that die, hang, daemonise and are killed."""

import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedssl_local import (
    CrashLoopError,
    FolderInUseError,
    GivenUpError,
    LocalError,
    Postgres,
    RestartPolicy,
    Service,
    ServiceFailedError,
    Supervisor,
    Valkey,
)
from fedssl_local import process as process_module

pytestmark = pytest.mark.full


QUICK = RestartPolicy(first_seconds=0.02, max_seconds=0.05, max_quick_deaths=3)
Find = Callable[[str], list[int]]
Until = Callable[..., None]

# A parent with a child in its group and a daemon in its own session. It records which signal ended it. It sleeps in
# short pieces, because a signal that arrives just before a long sleep is noticed only after it.
FAMILY = """
import signal, subprocess, sys, time
def end(signum, frame):
    print(sys.argv[1], "got", signal.Signals(signum).name, flush=True)
    raise SystemExit(0)
for signum in (signal.SIGINT, signal.SIGTERM):
    signal.signal(signum, signal.SIG_IGN if "stubborn" in sys.argv else end)
subprocess.Popen(["sleep", "600"])
subprocess.Popen(["sleep", "600"], start_new_session=True)
print(sys.argv[1], "up", flush=True)
while True:
    time.sleep(0.05)
"""

# A program with a supervisor of two families. Arguments: folder, token, what to do, arguments of the families.
PROGRAM = """
import os, sys, threading, time
from pathlib import Path
from fedssl_local import Postgres, Service, Supervisor, Valkey
folder, token, what, *words = sys.argv[1:]
folder = Path(folder)
log = folder / "family.log"
def family(name):
    return Service(
        name=name, command=[sys.executable, "-c", os.environ["FAMILY"], name, *words],
        env={"TOKEN": token}, log_path=log,
        ready=lambda: log.exists() and f"{name} up" in log.read_text(), stop_timeout_seconds=60,
    )
with Supervisor(folder, on_event=lambda name, what: print(name, what.partition(" (")[0], flush=True)) as supervisor:
    supervisor.start(family("one"))
    supervisor.start(family("two"))
    if what == "servers":
        supervisor.start(Postgres(folder / "postgres", durable=False))
        supervisor.start(Valkey(folder / "valkey"))
        (folder / "valkey.pid").write_text(str(supervisor.pid("valkey")))
    if what == "fork" and os.fork() == 0:
        time.sleep(600)
    def announce():
        while what != "busy" and not supervisor._is_waiting:
            time.sleep(0.01)
        print("ready", flush=True)
    threading.Thread(target=announce).start()
    while what == "busy":
        time.sleep(0.05)
    supervisor.run_until_stopped()
print("hurried" if supervisor.is_hurried else "done", flush=True)
"""


@pytest.fixture
def token(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("FAMILY", FAMILY)
    return f"token-{uuid.uuid4()}"


def until_ready(program: Any) -> None:
    while (line := program.line()) != "ready":
        assert line, "it ended"


def sleeper(folder: Path, source: str = "import time; time.sleep(600)", **options: Any) -> Service:
    return Service(name="sleeper", command=[sys.executable, "-c", source], log_path=folder / "sleeper.log", **options)


def test_all_processes_end_if_the_supervisor_is_killed(
    tmp_path: Path, token: str, program: Callable[..., Any], processes_with: Find, until: Until
) -> None:
    supervisor = program(PROGRAM, tmp_path, token, "servers")
    until_ready(supervisor)
    assert len(processes_with(token)) == 1 + 2 * 4
    mark = Postgres(tmp_path / "postgres")._mark()
    assert len(processes_with(mark)) > 5
    valkey_pid = int((tmp_path / "valkey.pid").read_text())
    assert valkey_pid in processes_with("valkey-server")
    port = (tmp_path / "valkey" / "port").read_text()
    supervisor.end(signal.SIGKILL)
    # They start at once: the locks wait for the processes that still run.
    with (
        Supervisor(tmp_path),
        Postgres(tmp_path / "postgres", durable=False),
        Valkey(tmp_path / "valkey") as valkey,
    ):
        assert processes_with(token) == []
        assert valkey_pid not in processes_with("valkey-server")
        assert f"{valkey.port}\n" == port
    until(lambda: not processes_with(mark))


def test_a_forked_copy_of_the_supervisor_does_not_keep_its_services_alive(
    tmp_path: Path, token: str, program: Callable[..., Any], processes_with: Find, until: Until
) -> None:
    supervisor = program(PROGRAM, tmp_path, token, "fork")
    until_ready(supervisor)
    os.kill(supervisor.process.pid, signal.SIGKILL)
    until(lambda: len(processes_with(token)) == 1)
    [copy] = processes_with(token)
    os.kill(copy, signal.SIGKILL)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_stop_everything_in_reverse_order(
    tmp_path: Path, token: str, program: Callable[..., Any], processes_with: Find, signum: int
) -> None:
    supervisor = program(PROGRAM, tmp_path, token, "wait")
    until_ready(supervisor)
    status, output = supervisor.end(signum)
    assert status == 0
    assert output.splitlines() == ["two stopping", "two stopped", "one stopping", "one stopped", "done"]
    assert processes_with(token) == []
    # They do not get SIGINT, even if it was sent to the whole terminal.
    assert (tmp_path / "family.log").read_text().splitlines()[2:] == ["two got SIGTERM", "one got SIGTERM"]


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, -signal.SIGINT)])
def test_signals_stop_everything_while_the_program_is_busy(
    tmp_path: Path, token: str, program: Callable[..., Any], processes_with: Find, signum: int, status: int
) -> None:
    supervisor = program(PROGRAM, tmp_path, token, "busy")
    until_ready(supervisor)
    found, output = supervisor.end(signum)
    assert found == status
    assert "done" not in output
    assert processes_with(token) == []
    assert "one got SIGTERM" in (tmp_path / "family.log").read_text()


def test_a_second_ctrl_c_kills_stubborn_services(
    tmp_path: Path, token: str, program: Callable[..., Any], processes_with: Find, until: Until
) -> None:
    supervisor = program(PROGRAM, tmp_path, token, "wait", "stubborn")
    until_ready(supervisor)
    os.killpg(supervisor.process.pid, signal.SIGINT)
    assert supervisor.line() == "two stopping"
    time.sleep(0.2)
    assert supervisor.process.poll() is None
    began = time.monotonic()
    status, output = supervisor.end(signal.SIGINT)
    assert status == 0
    assert output.endswith("hurried\n")
    assert time.monotonic() - began < 5
    assert processes_with(token) == []


def test_a_service_that_dies_is_started_again(tmp_path: Path, token: str, processes_with: Find, until: Until) -> None:
    events: list[tuple[str, str]] = []
    family = [sys.executable, "-c", FAMILY, "one"]
    service = Service(name="one", command=family, env={"TOKEN": token}, log_path=tmp_path / "log")
    with Supervisor(tmp_path, on_event=lambda *event: events.append(event), restart_policy=QUICK) as supervisor:
        supervisor.start(service)
        first = supervisor.pid("one")
        assert first is not None
        until(lambda: len(processes_with(token)) == 4)
        os.kill(first, signal.SIGKILL)
        until(lambda: supervisor.pid("one") not in (None, first))
        second = supervisor.pid("one")
        # The children of the dead service have ended with it.
        until(lambda: len(processes_with(token)) == 4)
        supervisor.raise_if_failed()
        with pytest.raises(ValueError, match="there is a service named one"):
            supervisor.start(service)
    assert processes_with(token) == []
    assert events == [
        ("one", f"started (pid {first})"),
        ("one", "was killed by SIGKILL; starting again in 0.02 s"),
        ("one", f"started again (pid {second})"),
        ("one", "stopping"),
        ("one", "stopped"),
    ]


def test_a_service_whose_subreaper_is_killed_is_replaced(
    tmp_path: Path, token: str, processes_with: Find, until: Until
) -> None:
    service = sleeper(tmp_path, env={"TOKEN": token})
    with Supervisor(tmp_path, restart_policy=QUICK) as supervisor:
        supervisor.start(service)
        first = supervisor.pid("sleeper")
        [subreaper] = [pid for pid in processes_with(token) if pid != first]
        os.kill(subreaper, signal.SIGKILL)
        until(lambda: supervisor.pid("sleeper") not in (None, first))
        assert not {first, subreaper} & set(processes_with(token))


def test_a_server_that_dies_is_started_again(tmp_path: Path, until: Until) -> None:
    server = Valkey(tmp_path / "valkey")
    with Supervisor(tmp_path, restart_policy=QUICK) as supervisor:
        supervisor.start(server)
        url, first = server.url, server.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        until(lambda: server.pid not in (None, first))
        assert server.url == url
    assert not server.is_running


def test_a_crash_loop_of_an_essential_service_stops_everything(tmp_path: Path) -> None:
    events: list[str] = []
    with Supervisor(tmp_path, on_event=lambda _, what: events.append(what), restart_policy=QUICK) as supervisor:
        supervisor.start(sleeper(tmp_path, "print('no such data set'); raise SystemExit(3)"))
        with pytest.raises(
            CrashLoopError, match=r"(?s)sleeper died 3 times.*exited with status 3.*sleeper.log:\nno such data set"
        ):
            supervisor.run_until_stopped()
        with pytest.raises(CrashLoopError):
            supervisor.raise_if_failed()
    delays = ["exited with status 3; starting again in 0.02 s", "exited with status 3; starting again in 0.04 s"]
    assert [what for what in events if what.startswith("exited")] == delays
    assert "given up: nothing works without it, so everything is stopped" in events


def test_a_crash_loop_of_a_non_essential_service_stops_only_this_service(tmp_path: Path, until: Until) -> None:
    events: list[tuple[str, str]] = []
    other = Service(name="other", command=["sleep", "600"], log_path=tmp_path / "other.log")
    with Supervisor(tmp_path, on_event=lambda *event: events.append(event), restart_policy=QUICK) as supervisor:
        supervisor.start(other)
        pid = supervisor.pid("other")
        supervisor.start(sleeper(tmp_path, "print('no memory'); raise SystemExit(3)", is_essential=False))
        until(lambda: supervisor.given_up)
        time.sleep(0.2)
        assert supervisor.given_up == ("sleeper",)
        assert supervisor.pid("sleeper") is None
        assert supervisor.pid("other") == pid
        supervisor.raise_if_failed()
        with pytest.raises(GivenUpError, match=r"(?s)not started again: sleeper\n.*died 3 times.*status 3.*no memory"):
            supervisor.raise_if_given_up()
    (told,) = [what for name, what in events if name == "sleeper" and what.startswith("given up")]
    assert "everything else continues without it" in told
    assert "no memory" in told


def test_a_service_with_a_hopeless_exit_status_is_not_started_again(tmp_path: Path, until: Until) -> None:
    events: list[str] = []
    source = "print('no such folder', flush=True); raise SystemExit(2)"
    with Supervisor(tmp_path, on_event=lambda _, what: events.append(what)) as supervisor:
        supervisor.start(sleeper(tmp_path, source, hopeless_statuses=(2,), is_essential=False))
        until(lambda: supervisor.given_up)
        assert len(events) == 2
        with pytest.raises(GivenUpError, match=r"(?s)exited with status 2, as it would at every start.*no such folder"):
            supervisor.raise_if_given_up()


def test_the_end_of_a_service_that_is_never_restarted_is_only_reported(tmp_path: Path, until: Until) -> None:
    events: list[str] = []
    with Supervisor(tmp_path, on_event=lambda _, what: events.append(what)) as supervisor:
        supervisor.start(sleeper(tmp_path, "raise SystemExit(3)", restart="never"))
        until(lambda: events[1:])
        assert events[1] == "exited with status 3"
        assert supervisor.pid("sleeper") is None
        supervisor.raise_if_failed()


def test_a_final_exit_status_is_only_reported_and_any_other_causes_a_restart(tmp_path: Path, until: Until) -> None:
    events: list[str] = []
    source = """
import pathlib, sys
seen = pathlib.Path(sys.argv[-1])
status = 3 if seen.exists() else 1
seen.touch()
sys.exit(status)
"""
    service = sleeper(tmp_path, source, final_statuses=(3,))
    service = replace(service, command=[*service.command, str(tmp_path / "seen")])
    with Supervisor(tmp_path, on_event=lambda _, what: events.append(what), restart_policy=QUICK) as supervisor:
        supervisor.start(service)
        until(lambda: "exited with status 3" in events)
        assert "exited with status 1; starting again in 0.02 s" in events
        assert supervisor.pid("sleeper") is None
        supervisor.raise_if_failed()


def test_a_start_waits_until_the_service_is_ready(tmp_path: Path) -> None:
    log = tmp_path / "sleeper.log"
    source = "import time; time.sleep(0.2); print('up', flush=True); time.sleep(600)"
    with Supervisor(tmp_path) as supervisor:
        supervisor.start(sleeper(tmp_path, source, ready=lambda: log.exists() and "up" in log.read_text()))
        assert log.read_text() == "up\n"


def test_a_service_that_does_not_become_ready_is_reported(tmp_path: Path, token: str, processes_with: Find) -> None:
    with Supervisor(tmp_path) as supervisor:
        with pytest.raises(
            ServiceFailedError, match=r"(?s)exited with status 1 before it was ready.*ZeroDivisionError"
        ):
            supervisor.start(sleeper(tmp_path, "1 / 0", ready=lambda: False))
        with pytest.raises(ServiceFailedError, match=r"not ready within 0.2 s"):
            supervisor.start(sleeper(tmp_path, ready=lambda: False, ready_timeout_seconds=0.2, env={"TOKEN": token}))
        assert processes_with(token) == []
        missing = Service(name="missing", command=["/no/such/program"], log_path=tmp_path / "log", ready=lambda: False)
        with pytest.raises(ServiceFailedError, match=r"(?s)status 127.*cannot execute /no/such/program"):
            supervisor.start(missing)


def test_a_folder_can_have_only_one_supervisor(tmp_path: Path, token: str, program: Callable[..., Any]) -> None:
    first = program(PROGRAM, tmp_path, token, "wait")
    until_ready(first)
    with pytest.raises(FolderInUseError, match=f"in use by process {first.process.pid}: .*kill {first.process.pid}"):
        Supervisor(tmp_path).__enter__()
    first.end(signal.SIGTERM)
    with Supervisor(tmp_path):
        pass


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_exception_in_a_callback_is_reported(tmp_path: Path, until: Until) -> None:
    def tell(name: str, what: str) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise ZeroDivisionError

    with Supervisor(tmp_path, on_event=tell) as supervisor:
        supervisor.start(sleeper(tmp_path, "raise SystemExit(3)"))
        with pytest.raises(LocalError, match="the watch over sleeper broke"):
            supervisor.run_until_stopped()


def test_a_long_log_is_rotated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_module, "LOG_BYTES", 5)
    for text in ("first", "second", "third"):
        with process_module.Process(["echo", text], log_path=tmp_path / "log") as process:
            assert process.wait() == 0
            assert process.last_lines() == text
    assert (tmp_path / "log").read_text() == "third\n"
    assert (tmp_path / "log.1").read_text() == "second\n"
