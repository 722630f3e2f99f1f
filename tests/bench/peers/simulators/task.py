"""The task that every simulator of the comparison trains: the users, the network, and one user's epoch.

It needs only torch and NumPy, because the peers' environments import it too. The users have 50 images each, held as
float32 values that are normalised beforehand, as pfl-research's benchmark does.
"""

import argparse
import functools
import itertools
import json
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

NUM_USERS, IMAGES, COHORT, BATCH, LEARNING_RATE = 1000, 50, 50, 10, 0.1


class Network(nn.Module):
    """fedssl's `convnet` with GroupNorm, and a linear classifier: two 3x3 convolutions of stride 2.

    It stands for the two-convolution CNN of pfl-research's benchmark. The parameters have fedssl's names.
    """

    def __init__(self, widths: tuple[int, ...], num_classes: int = 10) -> None:
        super().__init__()
        self.encoder = nn.Module()
        self.encoder.blocks = nn.ModuleList(_Block(a, b) for a, b in itertools.pairwise((3, *widths)))
        self.classifier = nn.Linear(widths[-1], num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last)  # as fedssl's engine does
        for block in self.encoder.blocks:
            x = block(x)
        logits: Tensor = self.classifier(x.mean(dim=(2, 3)))
        return logits


class _Block(nn.Module):
    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3, stride=2, padding=1, bias=False)
        self.bn = nn.GroupNorm(math.gcd(32, out_channels), out_channels)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.bn(self.conv(x)))


@dataclass(frozen=True)
class Task:
    """A run's users, its network and its length. `jobs`: the number of processes that train users."""

    images: np.ndarray
    labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray
    weights: dict[str, Tensor]
    widths: tuple[int, ...]
    rounds: int
    jobs: int
    folder: Path

    def user(self, number: int) -> tuple[Tensor, Tensor]:
        """Return a user's images (50, 3, 32, 32) and labels (50,)."""
        rows = slice(number * IMAGES, (number + 1) * IMAGES)
        return torch.from_numpy(self.images[rows]), torch.from_numpy(self.labels[rows])

    def network(self) -> Network:
        """Return the network with the weights from which every simulator starts."""
        network = Network(self.widths)
        network.load_state_dict(self.weights)
        return network.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


@functools.lru_cache(maxsize=1)
def load(folder: Path) -> Task:
    """Return the task that `compare_simulators.py` wrote into a folder, whose images stay there until they are read."""
    config = json.loads((folder / "task.json").read_text())
    arrays = [
        np.load(folder / f"{name}.npy", mmap_mode="c") for name in ("images", "labels", "test_images", "test_labels")
    ]
    weights = torch.load(folder / "weights.pt", weights_only=True)
    return Task(*arrays, weights, tuple(config["widths"]), config["rounds"], config["jobs"], folder)


def cohort(number: int) -> list[int]:
    """Return the users of a round."""
    return np.random.default_rng(number).choice(NUM_USERS, COHORT, replace=False).tolist()


def train(network: nn.Module, images: Tensor, labels: Tensor) -> None:
    """Train one epoch on a user's images, in a random order."""
    optimizer = torch.optim.SGD(network.parameters(), LEARNING_RATE)
    for chosen in torch.randperm(len(images)).split(BATCH):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(images[chosen]), labels[chosen]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def from_command_line() -> Task:
    """Return the task of the folder that the command line names. Each process uses one thread."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return load(parser.parse_args().folder)


def report(task: Task, times: list[tuple[float, float]], weights: Mapping[str, Tensor]) -> None:
    """Write the end of each round and the final network's accuracy on the test images, for the comparison.

    `times`: `now()` at the end of each round.
    """
    network = task.network()
    network.load_state_dict(dict(weights))
    images, labels = torch.from_numpy(task.test_images[:]), torch.from_numpy(task.test_labels[:])
    with torch.no_grad():
        accuracy = (network(images).argmax(dim=1) == labels).double().mean().item()
    assert len(times) == task.rounds, times
    (task.folder / "result.json").write_text(json.dumps({"times": times, "accuracy": accuracy}))


def now() -> tuple[float, float]:
    """Return the time, and the processor time of this process and of those it has waited for, both in seconds."""
    return time.perf_counter(), sum(os.times()[:4])
