"""Measure how far a ResNet-18 drifts in local training, by its first weights, next to FedU's thresholds of 0.4 and 0.6.

    python tests/bench/measure_first_weights.py --data DIR [--images 256] [--size 16] [--rounds 3] [--seeds 0,1,2]

DIR is a folder of data sets with CIFAR-10. One client trains FedU with its paper's SGD (learning rate 0.032, momentum
0.9, weight decay 0.0005), in batches of 32. A row per first weights and seed: the mean length of the 17 convolutions at
the start, and DAPU's `reference` divergence of each round's local training.
"""

import argparse
import itertools
from collections.abc import Sequence
from pathlib import Path

import torch

from fedssl.artifacts.tensors import Tensors
from fedssl.experiments.reproduction import dataset_places
from fedssl.models import build_encoder
from fedssl.protocol.runs import RunSpec
from fedssl.simulation import simulate


def spec_of(first_weights: str, seed: int, arguments: argparse.Namespace) -> RunSpec:
    """Return one client's run."""
    head = {"hidden_dims": [512], "out_dim": 256}
    encoder = {"name": "resnet18", "stem": "cifar", "first_weights": first_weights}
    place = dataset_places(["cifar10"], arguments.data)["cifar10"]
    optimizer = {"name": "sgd", "learning_rate": 0.032, "momentum": 0.9, "weight_decay": 5e-4}
    return RunSpec.model_validate(
        {
            "seed": seed,
            "num_rounds": arguments.rounds,
            "method": {"name": "fedu"},
            "model": {"encoder": encoder, "projector": head, "predictor": head},
            "data": {"channels": 3, "image_size": arguments.size},
            "training": {"local_epochs": arguments.epochs, "batch_size": 32, "optimizer": optimizer},
            "cohort": {"min_clients": 1},
            "partition": {
                "dataset": place, "num_clients": 1, "scheme": "iid", "alpha": None, "seed": seed,
                "max_images": arguments.images,
            },
            "watch": {"num_images": 0},
        }
    )  # fmt: skip


def trained(spec: RunSpec) -> list[Tensors]:
    """Return the first weights, and those after each round, which with one client are the next round's start."""
    models: list[Tensors] = []
    result = simulate(spec, on_trained=lambda number, name, model: models.append(dict(model)))
    return [result.initial, *models]


def mean(weights: Sequence[torch.Tensor]) -> float:
    """Return the mean length."""
    return sum(float(each.norm()) for each in weights) / len(weights)


def main() -> None:
    """Print a row per setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--size", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--seeds", default="0,1,2")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for seed in map(int, arguments.seeds.split(",")):
        for first_weights in ("torch", "torchvision"):
            spec = spec_of(first_weights, seed, arguments)
            encoder = build_encoder(spec.model.encoder, 3, arguments.size)
            names = [f"encoder.{name}" for name in encoder.convolutions()]
            models = trained(spec)
            length = mean([models[0][name] for name in names])
            pairs = itertools.pairwise(models)
            distances = [mean([now[name] - then[name] for name in names]) for then, now in pairs]
            print(seed, first_weights, f"{length:.2f}", [f"{each:.3f}" for each in distances], flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
