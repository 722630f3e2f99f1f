"""Measures the CPU time that one client's update costs the API and Postgres, without start-up and aggregation.

    PYTHONPATH=tests python tests/bench/measure_update_cost.py --clients 20 --rounds 5 --model small

The API runs in this process, and the simulated workers in another. Between two rounds this process aggregates, which is
not counted, and neither are the first rounds: Postgres plans each statement ten times per connection before it keeps
the plan. Prints the median of the rounds, in milliseconds per update.
"""

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bench.load_simulated_workers import MODELS, add_clients, load_spec
from fedssl_coordinator.http.server import settle_memory
from support.coordinator import Coordinator
from support.resource_usage import children
from support.servers import Servers, unwind_when_terminated
from support.simulated_workers import Connection, Measurements, SimulatedWorker
from support.tables import Tables

_FIRST_ROUNDS = 6


def main() -> int:
    options = _options()
    unwind_when_terminated()
    if options.url:
        asyncio.run(_work(options))
        return 0
    with (
        tempfile.TemporaryDirectory() as name,
        Servers(Path(name) / "servers") as servers,
        servers.database() as url,
        Tables(url) as tables,
    ):
        os.environ["FEDSSL_REDIS_URL"] = servers.redis_url
        limits = {
            "FEDSSL_TOKEN_REQUESTS_PER_MINUTE": "1000000",
            "FEDSSL_ADDRESS_REQUESTS_PER_MINUTE": "1000000",
            "FEDSSL_MAX_CONNECTIONS_PER_ADDRESS": "1000",
        }
        with Coordinator(url, servers.redis_url, Path(name) / "store", **limits) as coordinator:
            report = _measure(coordinator, tables, servers, options)
    sys.stdout.write(json.dumps(report) + "\n")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5, help="that are measured, after six that are not")
    parser.add_argument("--model", choices=sorted(MODELS), default="400kb")
    parser.add_argument("--upload", action="store_true", help="upload and submit, as workers of older versions do")
    parser.add_argument("--url", help="work there: for the process of the simulated workers, which this one starts")
    return parser.parse_args()


def _measure(coordinator: Coordinator, tables: Tables, servers: Servers, options: argparse.Namespace) -> dict[str, Any]:
    tokens = add_clients(tables, options.clients)
    every = {"rounds": options.rounds + _FIRST_ROUNDS, "fraction": 1.0, "lease_seconds": 60.0}
    spec = load_spec(argparse.Namespace(**{**vars(options), **every}))
    command = [sys.executable, __file__, "--url", coordinator.url, *(["--upload"] if options.upload else [])]
    rounds: list[dict[str, float]] = []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as workers:
        assert workers.stdin is not None
        _tell(workers, json.dumps(tokens))
        run_id = coordinator.client.create_run(spec).id
        settle_memory()  # as an API process does
        for number in range(options.rounds + _FIRST_ROUNDS):
            coordinator.advance(run_id)
            before, began = _cpu(servers), time.monotonic()
            _tell(workers, "round")
            spent = {name: seconds - before[name] for name, seconds in _cpu(servers).items()}
            spent["seconds"] = time.monotonic() - began
            if number >= _FIRST_ROUNDS:
                rounds.append(spent)
        workers.stdin.close()
    medians = {name: statistics.median(spent[name] for spent in rounds) for name in rounds[0]}
    per_update = {f"{name}_ms": round(1000 * value / options.clients, 2) for name, value in medians.items()}
    return {"clients": options.clients, "rounds": options.rounds, "model": options.model, **per_update}


def _tell(workers: "subprocess.Popen[str]", line: str) -> None:
    """Send a line to the process of the workers, and wait until it has been carried out."""
    assert workers.stdin is not None
    assert workers.stdout is not None
    workers.stdin.write(line + "\n")
    workers.stdin.flush()
    if not workers.stdout.readline():
        raise SystemExit("the process of the simulated workers has ended")


def _cpu(servers: Servers) -> dict[str, float]:
    return {"api": time.process_time(), "postgres": _running_seconds(servers.pids["postgres"])}


def _running_seconds(pid: int) -> float:
    """Return the CPU time of a process and its children that still run. The ticks of `census` are too coarse for it."""
    own = int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9
    return own + sum(map(_running_seconds, children(pid)))


async def _work(options: argparse.Namespace) -> None:
    tokens, address, tally = json.loads(sys.stdin.readline()), urlsplit(options.url), Measurements()
    workers = [
        SimulatedWorker(name, Connection(address.hostname or "", address.port or 0, token, tally), 0, 20,
                        delivers=not options.upload)
        for name, token in tokens.items()
    ]  # fmt: skip
    await asyncio.gather(*(worker.register() for worker in workers))
    with contextlib.ExitStack() as lines:
        for worker in workers:
            lines.enter_context(contextlib.closing(worker.line))
        sys.stdout.write("registered\n")
        sys.stdout.flush()
        while await asyncio.to_thread(sys.stdin.readline):
            await asyncio.gather(*(worker.work_once() for worker in workers))
            sys.stdout.write(f"{sum(tally.refusals.values())} refusals\n")
            sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
