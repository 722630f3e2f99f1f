"""Compares SimCLR's throughput in fedssl, lightly and solo-learn on CIFAR-10: steps, views, and both.

    make bench-throughput ARGS="--images cifar10.npz --turns 7 --seconds 150"

All three train one small ConvNet by SGD on batches of 128 images, with equal strengths of augmentation, in one thread
and from equal weights. Each is a process, and one works at a time, in turns. Times are processor time, which other
work on the machine changes less than the clock's. Prints the images per second of each part as ratios to fedssl's
in the same turn, and then the accuracy of kNN after equal processor time, judged by one function for all three.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

HERE = Path(__file__).parent / "throughput"
sys.path.insert(0, str(HERE))
import own  # noqa: E402
import ssl_task  # noqa: E402

from fedssl.evaluation import knn_accuracy  # noqa: E402

BATCHES = {"step": 4, "augment": 4, "train": 4}
LIBRARIES = ("fedssl", "lightly", "solo")


@dataclass(frozen=True)
class Library:
    """A process that trains on request."""

    name: str
    process: "subprocess.Popen[str]"

    def take_turn(self, what: str, number: int) -> tuple[float, int]:
        """Return the processor time in seconds, and the number of batches. Raises JSONDecodeError if the process
        ended."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{what} {number}\n")
        self.process.stdin.flush()
        seconds, batches = json.loads(self.process.stdout.readline())
        return seconds, batches


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, required=True, help="CIFAR-10 as .npz with images, labels, test_*")
    parser.add_argument("--turns", type=int, default=7, help="0: only kNN")
    parser.add_argument("--seconds", type=int, default=150, help="processor time of each before kNN; 0: without kNN")
    parser.add_argument("--only", nargs="+", choices=LIBRARIES, default=LIBRARIES, help="for kNN")
    parser.add_argument("--environment", type=Path, required=True, help="the peers' environment")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        with np.load(options.images) as arrays:
            data = {name: arrays[name] for name in ("images", "labels", "test_images", "test_labels")}
        for images, labels in (("images", "labels"), ("test_images", "test_labels")):  # files may be sorted by class
            order = np.random.default_rng(0).permutation(len(data[images]))
            data |= {name: data[name][order] for name in (images, labels)}
        np.save(folder / "images.npy", data["images"])
        torch.save(own.first_weights(), folder / "weights.pt")
        libraries = [_start(name, folder, options.environment, stack) for name in LIBRARIES]
        if options.turns:
            for what, number in BATCHES.items():
                measure(libraries, what, number, options.turns)
        if options.seconds:
            judge([each for each in libraries if each.name in options.only], folder, data, options.seconds)
    return 0


def measure(libraries: list[Library], what: str, number: int, turns: int) -> None:
    """Print the images per second of all turns but the first, as ratios to fedssl's in the same turn."""
    found = [{each.name: each.take_turn(what, number)[0] for each in libraries} for _ in range(turns + 1)][1:]
    for name in LIBRARIES:
        ratios = sorted(turn["fedssl"] / turn[name] for turn in found)
        _say(f"{what:8} {name:8} {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})", _load())


def judge(libraries: list[Library], folder: Path, data: dict[str, np.ndarray], seconds: int) -> None:
    """Train each for the same processor time, from the same first weights, and print the accuracy of kNN."""
    _say(f"kNN      start    accuracy {_accuracy(own.first_weights(), data):.3f}")
    for each in libraries:
        used, batches = each.take_turn("equal_time", seconds)
        weights = torch.load(folder / f"{each.name}.pt", weights_only=True)
        epochs = batches * ssl_task.BATCH / len(data["images"])
        _say(
            f"kNN      {each.name:8} accuracy {_accuracy(weights, data):.3f}, {epochs:.2f} epochs in {used:.0f} s",
            _load(),
        )


def _accuracy(weights: dict[str, torch.Tensor], data: dict[str, np.ndarray]) -> float:
    encoder = ssl_task.Encoder().eval()
    encoder.load_state_dict({name.removeprefix("encoder."): t for name, t in weights.items() if "encoder." in name})
    found = []
    for images in (data["images"][:20_000], data["test_images"][:5_000]):
        mean, std = (torch.tensor(each).view(3, 1, 1) for each in (ssl_task.MEAN, ssl_task.STD))
        with torch.no_grad():
            found.append(
                torch.cat([encoder((part / 255 - mean) / std) for part in torch.from_numpy(images).split(500)])
            )
    labels = [
        torch.from_numpy(data[name][: len(h)]).long() for name, h in zip(("labels", "test_labels"), found, strict=True)
    ]
    return knn_accuracy(found[0], labels[0], found[1], labels[1])


def _start(name: str, folder: Path, environment: Path, stack: contextlib.ExitStack) -> Library:
    program, python = ("own.py", Path(sys.executable)) if name == "fedssl" else ("peers.py", environment / "bin/python")
    process = subprocess.Popen(
        [str(python.absolute()), str(HERE / program), str(folder), name],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
    )  # fmt: skip
    stack.enter_context(process)  # closing its input ends it
    return Library(name, process)


def _load() -> str:
    return f"load {os.getloadavg()[0]:.1f}"


def _say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
