"""The training that every library of the comparison does, and how the comparison talks to it.

It needs only torch and NumPy, because the peers' environment imports it too.
"""

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

WIDTHS, HIDDEN, OUT, BATCH, TEMPERATURE = (32, 64, 128, 256), 256, 128, 128, 0.2
LEARNING_RATE, MOMENTUM, WEIGHT_DECAY = 0.06, 0.9, 5e-4
JITTER, HUE, JITTERED, GREYSCALE, MIN_SCALE = 0.4, 0.1, 0.8, 0.2, 0.2
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.247, 0.243, 0.261)
"""solo-learn's for CIFAR-10, which cannot be set there."""


class Encoder(nn.Module):
    """fedssl's `convnet`: 3x3 convolutions of stride 2, BatchNorm, ReLU, and the mean. With fedssl's names."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Module() for _ in WIDTHS)
        for block, (before, width) in zip(self.blocks, itertools.pairwise((3, *WIDTHS)), strict=True):
            block.conv = nn.Conv2d(before, width, 3, stride=2, padding=1, bias=False)
            block.bn = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last)  # as fedssl's engine does
        for block in self.blocks:
            x = torch.relu(block.bn(block.conv(x)))
        return x.mean(dim=(2, 3))


class Network(nn.Module):
    """The encoder and SimCLR's projector, with the weights that fedssl starts from."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.encoder = Encoder()
        self.projector = nn.Sequential(
            nn.Linear(WIDTHS[-1], HIDDEN, bias=False), nn.BatchNorm1d(HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, OUT)
        )
        self.load_state_dict(torch.load(folder / "weights.pt", weights_only=True), strict=True)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.projector(self.encoder(x))
        return z


def images(folder: Path) -> np.ndarray:
    """Return the training images (N, 3, 32, 32), uint8."""
    return np.load(folder / "images.npy")


def serve(
    step: Callable[[int], object],
    augment: Callable[[int], object],
    train: Callable[[int], object],
    weights: Callable[[], Mapping[str, Tensor]],
) -> None:
    """Answer the comparison's lines until its input ends, one turn each: `WHAT NUMBER`.

    `step`, `augment`, `train`: take that many steps on prepared views, make the views of that many batches, and do
    both. The answer is the processor time in seconds. `equal_time`: train, as often as the processor time of NUMBER
    seconds allows, then save the weights; the answer has the number of batches too.
    """
    turns = {"step": step, "augment": augment, "train": train}
    for line in sys.stdin:
        what, number = line.split()[0], int(line.split()[1])
        started, batches = time.process_time(), number
        if what == "equal_time":
            batches, longest = 0, 0.0
            while (used := time.process_time() - started) + longest <= number:
                train(ROUND)
                batches, longest = batches + ROUND, max(longest, time.process_time() - started - used)
            torch.save(dict(weights()), Path(sys.argv[1]) / f"{sys.argv[2]}.pt")
        else:
            turns[what](number)
        sys.stdout.write(json.dumps([time.process_time() - started, batches]) + "\n")
        sys.stdout.flush()


ROUND = 16
"""Batches of one call of `train` during the equal time."""


def from_command_line() -> tuple[Path, str]:
    """Return the folder with images and weights, and the library's name. One thread is used."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("library")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    options = parser.parse_args()
    return options.folder, options.library
