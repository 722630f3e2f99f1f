"""Compares simulated rounds of fedssl, pfl-research, BlazeFL and Flower with a bare loop, on CIFAR-10.

    make bench-simulators ARGS="--images cifar10.npz --rounds 6 --turns 3"

The task is that of pfl-research's image benchmark: 1,000 users of 50 images, a cohort of 50, batches of 10, one local
epoch, SGD. All systems train fedssl's ConvNet of two convolutions with GroupNorm, from equal weights. Each turn
of a system is a separate process, in which every training process has one thread; the turns alternate. The first
round is left out: it prepares what later ones use. Prints one line per turn, and then the medians of all rounds as
ratios to the bare loop of the same run, and the final network's accuracy, which shows that all train the same.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

HERE = Path(__file__).parent / "simulators"
sys.path.insert(0, str(HERE))
import fedssl_rounds  # noqa: E402
import task  # noqa: E402

_LONGEST_SECONDS = 900


@dataclass(frozen=True)
class System:
    """A simulator: the folder of its environment (or None if it is this one), its program, and its processes."""

    environment: str | None
    program: str
    jobs: int = 1
    launcher: tuple[str, ...] = ()

    @property
    def counts_all(self) -> bool:
        """Return whether the main process's processor time includes the training."""
        return self.environment != "flower-simulation" and (self.jobs == 1 or self.environment == "blazefl")


_RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
SYSTEMS = {
    "bare": System(None, "bare.py"),
    "fedssl": System(None, "fedssl_rounds.py"),
    "pfl": System("pfl", "pfl_rounds.py"),
    "blazefl": System("blazefl", "blazefl_rounds.py"),
    "flower": System("flower-simulation", "flower_rounds.py"),
    "fedssl-2": System(None, "fedssl_rounds.py", 2),
    "pfl-2": System("pfl", "pfl_rounds.py", 2, _RANKS),
    "blazefl-2": System("blazefl", "blazefl_rounds.py", 2),
    "flower-2": System("flower-simulation", "flower_rounds.py", 2),
}


@dataclass(frozen=True)
class Turn:
    """The rounds after the first, in seconds by the clock and of the main process's processor, and the accuracy."""

    seconds: list[float]
    processor: list[float]
    accuracy: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, required=True, help="CIFAR-10 as .npz with images, labels, test_*")
    parser.add_argument("--widths", type=int, nargs=2, default=[32, 64], help="channels of the two convolutions")
    parser.add_argument("--rounds", type=int, default=6, help="including the first, which does not count")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--environments", type=Path, required=True, help="the folder of the peers' environments")
    options = parser.parse_args()
    turns: dict[str, list[Turn]] = {name: [] for name in dict.fromkeys(["bare", *options.only])}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_task(folder, options)
        for _ in range(options.turns):
            for name, done in turns.items():
                done.append(take_turn(SYSTEMS[name], folder, options))
                _say(
                    f"{name:10}", " ".join(f"{each:.3f}" for each in done[-1].seconds), f"load {os.getloadavg()[0]:.1f}"
                )
    rounds = {name: statistics.median(s for turn in done for s in turn.seconds) for name, done in turns.items()}
    for name, done in turns.items():
        processor = statistics.median(s for turn in done for s in turn.processor)
        floor = statistics.median(s for turn in turns["bare"] for s in turn.processor)
        own = f", {processor / floor:.2f} times its processor time" if SYSTEMS[name].counts_all else ""
        accuracy = statistics.median(turn.accuracy for turn in done)
        share = rounds["bare"] / rounds[name]
        _say(f"= {name:10} {share:.3f} of the bare loop's users per second{own}, accuracy {accuracy:.3f}")
    return 0


def write_task(folder: Path, options: argparse.Namespace) -> None:
    """Write what every system reads: images as float32 for the peers and as they are for fedssl, and the weights."""
    with np.load(options.images) as arrays:
        pixels, labels = _drawn(arrays, "", task.NUM_USERS * task.IMAGES)
        test, test_labels = _drawn(arrays, "test_", 5000)
    for name, array in {
        "pixels": pixels,
        "images": _normalized(pixels),
        "labels": labels,
        "test_images": _normalized(test),
        "test_labels": test_labels,
    }.items():
        np.save(folder / f"{name}.npy", array)
    torch.save(fedssl_rounds.first_weights(tuple(options.widths)), folder / "weights.pt")


def take_turn(system: System, folder: Path, options: argparse.Namespace) -> Turn:
    """Run a system once."""
    config = {"widths": options.widths, "rounds": options.rounds, "jobs": system.jobs}
    (folder / "task.json").write_text(json.dumps(config))
    (folder / "result.json").unlink(missing_ok=True)
    own = (
        Path(sys.executable) if system.environment is None else options.environments / system.environment / "bin/python"
    )
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": str(HERE)}
    subprocess.run(
        [str(own.absolute()), *system.launcher, str(HERE / system.program), str(folder)],
        check=True, timeout=_LONGEST_SECONDS, env={**os.environ, **threads}, stdout=subprocess.DEVNULL,
        stderr=None if os.environ.get("VERBOSE") else subprocess.DEVNULL,
    )  # fmt: skip
    result = json.loads((folder / "result.json").read_text())
    walls, processors = zip(*result["times"], strict=True)
    return Turn(_differences(walls), _differences(processors), result["accuracy"])


def _drawn(arrays: Mapping[str, np.ndarray], prefix: str, number: int) -> tuple[np.ndarray, np.ndarray]:
    images, labels = arrays[f"{prefix}images"], arrays[f"{prefix}labels"].astype(np.int64)
    order = np.random.default_rng(0).permutation(len(images))[:number]  # files may be sorted by class
    return images[order], labels[order]


def _normalized(pixels: np.ndarray) -> np.ndarray:
    mean, std = (np.float32(each)[:, None, None] for each in (fedssl_rounds.MEAN, fedssl_rounds.STD))
    return ((pixels / np.float32(255) - mean) / std).astype(np.float32)


def _differences(times: Sequence[float]) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise(times)]


def _say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
