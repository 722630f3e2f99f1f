"""Puts the coordinator under the load of thousands of workers that follow the protocol and train nothing.

    make load-test ARGS="--clients 1000 --rounds 3 --apis 2"
    make load-test ARGS="--clients 100 --model resnet18 --format json"

Servers and processes are real. The workers are coroutines of this process, each with its own token, connection and
ledger. Prints the time of each request (ms), the parts of a round's time (s), and what each process, Postgres and
the network used. Refusals are answers 429 and 503 and broken connections. Each is retried.
"""

import argparse
import asyncio
import hashlib
import itertools
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID

from fedssl.artifacts.tensors import load_tensors
from fedssl.cli.output import show_table
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.states import RunState
from support.federation import tiny_spec
from support.replicas import Replicas
from support.resource_usage import Connections, cpu_seconds, num_transactions, peak_megabytes, rounds_of, table_bytes
from support.servers import Servers, unwind_when_terminated
from support.simulated_workers import Connection, Measurements, SimulatedWorker
from support.tables import Tables

MODELS: dict[str, dict[str, Any]] = {
    "tiny": {"name": "convnet", "widths": [4, 8]},
    "400kb": {"name": "convnet", "widths": [16, 32, 64, 128]},
    "small": {"name": "convnet", "widths": [32, 64, 128, 256]},
    "resnet18": {"name": "resnet18"},
    "400mb": {"name": "convnet", "widths": [16, 2048, 5408]},
    "2gb": {"name": "convnet", "widths": [16, 4096, 13504]},
}
_AT_ONCE = 100  # registrations
_NO_LIMITS = {
    "FEDSSL_TOKEN_REQUESTS_PER_MINUTE": "0",
    "FEDSSL_ADDRESS_REQUESTS_PER_MINUTE": "0",  # they all have the same address
    "FEDSSL_SWEEP_SECONDS": "2",
}


def main() -> int:
    options = _options()
    unwind_when_terminated()
    Replicas.forks = False  # a fork would include its parent's imports
    with (
        tempfile.TemporaryDirectory() as name,
        Servers(Path(name) / "servers") as servers,
        servers.database() as url,
        Tables(url) as tables,
    ):
        num = {"api": options.apis, "aggregator": options.aggregators}
        # As docs/scaling.md advises: each worker's connection may count twice, and half of the limit is for known
        # callers.
        limits = {**_NO_LIMITS, "FEDSSL_MAX_CONNECTIONS": str(2 * options.clients // options.apis + 200),
                  "FEDSSL_CLAIM_WAIT_SECONDS": str(options.claim_seconds)}  # fmt: skip
        with Replicas(url, servers.redis_url, Path(name) / "federation", {}, num=num, **limits) as federation:
            for address in federation.urls:
                federation.wait_for(lambda address=address: _answers(address), f"{address}")
            report = _measure(federation, tables, options, servers)
    if options.format == "json":
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
    else:
        _show(report)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--fraction", type=float, default=1.0, help="of the clients in each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", choices=sorted(MODELS), default="tiny")
    parser.add_argument("--train-seconds", type=float, default=0.0, help="from download to upload, give or take half")
    parser.add_argument("--lease-seconds", type=float, default=60.0, help="a third of it lies between two heartbeats")
    parser.add_argument("--claim-seconds", type=float, default=25.0, help="that a claim waits for work; at most 60")
    parser.add_argument("--upload", action="store_true", help="upload and submit, as workers of older versions do")
    parser.add_argument("--no-pauses", action="store_true", help="wait for work during rounds, as older workers do")
    parser.add_argument("--register-first", action="store_true", help="claim only once all have registered")
    parser.add_argument("--apis", type=int, default=1)
    parser.add_argument("--aggregators", type=int, default=1)
    parser.add_argument("--limit-seconds", type=float, default=220.0, help="give up after so long")
    parser.add_argument("--format", choices=("table", "json"), default="table")
    return parser.parse_args()


def _measure(federation: Replicas, tables: Tables, options: argparse.Namespace, servers: Servers) -> dict[str, Any]:
    tally, tokens = Measurements(), add_clients(tables, options.clients)
    addresses = itertools.cycle(map(urlsplit, federation.urls))
    workers = [
        SimulatedWorker(
            name,
            Connection(parts.hostname or "", parts.port or 0, token, tally),
            options.train_seconds,
            options.claim_seconds,
            delivers=not options.upload,
            pauses=not options.no_pauses,
        )
        for (name, token), parts in zip(tokens.items(), addresses, strict=False)
    ]
    run_id = federation.client.create_run(load_spec(options)).id
    bytes_before, transactions = table_bytes(tables), num_transactions(tables)
    pids = {**federation.pids, "valkey": servers.pids["valkey"]}
    began = time.monotonic()
    with Connections(tables) as connections:
        registered = asyncio.run(
            _work(workers, tables, run_id, options.limit_seconds, register_first=options.register_first)
        )
    seconds = time.monotonic() - began
    processes = {
        name: {"peak_mb": round(peak_megabytes(pid)), "cpu_seconds": round(cpu_seconds(pid), 1)}
        for name, pid in sorted(pids.items())
    }
    processes["postgres"] = {"cpu_seconds": round(cpu_seconds(servers.pids["postgres"], with_children=True), 1)}
    processes["simulated workers"] = {"peak_mb": round(peak_megabytes(os.getpid())),
                                      "cpu_seconds": round(time.process_time(), 1)}  # fmt: skip
    time.sleep(1.5)
    rounds = rounds_of(tables, run_id)
    updates = sum(row["clients"] for row in rounds) or 1
    grown = {name: size - bytes_before.get(name, 0) for name, size in table_bytes(tables).items()}
    return {
        "options": vars(options),
        "outcome": tables.one("SELECT outcome FROM runs WHERE id = %s", run_id),
        "weights": _extremes(federation, str(tables.one("SELECT broadcast FROM runs WHERE id = %s", run_id))),
        "seconds": round(seconds, 1),
        "registering_seconds": round(registered, 1),
        "rounds": rounds,
        "opened_at": [
            float(at)
            for (at,) in tables.query(
                "SELECT extract(epoch FROM opened_at) FROM rounds WHERE run_id = %s ORDER BY number", run_id
            )
        ],
        "requests": {name: _spread(values, seconds) for name, values in sorted(tally.latencies.items())},
        "claims": tally.num_claims,
        "refusals": dict(sorted(tally.refusals.items())),
        "processes": processes,
        "postgres": {
            "most_connections": connections.most,
            "most_busy_connections": connections.most_busy,
            "transactions_per_update": round((num_transactions(tables) - transactions) / updates, 1),
            "bytes_per_update": round(sum(grown.values()) / updates),
            "bytes_per_update_by_table": {
                name: round(size / updates) for name, size in sorted(grown.items(), key=lambda item: -item[1]) if size
            },
        },
        "megabytes": {"up": round(tally.bytes_up / 1e6, 1), "down": round(tally.bytes_down / 1e6, 1)},
    }


async def _work(
    workers: list[SimulatedWorker], tables: Tables, run_id: UUID, limit_seconds: float, *, register_first: bool
) -> float:
    """Register all workers, let them work until the run has ended, and return how long the registration took."""
    began = time.monotonic()
    places, registered = asyncio.Semaphore(_AT_ONCE), [0.0]
    all_registered = asyncio.Barrier(len(workers) if register_first else 1)

    async def live(worker: SimulatedWorker) -> None:
        async with places:
            await worker.register()
        registered[0] = time.monotonic() - began
        await all_registered.wait()
        await worker.work()

    tasks = [asyncio.create_task(live(worker)) for worker in workers]
    over = threading.Event()
    watching = asyncio.create_task(asyncio.to_thread(_await_end, tables, run_id, limit_seconds, over))
    try:
        await asyncio.wait([watching, *tasks], return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done():
                task.result()
    finally:
        over.set()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    await watching
    return registered[0]


def _await_end(tables: Tables, run_id: UUID, seconds: float, over: threading.Event) -> None:
    """Wait for the end without the API, which only has to answer the workers."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and tables.one("SELECT state FROM runs WHERE id = %s", run_id) != RunState.FINISHED:
        if over.wait(0.5):
            return


def _extremes(federation: Replicas, digest: str) -> list[float]:
    """Return the smallest and the largest final weight. Simulated workers send zeros, and one positive number each."""
    tensors = load_tensors(federation.folder / "store" / digest[:2] / digest[2:4] / digest).values()
    return [min(float(each.min()) for each in tensors), max(float(each.max()) for each in tensors)]


def _answers(address: str) -> bool | None:
    import httpx

    try:
        return httpx.get(f"{address}/readyz", trust_env=False).status_code == 200 or None
    except httpx.TransportError:
        return None


def load_spec(options: argparse.Namespace) -> RunSpec:
    return tiny_spec(
        name="load",
        num_rounds=options.rounds,
        model={"encoder": MODELS[options.model], "projector": {"hidden_dims": [8], "out_dim": 4}},
        data={"channels": 1, "image_size": 8},  # the shape that the simulated workers register with
        cohort={"min_clients": options.clients, "fraction": options.fraction, "deadline_seconds": 600,
                "lease_seconds": options.lease_seconds},
    )  # fmt: skip


def add_clients(tables: Tables, num_clients: int) -> dict[str, str]:
    """Create tokens for `num_clients` clients directly in Postgres, as the API would, and return them by client
    name."""
    tokens = {f"site-{number:06}": f"fedssl_simulated_{number:040}" for number in range(num_clients)}
    names = list(tokens)
    hashes = [hashlib.sha256(token.encode()).hexdigest() for token in tokens.values()]
    tables.execute("INSERT INTO clients (id) SELECT unnest(%s::text[])", names)
    tables.execute(
        "INSERT INTO tokens (id, role, client_id, label, secret_hash) "
        "SELECT gen_random_uuid(), 'worker', name, '', hash FROM unnest(%s::text[], %s::text[]) AS made(name, hash)",
        names,
        hashes,
    )
    tables.execute("ANALYZE clients, tokens")
    return tokens


def _spread(values: list[float], seconds: float) -> dict[str, float]:
    cuts = statistics.quantiles(values, n=100) if len(values) > 1 else values * 99
    shown = {name: round(1000 * cuts[at - 1], 1) for name, at in (("p50", 50), ("p95", 95), ("p99", 99))}
    return {"count": len(values), "per_second": round(len(values) / seconds, 1), **shown}


def _show(report: dict[str, Any]) -> None:
    def rows(part: dict[str, dict[str, Any]], columns: tuple[str, ...]) -> list[list[object]]:
        return [[name, *(values.get(column, "-") for column in columns)] for name, values in part.items()]

    columns = ("count", "per_second", "p50", "p95", "p99")
    show_table(("request", *(f"#{name}" for name in columns)), rows(report["requests"], columns))
    if report["rounds"]:
        show_table([f"#{name}" for name in report["rounds"][0]], [list(row.values()) for row in report["rounds"]])
    show_table(("process", "#peak_mb", "#cpu_seconds"), rows(report["processes"], ("peak_mb", "cpu_seconds")))
    for name in ("outcome", "seconds", "registering_seconds", "claims", "refusals", "postgres", "megabytes"):
        sys.stdout.write(f"{name}: {json.dumps(report[name])}\n")


if __name__ == "__main__":
    sys.exit(main())
