"""Runs the same spec several times with fedssl, Flower and NVFlare: are the final weights equal, bit for bit?

    make bench-peers SCRIPT=repeat ARGS="--only fedssl flower nvflare --times 3"

Updates are what clients compute without randomness, and they arrive in an order that differs between the executions.
A system that adds them up in that order rounds in another way each time. Prints one JSON object per system with the
digests of the final weights, and of the peers the smallest and the largest of these.

- fedssl: six workers train a tiny network on their images. The orders in which updates were accepted are printed too.
- Flower and NVFlare: six clients add pseudo-random numbers of their own, after a pause of random length, to weights of
  0.4 MB.
"""

import argparse
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.peers.flower_federation import Flower
from bench.peers.nvflare_federation import NVFlare
from bench.peers.processes import wait_for
from fedssl.protocol.states import Outcome, RunState
from support.methods import method_spec, shards
from support.processes import federation
from support.servers import Servers, unwind_when_terminated
from support.tables import Tables

_NUM_CLIENTS, _NUM_ROUNDS, _MEGABYTES = 6, 3, 0.4
_LIMIT_SECONDS = 200


def main() -> int:
    unwind_when_terminated()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=sorted(_SYSTEMS), default=list(_SYSTEMS))
    parser.add_argument("--times", type=int, default=2)
    parser.add_argument("--environments", type=Path, required=True, help="a folder with flower/ and nvflare/")
    options = parser.parse_args()
    options.environments = options.environments.absolute()
    for name in options.only:
        report = _SYSTEMS[name](options)
        equal = len(set(report["digests"])) == 1
        report = {"system": name, "equal": equal, **report, "load": round(os.getloadavg()[0], 1)}
        sys.stdout.write(json.dumps(report) + "\n")
        sys.stdout.flush()
    return 0


def _fedssl(options: argparse.Namespace) -> dict[str, Any]:
    names = [f"client-{number}" for number in range(_NUM_CLIENTS)]
    spec = method_spec(
        "fedbyol",
        num_rounds=_NUM_ROUNDS,
        cohort={"clients": names, "min_clients": _NUM_CLIENTS},
        partition={"dataset": "digits", "num_clients": _NUM_CLIENTS, "max_images": 240},
        training={"batch_size": 16, "local_epochs": 1},
    )
    digests, orders = [], []
    with tempfile.TemporaryDirectory() as name, Servers(Path(name) / "servers") as servers:
        for number in range(options.times):
            own = Path(name) / str(number)
            with (
                servers.database() as url,
                Tables(url) as tables,
                federation(url, servers.redis_url, own, shards(spec)) as running,
            ):
                for client in running.clients:
                    running.start(client)
                run = running.client.create_run(spec).id
                view = running.wait_for(
                    lambda running=running, run=run: _if_finished(running.client.run(run)), "the end", _LIMIT_SECONDS
                )
                assert view.outcome == Outcome.COMPLETED, view.reason
                path = own / "model.safetensors"
                running.client.download_model(run, path)
                digests.append(hashlib.sha256(path.read_bytes()).hexdigest())
                orders.append(_orders(tables, run))
    return {"digests": digests, "orders_of_arrival": orders}


def _if_finished(view: Any) -> Any:
    return view if view.state == RunState.FINISHED else None


def _orders(tables: Tables, run: object) -> list[str]:
    """Return the numbers of the clients for each round, in the order in which their updates were accepted."""
    rows = tables.query(
        "SELECT string_agg(right(client_id, 1), '' ORDER BY closed_at) FROM assignments "
        "WHERE run_id = %s AND state = 'accepted' GROUP BY round_number ORDER BY round_number",
        run,
    )
    return [str(order) for (order,) in rows]


def _flower(options: argparse.Namespace) -> dict[str, Any]:
    digests, extremes = [], []
    with tempfile.TemporaryDirectory() as name, Flower(options.environments, Path(name), _NUM_CLIENTS) as flower:
        for number in range(options.times):
            out = Path(name) / f"result-{number}.json"
            flower.run(out, _NUM_ROUNDS, _MEGABYTES, task="noise")
            wait_for(lambda out=out: flower.has_ended(out), "Flower's run", _LIMIT_SECONDS)
            result = json.loads(out.read_text())
            digests.append(result["digest"])
            extremes.append(result["final"])
    return {"digests": digests, "smallest_and_largest_weights": extremes}


def _nvflare(options: argparse.Namespace) -> dict[str, Any]:
    digests, extremes = [], []
    for _ in range(options.times):
        with (
            tempfile.TemporaryDirectory() as name,
            NVFlare(options.environments, Path(name), _NUM_CLIENTS) as nvflare,
            nvflare.job(_NUM_ROUNDS + 1, _MEGABYTES, task="noise"),  # the last one sends the compared weights
        ):
            nvflare.wait_for_rounds(_NUM_ROUNDS + 1, _LIMIT_SECONDS)
            site = nvflare.sites()[0]
            digests.append(site["digest"])
            extremes.append(site["received"])
    return {"digests": digests, "smallest_and_largest_weights": extremes}


_SYSTEMS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "fedssl": _fedssl,
    "flower": _flower,
    "nvflare": _nvflare,
}

if __name__ == "__main__":
    sys.exit(main())
