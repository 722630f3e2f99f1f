"""Compares rounds without training (broadcast, upload, mean) of fedssl, Flower and NVFlare with a plain-HTTP floor.

    make bench-peers ARGS="--clients 2 10 --megabytes 0.4 45 --rounds 5 --turns 1"

Each turn starts the server and its clients as real processes on this machine, runs one round that is not counted and
then `--rounds` others, checks the final weights, and ends them. The turns of the systems alternate. Prints one line per
turn, and then the medians as ratios to the floor of the same turns. Memory is the largest sum over the server's
processes, sampled five times per second (fedssl: the sum of their peaks, without Postgres).

- Flower: SuperLink, one SuperNode per client, both without TLS, and `flwr run`; ArrayRecords of NumPy arrays.
- NVFlare: the FedAvg recipe for NumPy in POC mode, one process per site; `nvflare-torch`: the recipe for PyTorch, which
  exchanges PyTorch tensors, and whose server keeps the updates that arrive in files.
- fedssl: API, aggregator, beat, distiller, Postgres, Valkey; the clients are coroutines of one process that keep to
  the worker's protocol (`load_simulated_workers.py`), so their processor time is lower than the peers'.
"""

import argparse
import contextlib
import functools
import itertools
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
MODELS = {0.4: "400kb", 45: "resnet18"}  # fedssl's networks of about this size
_LONGEST_SECONDS = 540


@dataclass(frozen=True)
class Turn:
    """The rounds of one turn in seconds, and the server's memory in MB."""

    seconds: list[float]
    memory_mb: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[2, 10, 50])
    parser.add_argument("--megabytes", type=float, nargs="+", choices=sorted(MODELS), default=[0.4, 45])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=sorted(SYSTEMS), default=list(SYSTEMS))
    parser.add_argument("--environments", type=Path, required=True, help="a folder with flower/ and nvflare/")
    options = parser.parse_args()
    options.environments = options.environments.absolute()  # the processes run in folders of their own
    for megabytes in options.megabytes:
        for num_clients in options.clients:
            turns: dict[str, list[Turn]] = {name: [] for name in options.only}
            for _ in range(options.turns):
                for name, done in turns.items():
                    with tempfile.TemporaryDirectory() as folder:
                        done.append(SYSTEMS[name](num_clients, megabytes, options, Path(folder)))
                    _say(f"{name:8} {num_clients} x {megabytes:g} MB", done[-1], f"load {os.getloadavg()[0]:.1f}")
            floor = statistics.median(second for turn in turns.get("floor", []) for second in turn.seconds or [0])
            for name, done in turns.items():
                median = statistics.median(second for turn in done for second in turn.seconds)
                memory = max(turn.memory_mb for turn in done)
                _say(f"= {name}: median {median:.3f} s, {median / floor:.1f} times the floor, {memory:.0f} MB")
    return 0


def _floor(num_clients: int, megabytes: float, options: argparse.Namespace, folder: Path) -> Turn:
    size = ["--clients", str(num_clients), "--megabytes", str(megabytes), "--rounds", str(options.rounds + 1)]
    report = json.loads(_output([sys.executable, str(HERE.parent / "http_floor.py"), *size]))
    return Turn(report["seconds"], report["server_peak_mb"])


def _fedssl(num_clients: int, megabytes: float, options: argparse.Namespace, folder: Path) -> Turn:
    command = [sys.executable, str(HERE.parent / "load_simulated_workers.py"), "--format", "json",
               "--clients", str(num_clients), "--model", MODELS[megabytes], "--rounds", str(options.rounds + 2),
               "--limit-seconds", str(_LONGEST_SECONDS)]  # fmt: skip
    text = _output(command)
    report = json.loads(text[text.index("{\n") :])
    assert report["outcome"] == "completed", report["outcome"]
    smallest, largest = report["weights"]
    assert smallest == 0 < largest < 1 << 20, report["weights"]
    parts = ("all_submitted", "noticed", "aggregated", "next_opened")
    seconds = [sum(row[part] for part in parts) for row in report["rounds"] if row["next_opened"] is not None]
    names = ("api", "aggregator", "beat", "distiller", "valkey")
    return Turn(seconds[1:], sum(report["processes"][name]["peak_mb"] for name in names))


def _flower(num_clients: int, megabytes: float, options: argparse.Namespace, folder: Path) -> Turn:
    own = options.environments / "flower" / "bin"
    port, out = _free_port(), folder / "result.json"
    environment = {**os.environ, "HOME": str(folder), "FLWR_HOME": str(folder / ".flwr"), "OMP_NUM_THREADS": "1",
                   "FLWR_TELEMETRY_ENABLED": "0", "PATH": f"{own}:{os.environ['PATH']}"}  # fmt: skip
    (folder / ".flwr").mkdir()
    (folder / ".flwr" / "config.toml").write_text(
        f'[superlink]\ndefault = "bench"\n[superlink.bench]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    link = ["flower-superlink", "--insecure", "--port", str(port), "--disable-runtime-dependency-installation"]
    with _process(link, environment, folder):
        _await_port(port)
        with contextlib.ExitStack() as nodes:
            for number in range(1, num_clients + 1):
                node = ["flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{port}",
                        "--port", str(_free_port()), "--node-config", f"number={number}"]  # fmt: skip
                nodes.enter_context(_process(node, environment, folder))
            app = folder / "app"
            shutil.copytree(HERE / "flower", app)
            config = f"num-clients={num_clients} num-rounds={options.rounds + 1} megabytes={megabytes}"
            with _Memory(lambda: _inside(folder, ("supernode", "clientapp"))) as memory:
                subprocess.run(["flwr", "run", str(app), "bench", "--run-config", f'{config} out="{out}"'],
                               env=environment, check=True, capture_output=True)  # fmt: skip
                _await(out)
    result = json.loads(out.read_text())
    expected = (options.rounds + 1) * (num_clients + 1) / 2
    assert all(abs(value - expected) < 1e-3 for value in result["final"]), result["final"]
    return Turn(_differences(result["times"])[1:], memory.most_mb)


def _nvflare(
    num_clients: int, megabytes: float, options: argparse.Namespace, folder: Path, recipe: str = "numpy"
) -> Turn:
    python = options.environments / "nvflare" / "bin" / "python"
    environment = {**os.environ, "HOME": str(folder), "NVFLARE_POC_WORKSPACE": str(folder / "poc"),
                   "OMP_NUM_THREADS": "1", "PATH": f"{python.parent}:{os.environ['PATH']}"}  # fmt: skip
    job = [str(python), str(HERE / "nvflare_job.py"), "--clients", str(num_clients), "--megabytes", str(megabytes),
           "--rounds", str(options.rounds + 2), "--out", str(folder), "--recipe", recipe]  # fmt: skip
    with _process(job, environment, folder) as submitter, _Memory(lambda: _named(str(folder), "/server")) as memory:
        submitter.wait(_LONGEST_SECONDS)
    sites = [json.loads((folder / f"site-{number}.json").read_text()) for number in range(1, num_clients + 1)]
    expected = (options.rounds + 1) * (num_clients + 1) / 2  # what the last round sent out
    assert all(abs(value - expected) < 1e-3 for site in sites for value in site["received"]), sites[0]["received"]
    return Turn(_differences([min(times) for times in zip(*(site["times"] for site in sites), strict=True)])[1:],
                memory.most_mb)  # fmt: skip


SYSTEMS: dict[str, Callable[..., Turn]] = {
    "floor": _floor,
    "fedssl": _fedssl,
    "flower": _flower,
    "nvflare": _nvflare,
    "nvflare-torch": functools.partial(_nvflare, recipe="torch"),
}


class _Memory:
    """Samples the sum of the resident memory of some processes. `find` returns which these are now."""

    def __init__(self, find: Callable[[], list[int]]) -> None:
        self._find = find
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self.most_mb = 0.0

    def __enter__(self) -> "_Memory":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(0.2):
            self.most_mb = max(self.most_mb, sum(map(_resident_mb, self._find())))


def _resident_mb(pid: int) -> float:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    except OSError:  # it has ended
        return 0.0


def _inside(folder: Path, without: tuple[str, ...]) -> list[int]:
    """Return the processes that run in a folder and whose command lines contain none of the words."""
    return [pid for pid in _processes() if _is_in(pid, folder) and not any(word in _command(pid) for word in without)]


def _named(*words: str) -> list[int]:
    """Return the processes whose command lines contain all of the words."""
    return [pid for pid in _processes() if all(word in _command(pid) for word in words)]


def _processes() -> list[int]:
    return [int(path.name) for path in Path("/proc").glob("[0-9]*")]


def _is_in(pid: int, folder: Path) -> bool:
    with contextlib.suppress(OSError):  # it has ended, or belongs to another user
        return Path(f"/proc/{pid}/cwd").readlink() == folder
    return False


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):  # it has ended
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode()
    return ""


@contextlib.contextmanager
def _process(command: list[str], environment: dict[str, str], folder: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a command in a session of its own, which is ended with it."""
    with (folder / f"{Path(command[0]).name}.log").open("ab") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=folder, start_new_session=True)
    try:
        yield process
    finally:
        for signum in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signum)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)


def _output(command: list[str]) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=_LONGEST_SECONDS + 60).stdout


def _await(path: Path) -> None:
    end = time.monotonic() + _LONGEST_SECONDS
    while not (path.exists() and path.stat().st_size):
        assert time.monotonic() < end, f"{path} was not written"
        time.sleep(0.2)


def _await_port(port: int) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.2)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _differences(times: list[float]) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise(times)]


def _say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
