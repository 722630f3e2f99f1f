"""Measure the largest error of a mean in fixed point against a float64 mean, next to that of a sum in float32.

Run it with `python tests/bench/measure_fixed_point.py`; it prints a row per number of clients. Values are those of a
trained network in size: about 0.1, and updates move them by about 0.01. With `--knn` it trains FedSimCLR (a ConvNet
with BatchNorm) on Fashion-MNIST instead, with three seeds, and prints the accuracy of kNN before and after training in
float, in float with a learning rate that differs by a millionth (which shows how far rounding errors grow), and in
fixed point.
"""

import argparse
import sys

import numpy as np
import torch
from torch import Tensor

from fedssl.aggregation.fixed_point import COUNTED_BITS, EQUAL_BITS, FixedPointSum, NarrowWords, TotalBits
from fedssl.cli.datasets.fetching import data_folder
from fedssl.protocol.runs import RunSpec
from fedssl.simulation import simulate

WIDTH = 2000
FEWEST_IMAGES, MOST_IMAGES = 60, 4039


def errors(num_clients: int, *, seed: int) -> list[float]:
    """Return the largest errors of fixed point by images, of that with equal weights, of both with words of 32 bits,
    and of float32 by images.

    The networks are float64 here, so that rounding the result to float32 does not hide the error of the sum.
    """
    generator = np.random.default_rng([seed, num_clients])
    weights = [int(w) for w in generator.integers(FEWEST_IMAGES, MOST_IMAGES + 1, num_clients)]
    base = torch.from_numpy(generator.normal(0, 0.1, WIDTH).astype(np.float32)).double()
    moves = torch.from_numpy(generator.normal(0, 0.01, (num_clients, WIDTH)).astype(np.float32)).double()
    updates = base + moves
    summed = torch.zeros(WIDTH)
    for update, weight in zip(updates, weights, strict=True):
        summed += update.float() * weight
    found = []
    bits = TotalBits.after(sum(weights), num_clients)
    assert bits is not None
    for narrow in (None, NarrowWords({"w"}, bits)):
        for numbers, fraction in ((weights, COUNTED_BITS), ([1] * num_clients, EQUAL_BITS)):
            found.append(_error(_fixed(base, updates, numbers, fraction, narrow), updates, numbers))
    return [*found, _error((summed / sum(weights)).double(), updates, weights)]


def _fixed(base: Tensor, updates: Tensor, weights: list[int], bits: int, narrow: NarrowWords | None) -> Tensor:
    total = FixedPointSum({"w": base}, fraction_bits=bits, num_clients=len(weights), narrow=narrow)
    for update, weight in zip(updates, weights, strict=True):
        total.add({"w": update}, weight)
    return total.mean()["w"]


def _error(mean: Tensor, updates: Tensor, weights: list[int]) -> float:
    exact = np.average(updates.numpy(), axis=0, weights=np.array(weights, dtype=np.float64))
    return float(np.abs(mean.numpy() - exact).max())


def knn_accuracy(arithmetic: str, seed: int, learning_rate: float = 0.1) -> tuple[float, float]:
    """Return the accuracy of kNN before training and after eight rounds, in percent."""
    spec = RunSpec.model_validate(
        {
            "seed": seed,
            "num_rounds": 8,
            "method": {"name": "fedsimclr"},
            "aggregation": {"arithmetic": arithmetic},
            "model": {"encoder": {"widths": [16, 32, 64]}, "projector": {"hidden_dims": [64], "out_dim": 32}},
            "data": {"channels": 1, "image_size": 28, "mean": [0.286], "std": [0.353]},
            "training": {"local_epochs": 1, "batch_size": 128, "optimizer": {"learning_rate": learning_rate}},
            "partition": {"dataset": "fashion-mnist", "num_clients": 5, "alpha": 0.5, "max_images": 5000, "seed": seed},
            "evaluation": {"dataset": "fashion-mnist", "measures": ["knn"], "max_train": 5000, "max_test": 5000},
            "watch": {"num_images": 0},
        }
    )
    found = simulate(spec, data_root=data_folder()).evaluations_by_round
    return tuple(100 * next(iter(found[number].values())) for number in (min(found), max(found)))  # type: ignore[return-value]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--knn", action="store_true")
    arguments = parser.parse_args()
    seed = arguments.seed
    if arguments.knn:
        for number in range(3):
            before, exact = knn_accuracy("float", number)
            (_, near), (_, fixed) = knn_accuracy("float", number, 0.1 * (1 + 1e-6)), knn_accuracy("fixed", number)
            sys.stdout.write(f"| {number} | {before:.2f} | {exact:.2f} | {near:.2f} | {fixed:.2f} |\n")
            sys.stdout.flush()
        return
    for num_clients in (10, 100, 1000):
        found = " | ".join(f"{error:.1e}" for error in errors(num_clients, seed=seed))
        sys.stdout.write(f"| {num_clients:,} | {found} |\n")


if __name__ == "__main__":
    main()
