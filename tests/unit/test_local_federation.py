"""The processes that `fedssl up` starts, with their tokens and settings. integration/cli/test_up.py starts them all."""

import signal
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedssl.errors import SpecError
from fedssl.protocol.data import DataConfig, PartitionConfig
from fedssl.protocol.model import EncoderConfig
from fedssl_local import LocalError, federation
from fedssl_local.federation import (
    Dealing,
    Federation,
    Machine,
    _as_the_machine_says,
    _Starter,
    running_federation,
)
from fedssl_local.folder import Folder, Record
from fedssl_local.service import Service
from fedssl_local.supervisor import STOP_SIGNALS, RestartPolicy, Supervisor
from support.waiting import wait_until

RECORD = Record(channels=1, image_size=16, num_images={"a": 10, "b": 20}, port=8123)
MACHINE = Machine()
ENCODER = EncoderConfig(name="convnet", widths=(4, 8))


class Scene:
    """A start in a folder, with a supervisor that only records, and a coordinator that has never been there."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = Folder(root)
        self.started: list[Any] = []
        self.given_up: tuple[str, ...] = ()
        self.steps: list[str] = []
        self.commands: list[list[str]] = []
        self.made: list[str] = []
        self.known = {name: self.seen(name) for name in RECORD.clients}
        server = SimpleNamespace(url="address-with-password")
        for name in ("Postgres", "Valkey"):
            monkeypatch.setattr(federation, name, lambda path: server)
        monkeypatch.setattr(Federation, "client", self._client)
        monkeypatch.setattr(_Starter, "_run_once", self._run_once)

    @staticmethod
    def seen(name: str, *, ago: timedelta = timedelta(hours=-1), revoked: bool = False) -> SimpleNamespace:
        now = datetime.now(UTC)
        return SimpleNamespace(id=name, last_seen_at=now - ago, revoked_at=now if revoked else None)

    def start(self, record: Record = RECORD, machine: Machine = MACHINE) -> dict[str, Any]:
        """Start everything, and return the services by name."""
        supervisor: Any = SimpleNamespace(
            start=self.started.append, raise_if_failed=lambda: None, given_up=self.given_up
        )
        _Starter(Federation(self.folder, record, supervisor), supervisor, machine, self.steps.append).start()
        return {each.name: each for each in self.started if hasattr(each, "name")}

    @contextmanager
    def _client(self) -> Iterator[Any]:
        yield SimpleNamespace(clients=lambda: list(self.known.values()), create_token=self._create_token)

    def _create_token(self, role: str, client_id: str, label: str) -> SimpleNamespace:
        self.made.append(client_id)
        return SimpleNamespace(secret=f"{role} {client_id}")

    def _run_once(self, name: str, arguments: list[str], env: dict[str, str]) -> str:
        self.commands.append(arguments)
        return "admin"


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(tmp_path, monkeypatch)


def tokens_of(folder: Folder) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.tokens.iterdir()}


def test_a_new_database_gets_new_tokens_and_a_kept_one_keeps_them(scene: Scene) -> None:
    scene.folder.tokens.mkdir()
    for name in ("operator", "a", "of-an-earlier-client"):
        (scene.folder.tokens / name).write_text("of an earlier database")
    scene.start()
    made = {"operator": "admin", "a": "worker a", "b": "worker b"}
    assert tokens_of(scene.folder) == made
    assert [command[0] for command in scene.commands] == ["migrate", "token"]

    (scene.folder.postgres / "pgdata").mkdir(parents=True)
    scene.folder.worker_token("b").unlink()
    scene.made.clear()
    scene.start()
    assert tokens_of(scene.folder) == made
    assert scene.made == ["b"], "only the missing one"
    assert [command[0] for command in scene.commands] == ["migrate", "token", "migrate"]


def test_everything_is_started_in_order_and_only_the_coordinator_is_essential(scene: Scene) -> None:
    services = scene.start(RECORD.model_copy(update={"encoders": {"b": ENCODER}}), Machine(device="cuda", threads=3))
    assert list(services) == ["aggregator", "distiller", "evaluator", "notifier", "beat", "api", "a", "b"]
    assert {name for name, each in services.items() if each.is_essential} == {"aggregator", "beat", "api"}
    assert services["aggregator"].env["FEDSSL_DEVICE"] == "cuda"
    assert {each.env.get("OMP_NUM_THREADS") for name, each in services.items() if name not in ("beat", "api")} == {"3"}
    assert services["api"].ready is not None
    worker = services["a"]
    assert (worker.final_statuses, worker.hopeless_statuses) == ((3,), (2,))
    assert worker.env["FEDSSL_WORKER_TOKEN_FILE"] == str(scene.folder.worker_token("a"))
    assert worker.env["FEDSSL_WORKER_COORDINATOR"] == "http://127.0.0.1:8123"
    assert "FEDSSL_WORKER_ENCODER" not in worker.env
    assert EncoderConfig.model_validate_json(services["b"].env["FEDSSL_WORKER_ENCODER"]) == ENCODER
    assert not [each for each in services.values() if "password" in str(each.command)]


def test_a_revoked_client_has_no_worker_and_is_not_waited_for(scene: Scene) -> None:
    scene.known["b"] = scene.seen("b", revoked=True)
    assert "b" not in scene.start()
    assert "b was revoked: its worker is not started" in scene.steps
    assert not [step for step in scene.steps if step.startswith("continuing without")]


def test_workers_are_waited_for_unless_they_are_given_up_or_late(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(federation, "WORKERS_SECONDS", 0)
    scene.known["a"] = scene.seen("a", ago=timedelta(hours=1))  # in an earlier start
    scene.start()
    assert scene.steps[-1] == "continuing without a: no heartbeat within 0 s, see its log"
    scene.given_up, scene.steps = ("a",), []
    scene.start()
    assert scene.steps[-1] == "starting the workers"


def test_a_folder_is_partitioned_once_and_continued_if_it_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Record] = []
    starter = lambda running, *_: SimpleNamespace(start=lambda: started.append(running.record))  # noqa: E731
    monkeypatch.setattr(federation, "_Starter", starter)
    folder, any_port = Folder(tmp_path / "federation"), Machine(port=0)
    digits = PartitionConfig(dataset="digits", num_clients=2, scheme="iid", alpha=None, max_images=40)
    dealing = Dealing(partition=digits, data=DataConfig(channels=1, image_size=16), required={"num_clients": 2})
    with running_federation(folder, dealing, any_port) as running:
        assert folder.read() == running.record
        assert stat.S_IMODE(folder.root.stat().st_mode) == 0o700
    shards = [folder.shard(name).read_bytes() for name in running.record.clients]
    with running_federation(folder, replace(dealing, partition=PartitionConfig(), data=None), any_port) as again:
        assert (again.record.num_images, again.record.image_size) == (running.record.num_images, 16)
    assert [folder.shard(name).read_bytes() for name in running.record.clients] == shards
    other = replace(dealing, required={"num_clients": 3})
    with pytest.raises(SpecError, match="num_clients is 2, not 3"), running_federation(folder, other, any_port):
        raise AssertionError
    assert len(started) == 2
    with pytest.raises(KeyboardInterrupt), running_federation(folder, dealing, any_port) as hurried:
        hurried._supervisor._is_hurried = True  # by a second Ctrl-C, while everything is being stopped


def test_only_known_clients_have_encoders_and_those_of_before_stay(tmp_path: Path) -> None:
    record = _as_the_machine_says(RECORD, Machine(port=0, encoders={"b": ENCODER}))
    assert _as_the_machine_says(record, Machine(port=0)).encoders == {"b": ENCODER}
    with pytest.raises(SpecError, match="no client is called c: there are a, b"):
        _as_the_machine_says(RECORD, Machine(encoders={"c": ENCODER}))


def test_a_command_of_the_coordinator_that_fails_shows_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor: Any = None
    starter = _Starter(Federation(Folder(tmp_path), RECORD, supervisor), supervisor, Machine(), lambda step: None)
    program = "import os, sys, time; print(os.environ['X']); sys.stderr.write('why\\n'); exec(sys.argv[-1])"
    monkeypatch.setattr(federation, "PYTHON", (sys.executable, "-S", "-c", program))
    assert starter._run_once("token", ["token", "pass"], {"X": "secret"}) == "secret"
    with pytest.raises(LocalError, match=r"fedssl_coordinator migrate failed\. The end of .*logs/migrate\.log:\nwhy"):
        starter._run_once("migrate", ["migrate", "sys.exit(3)"], {"X": "1"})
    monkeypatch.setattr(federation, "STEP_SECONDS", 0.1)
    with pytest.raises(LocalError, match=r"fedssl_coordinator migrate did not end within 0\.1 s"):
        starter._run_once("migrate", ["migrate", "time.sleep(60)"], {"X": "1"})


def test_signals_are_the_supervisors_only_in_its_block(tmp_path: Path) -> None:
    before = [signal.getsignal(signum) for signum in STOP_SIGNALS]
    with Supervisor(tmp_path) as supervisor:
        assert signal.getsignal(signal.SIGTERM) == supervisor._on_signal
    assert [signal.getsignal(signum) for signum in STOP_SIGNALS] == before


def test_a_service_is_started_again_after_its_wait_and_not_while_everything_stops(tmp_path: Path) -> None:
    events: list[str] = []
    policy = RestartPolicy(first_seconds=60, max_seconds=60)
    with Supervisor(tmp_path, on_event=lambda _, what: events.append(what), restart_policy=policy) as supervisor:
        supervisor.start(Service(name="brief", command=["true"], log_path=tmp_path / "log"))
        wait_until(lambda: "exited with status 0; starting again in 60 s" in events, 20)
    assert [what.partition(" (")[0] for what in events] == [
        "started", "exited with status 0; starting again in 60 s", "stopping", "stopped"
    ]  # fmt: skip
