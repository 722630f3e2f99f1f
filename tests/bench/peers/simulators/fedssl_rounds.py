"""fedssl's half of the comparison: `simulate` with the method `supervised`, without augmentation."""

import argparse
from pathlib import Path

import task
import torch

from fedssl.data import ImageData
from fedssl.engine import start_run
from fedssl.methods import METHODS
from fedssl.methods.api import Context
from fedssl.protocol.runs import RunSpec
from fedssl.simulation import simulate


def spec_of(widths: tuple[int, ...], rounds: int) -> RunSpec:
    """Return the run: a spec for what `task.train` does."""
    return RunSpec.model_validate(
        {
            "num_rounds": rounds,
            "method": {"name": "supervised"},
            "model": {"encoder": {"name": "convnet", "widths": widths, "norm": "group"}},
            "data": {
                "channels": 3,
                "image_size": 32,
                "mean": MEAN,
                "std": STD,
                "augmentation": {"preset": "none"},
            },
            "training": {
                "batch_size": task.BATCH,
                "local_epochs": 1,
                "optimizer": {"learning_rate": task.LEARNING_RATE, "momentum": 0.0, "weight_decay": 0.0},
            },
            "cohort": {"fraction": task.COHORT / task.NUM_USERS},
            "watch": {"num_images": 0},
        }
    )


MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
"""The means and deviations of CIFAR-10's training images, per channel."""


def first_weights(widths: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Return fedssl's first weights, which the other simulators also get."""
    spec = spec_of(widths, 1)
    return start_run(METHODS["supervised"], Context(spec=spec, round_number=0)).model


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    it = task.load(parser.parse_args().folder)
    torch.set_num_threads(1)
    pixels = task.np.load(it.folder / "pixels.npy")
    shards = pixels.reshape(task.NUM_USERS, task.IMAGES, *pixels.shape[1:])
    labels = task.np.asarray(it.labels).reshape(task.NUM_USERS, task.IMAGES)
    users = {f"user-{n:04}": ImageData(shards[n], labels[n]) for n in range(task.NUM_USERS)}
    times: list[float] = []
    result = simulate(spec_of(it.widths, it.rounds), users, jobs=it.jobs, on_round=lambda _: times.append(task.now()))
    assert all(torch.equal(result.initial[name], tensor) for name, tensor in it.weights.items())
    task.report(it, times, result.model)


if __name__ == "__main__":
    main()
