"""Compares rounds without training (broadcast, upload, mean) of fedssl, Flower and NVFlare with a plain-HTTP floor.

    make bench-peers ARGS="--cases 2x0.4 10x45 --rounds 5 --turns 1"

A case is a number of clients and the size of the weights in MB. Each turn starts the server and its clients as real
processes on this machine, runs one round that is not counted and then `--rounds` others, checks the final weights, and
ends them. The turns of the systems alternate. Prints one line per turn, and at the end a table of medians in multiples
of the floor of the same turns. A turn that fails or takes longer than `--limit-seconds` is printed and left out.

Memory is the largest sum over the server's processes, sampled five times per second, without Postgres. Processor time
is that of the server's processes, with Postgres, per update and without the start and the first round.

- `floor-kept`: the floor with what a coordinator has to promise: the server hashes each update, and answers when its
  file is synced.
- Flower: SuperLink, one SuperNode per client, both without TLS, and `flwr run`; ArrayRecords of NumPy arrays.
- NVFlare: the FedAvg recipe for NumPy in POC mode, one process per site; `nvflare-torch`: the recipe for PyTorch, which
  exchanges PyTorch tensors, and whose server keeps the updates that arrive in files.
- fedssl: API, aggregator, beat, distiller, Postgres, Valkey; the clients are coroutines of one process that keep to
  the worker's protocol (`load_simulated_workers.py`), so their processor time is lower than the peers'.
"""

import argparse
import functools
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.peers.flower_federation import Flower
from bench.peers.nvflare_federation import NVFlare
from bench.peers.processes import Usage, command, descendants, wait_for
from support.servers import unwind_when_terminated

_BENCH = Path(__file__).parents[1]
MODELS = {0.4: "400kb", 45: "resnet18", 400: "400mb", 2000: "2gb"}  # fedssl's networks of about this size
HEAD = """| clients x payload | system | rounds | time | memory | processor time per update | load |
|---|---|---|---|---|---|---|"""


@dataclass(frozen=True)
class Case:
    """One comparison. `num_rounds` are counted, after one that is not."""

    num_clients: int
    megabytes: float
    num_rounds: int
    limit_seconds: float
    environments: Path

    def __str__(self) -> str:
        return f"{self.num_clients} x {self.megabytes:g} MB"

    def check(self, weights: list[float], num_rounds: int) -> None:
        """Raise AssertionError unless the weights are those after `num_rounds` rounds in which client k added k."""
        expected = num_rounds * (self.num_clients + 1) / 2
        assert all(abs(value - expected) < 1e-3 for value in weights), f"the weights are {weights}, not {expected}"


@dataclass(frozen=True)
class Turn:
    """The rounds of one turn in seconds, the server's memory, and its processor time per update."""

    seconds: list[float]
    memory_mb: float
    cpu_seconds: float
    load: float

    @classmethod
    def of(cls, case: Case, times: list[float], usage: Usage) -> "Turn":
        """Return the turn whose rounds begin and end at these times. The first round is not counted."""
        times = times[1:]
        num_updates = (len(times) - 1) * case.num_clients
        cpu_seconds = usage.cpu_seconds(times[0], times[-1]) / num_updates
        seconds = [later - earlier for earlier, later in itertools.pairwise(times)]
        return cls(seconds, usage.most_mb, cpu_seconds, os.getloadavg()[0])


def main() -> int:
    unwind_when_terminated()
    options = _options()
    rows = [HEAD]
    for text in options.cases:
        num_clients, _, megabytes = text.partition("x")
        case = Case(int(num_clients), float(megabytes), options.rounds, options.limit_seconds,
                    options.environments.absolute())  # fmt: skip
        turns: dict[str, list[Turn]] = {name: [] for name in options.only}
        for name in list(turns) * options.turns:
            try:
                turn = _turn(name, case)
            except (AssertionError, OSError, subprocess.SubprocessError) as error:
                _say(f"{name}, {case}: failed: {error}")
                continue
            turns[name].append(turn)
            _say(f"{name}, {case}: {turn}")
        rows += [row(name, case, own, turns.get("floor", [])) for name, own in turns.items()]
    _say("\n".join(rows))
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=["2x0.4", "10x0.4", "50x0.4", "2x45", "10x45"],
                        help=f"clients x MB, of {', '.join(f'{size:g}' for size in MODELS)}")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=sorted(SYSTEMS), default=list(SYSTEMS))
    parser.add_argument("--limit-seconds", type=float, default=540, help="of a turn")
    parser.add_argument("--environments", type=Path, required=True, help="a folder with flower/ and nvflare/")
    return parser.parse_args()


def _turn(name: str, case: Case) -> Turn:
    with tempfile.TemporaryDirectory() as folder:
        try:
            return SYSTEMS[name](case, Path(folder))
        except BaseException:
            for path in sorted(Path(folder).glob("*.log")):
                _say(f"--- {path.name}\n{path.read_text(errors='replace')[-2000:]}")
            raise


def row(name: str, case: Case, turns: list[Turn], floors: list[Turn]) -> str:
    """Return a row of the table in multiples of the floor."""
    if not turns or not floors:
        return f"| {case} | {name} | - | - | - | - | - |"
    seconds = [second for turn in turns for second in turn.seconds]
    time = statistics.median(seconds) / statistics.median(second for turn in floors for second in turn.seconds)
    memory = max(turn.memory_mb for turn in turns) / max(turn.memory_mb for turn in floors)
    cpu = _median_cpu(turns) / _median_cpu(floors)
    loads = sorted(turn.load for turn in turns)
    load = " to ".join(dict.fromkeys(f"{load:.1f}" for load in (loads[0], loads[-1])))
    return f"| {case} | {name} | {len(seconds)} | {time:.3g} | {memory:.2g} | {cpu:.2g} | {load} |"


def _median_cpu(turns: list[Turn]) -> float:
    return statistics.median(turn.cpu_seconds for turn in turns)


def _floor(case: Case, folder: Path, *options: str) -> Turn:
    floor = [sys.executable, str(_BENCH / "http_floor.py"), "--clients", str(case.num_clients),
               "--megabytes", str(case.megabytes), "--rounds", str(case.num_rounds + 1), *options]  # fmt: skip
    text = subprocess.run(floor, check=True, stdout=subprocess.PIPE, timeout=case.limit_seconds).stdout
    report = json.loads(text)
    cpu_seconds = report["server_cpu_seconds"] / case.num_rounds / case.num_clients
    return Turn(report["seconds"], report["server_peak_mb"], cpu_seconds, report["load"])


def _fedssl(case: Case, folder: Path) -> Turn:
    load_test = [sys.executable, str(_BENCH / "load_simulated_workers.py"), "--format", "json",
               "--clients", str(case.num_clients), "--model", MODELS[case.megabytes],
               "--rounds", str(case.num_rounds + 2), "--limit-seconds", str(case.limit_seconds)]  # fmt: skip
    process = subprocess.Popen(load_test, stdout=subprocess.PIPE, text=True)
    try:
        with Usage(lambda: coordinator_pids(process.pid)) as usage:
            text, _ = process.communicate(timeout=case.limit_seconds + 60)
    finally:
        process.terminate()
        process.wait()
    report = json.loads(text[text.index("{\n") :])
    assert report["outcome"] == "completed", f"the outcome is {report['outcome']}"
    smallest, largest = report["weights"]
    assert smallest == 0 < largest < 1 << 20, f"the weights are {report['weights']}"
    return Turn.of(case, report["opened_at"], usage)


def coordinator_pids(root: int) -> list[int]:
    """Return the processes of a coordinator, Postgres and Valkey below a process."""
    services = ("fedssl_coordinator", "postgres", "valkey")
    return [pid for pid in descendants(root) if any(name in command(pid) for name in services)]


def _flower(case: Case, folder: Path) -> Turn:
    out = folder / "result.json"
    with Flower(case.environments, folder, case.num_clients) as flower, Usage(flower.server_pids) as usage:
        flower.run(out, case.num_rounds + 1, case.megabytes)
        wait_for(lambda: flower.has_ended(out), "Flower's run", case.limit_seconds)
    result = json.loads(out.read_text())
    case.check(result["final"], case.num_rounds + 1)
    return Turn.of(case, result["times"], usage)


def _nvflare(case: Case, folder: Path, recipe: str = "numpy") -> Turn:
    with (
        NVFlare(case.environments, folder, case.num_clients) as nvflare,
        Usage(nvflare.server_pids) as usage,
        nvflare.job(case.num_rounds + 2, case.megabytes, recipe=recipe),
    ):
        nvflare.wait_for_rounds(case.num_rounds + 2, case.limit_seconds)
    sites = nvflare.sites()
    for site in sites:  # the weights that the last round sent out
        case.check(site["received"], case.num_rounds + 1)
    return Turn.of(case, [min(times) for times in zip(*(site["times"] for site in sites), strict=True)], usage)


SYSTEMS: dict[str, Callable[[Case, Path], Turn]] = {
    "floor": _floor,
    "floor-kept": lambda case, folder: _floor(case, folder, "--kept"),
    "fedssl": _fedssl,
    "flower": _flower,
    "nvflare": _nvflare,
    "nvflare-torch": functools.partial(_nvflare, recipe="torch"),
}


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
