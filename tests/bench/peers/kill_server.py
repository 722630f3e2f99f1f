"""Kills the server of fedssl, Flower and NVFlare in the middle of a round, and reports what happens to the run.

    make bench-peers SCRIPT=kill_server ARGS="--only fedssl flower nvflare"

Two clients and weights of 0.4 MB. In the third round one client has sent its update and the other still works. Then
every process of the server gets SIGKILL, and the server is started again with the same data; the clients live on.
Prints one JSON object per system: whether the same run continued, and the seconds until the next round was closed, from
the kill, or from the second submission if the run did not continue.

- fedssl: API, aggregator, beat, distiller, Postgres and Valkey are killed and started again. Workers train a tiny
  network, and the second one is stopped by a signal until the servers are back. The final weights are compared with
  those of the simulation, bit for bit.
- Flower: SuperLink with a database file, SuperExec and ServerApp are killed, and the SuperLink is started again. If the
  run does not continue within `--patience-seconds`, the app is submitted again, as a person would do.
- NVFlare: the server and its job's process are killed; its own start script starts the server again. If
  the job does not continue in that time, a copy of it is submitted (`clone_job`).
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.peers.flower_federation import Flower, rounds_closed
from bench.peers.nvflare_federation import NVFlare
from bench.peers.processes import kill, wait_for
from fault.specs import images, reference, spec
from fedssl.artifacts.tensors import load_tensors
from fedssl.protocol.states import RunState
from fedssl_local import Postgres, Valkey
from support.environment import coordinator_environment, migrate
from support.processes import Federation
from support.servers import unwind_when_terminated
from support.tables import Tables

_SERVICES = ("api", "aggregator", "distiller", "beat")
_ROUND = 2  # counted from 0
_LIMIT_SECONDS = 120
_MEGABYTES = 0.4


def main() -> int:
    unwind_when_terminated()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=sorted(_SYSTEMS), default=list(_SYSTEMS))
    parser.add_argument("--patience-seconds", type=float, default=60.0, help="for a run to continue")
    parser.add_argument("--environments", type=Path, required=True, help="a folder with flower/ and nvflare/")
    options = parser.parse_args()
    options.environments = options.environments.absolute()
    for name in options.only:
        with tempfile.TemporaryDirectory() as folder:
            report = _SYSTEMS[name](options, Path(folder))
        sys.stdout.write(json.dumps({"system": name, **report, "load": round(os.getloadavg()[0], 1)}) + "\n")
        sys.stdout.flush()
    return 0


def _fedssl(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    plan = spec("fedbyol", num_rounds=_ROUND + 2)
    Federation.forks = False
    postgres, valkey = Postgres(folder / "postgres"), Valkey(folder / "valkey")
    with postgres, valkey:
        own = folder / "federation"
        own.mkdir()
        migrate(coordinator_environment(postgres.url, valkey.url, own / "store"))
        with Federation(postgres.url, valkey.url, own, images(), FEDSSL_SWEEP_SECONDS="2") as federation:
            first, second = federation.clients
            for name in (first, second):
                federation.start(name)
            run = federation.client.create_run(plan).id
            with Tables(postgres.url) as tables:
                wait_for(lambda: _num_closed(tables, run) == _ROUND, "two rounds", _LIMIT_SECONDS)
                os.kill(federation.pid(second), signal.SIGSTOP)
                wait_for(lambda: len(_accepted(tables, run)) == 2 * _ROUND + 1, "one update", _LIMIT_SECONDS)
                before = _accepted(tables, run)
            began = time.time()
            for name in _SERVICES:
                federation.kill(name)
            for server in (postgres, valkey):
                assert server.pid is not None
                os.kill(server.pid, signal.SIGKILL)
                server.wait()
            for server in (postgres, valkey):
                server.start()
            for name in _SERVICES:
                federation.start(name)
            os.kill(federation.pid(second), signal.SIGCONT)
            with Tables(postgres.url) as tables:
                wait_for(lambda: _num_closed(tables, run) > _ROUND, "the round's end", _LIMIT_SECONDS)
                closed = time.time()
                wait_for(lambda: federation.client.run(run).state == RunState.FINISHED, "the end", _LIMIT_SECONDS)
                kept = before <= _accepted(tables, run)
            federation.client.download_model(run, folder / "model.safetensors")
    model, expected = load_tensors(folder / "model.safetensors"), reference(plan)
    same = model.keys() == expected.keys() and all(torch.equal(model[name], expected[name]) for name in expected)
    return {"continued": True, "updates_kept": kept, "seconds_to_next_closed_round": round(closed - began, 1),
            "weights_of_the_undisturbed_run": same}  # fmt: skip


def _num_closed(tables: Tables, run: object) -> int:
    return int(tables.one("SELECT count(*) FROM rounds WHERE run_id = %s AND state = 'closed'", run))


def _accepted(tables: Tables, run: object) -> set[tuple[Any, ...]]:
    query = "SELECT round_number, client_id, update_digest FROM assignments WHERE run_id = %s AND state = 'accepted'"
    return set(tables.query(query, run))


def _flower(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    out, again = folder / "result.json", folder / "again.json"
    with Flower(options.environments, folder, 2, database=True) as flower:
        flower.run(out, _ROUND + 2, _MEGABYTES, task="hold")
        wait_for(lambda: len(rounds_closed(out)) == _ROUND + 1, "two rounds", _LIMIT_SECONDS)
        time.sleep(4)  # a ClientApp has started and answered; the other one needs five seconds after its start
        began = time.time()
        flower.kill_server()
        flower.start_server()
        states, limit = [], began + options.patience_seconds
        while not (continued := len(rounds_closed(out)) > _ROUND + 1) and time.time() < limit:
            states += flower.statuses()
            time.sleep(2)
        if not continued:
            began = time.time()
            flower.run(again, _ROUND + 2, _MEGABYTES, task="hold")
            wait_for(lambda: len(rounds_closed(again)) > 1, "a round of the new run", _LIMIT_SECONDS)
        closed = (rounds_closed(out) if continued else rounds_closed(again)[1:])[-1]
    return {"continued": continued, "states": list(dict.fromkeys(states)), "submitted_again": not continued,
            "seconds_to_next_closed_round": round(closed - began, 1)}  # fmt: skip


def _nvflare(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    states = folder / "states"
    with (
        NVFlare(options.environments, folder, 2) as nvflare,
        nvflare.job(_ROUND + 3, _MEGABYTES, "--watch", task="hold"),
    ):
        wait_for(
            lambda: nvflare.num_answered(folder / "site-1.json") == _ROUND + 1,
            "the first site's third update",
            _LIMIT_SECONDS,
        )
        time.sleep(2)  # the update has arrived; the other site needs three more seconds
        killed = began = time.time()
        kill(nvflare.server_pids())

        def times() -> list[float]:
            return [at for at in nvflare.sites()[0]["times"] if at > began]

        while not (continued := bool(times())) and time.time() < killed + options.patience_seconds:
            time.sleep(0.5)
        if not continued:
            began = time.time()
            (folder / "again").touch()
        wait_for(lambda: len(times()) > 1, "a round after the kill", _LIMIT_SECONDS)
        closed = times()[1]
        seen = [line.split() for line in states.read_text().splitlines()]
    after = list(dict.fromkeys(state for at, state in seen if killed < float(at) < began)) or ["RUNNING"]
    return {"continued": continued, "states": after, "submitted_again": not continued,
            "seconds_to_next_closed_round": round(closed - began, 1)}  # fmt: skip


_SYSTEMS: dict[str, Callable[[argparse.Namespace, Path], dict[str, Any]]] = {
    "fedssl": _fedssl,
    "flower": _flower,
    "nvflare": _nvflare,
}

if __name__ == "__main__":
    sys.exit(main())
