"""Measure how strongly FedRLC's clustering loss acts, next to BYOL's loss, at several widths, scales and exponents.

Run it with `python tests/bench/measure_clustering_loss.py`; it prints a row per setting and seed, before training and
after it: the length of crossed_kl's gradient over that of BYOL's, both with respect to the encoder's weights and over
the first batch of one client; the centers in use; and the kNN accuracy. Fashion-MNIST, 2,000 images, 4 clients. The
rows of weight 0 are FedRLC without its clustering loss. In the last two settings the exponent acts as an inverse
temperature: q is the softmax of e log(1 + ||z - mu||^2).
"""

import argparse
import sys
from typing import Any

import torch

from fedssl.artifacts.tensors import Tensors
from fedssl.cli.datasets.fetching import data_folder, ensure
from fedssl.data.partitioning import partition_dataset
from fedssl.engine import start_run
from fedssl.evaluation.suite import evaluate_encoder, load_encoder, load_labelled
from fedssl.methods import METHODS
from fedssl.methods.api import ClientData, Context
from fedssl.protocol.evaluation import EvaluationConfig
from fedssl.protocol.runs import RunSpec
from fedssl.simulation import simulate

DATA = "fashion-mnist"
CLIENT = "client-0"
WIDTHS = (64, 2048)
SETTINGS: tuple[dict[str, Any], ...] = (
    {},  # as printed
    {"scale": "unit"},
    {"scale": "unit", "exponent": -10},
    {"scale": "unit", "exponent": -50},
)


def spec_of(width: int, clustering: dict[str, Any], seed: int, num_rounds: int) -> RunSpec:
    """Return FedRLC with an embedding of this width, or FedEMA, which has no clustering, if its weight is 0."""
    head = {"hidden_dims": [2 * width], "out_dim": width}
    augmentation = {"min_scale": 0.2, "jitter": 0.8, "greyscale": 0.0}
    return RunSpec.model_validate(
        {
            "seed": seed,
            "num_rounds": num_rounds,
            "method": {"name": "fedrlc", "target_momentum": 0.97, "add_ons": [{"name": "crossed_kl", **clustering}]},
            "model": {"encoder": {"widths": [16, 32, 64]}, "projector": head, "predictor": head},
            "data": {
                "channels": 1, "image_size": 28, "mean": [0.286], "std": [0.353], "augmentation": augmentation
            },
            "training": {"local_epochs": 2, "batch_size": 64, "optimizer": {"learning_rate": 0.1}},
            "partition": {"dataset": DATA, "num_clients": 4, "alpha": 0.5, "max_images": 2000, "seed": seed},
            "watch": {"num_images": 0},
        }
    )  # fmt: skip


def gradients(spec: RunSpec, model: Tensors, state: Tensors | None, number: int) -> tuple[float, float]:
    """Return the ratio of the gradients' lengths, and the centers in use, in the first step of one client's round."""
    assert spec.partition is not None
    images = partition_dataset(spec.partition, spec.data, data_folder()).by_client[CLIENT]
    data = ClientData(torch.from_numpy(images.images), None)
    ctx = Context(spec=spec, round_number=number, client_id=CLIENT)
    algorithm = METHODS[spec.method.name].bind(spec).client
    modules = algorithm.build(ctx)
    modules.train()
    algorithm.merge(modules, model, state, data, ctx)
    losses, metrics = algorithm.objective(modules, next(algorithm.batches(data, 0, ctx)), ctx)
    weights = [parameter for parameter in modules["encoder"].parameters() if parameter.requires_grad]
    lengths = {}
    for name, loss in losses.items():
        found = torch.autograd.grad(loss, weights, retain_graph=True, allow_unused=True)
        lengths[name] = sum(float(each.square().sum()) for each in found if each is not None) ** 0.5
    return lengths["crossed_kl"] / lengths["regression"], float(metrics["centers_used"])


def knn(spec: RunSpec, model: Tensors) -> float:
    """Return the kNN accuracy in percent, on 2,000 labels and 2,000 test images."""
    labelled = load_labelled(DATA, spec.data, max_train=2000, max_test=2000, seed=0, root=data_folder())
    config = EvaluationConfig(dataset=DATA, measures=("knn",))
    return 100 * evaluate_encoder(load_encoder(model, spec), labelled, config, spec.data)["knn"]


def measure(width: int, clustering: dict[str, Any], seed: int, num_rounds: int) -> str:
    """Return one row."""
    spec = spec_of(width, clustering, seed, num_rounds)
    first = start_run(METHODS[spec.method.name], Context(spec=spec, round_number=0)).received
    before = gradients(spec, first, None, 1)
    result = simulate(spec, data_root=data_folder())
    after = gradients(spec, result.model, result.client_states.get(CLIENT), num_rounds + 1)
    shown = ", ".join(f"{name} {value}" for name, value in clustering.items()) or "as printed"
    numbers = " ".join(f"{100 * share:9.3f} % {used:6.2f}" for share, used in (before, after))
    return f"{width:5} {shown:28} {seed:4} {numbers} {knn(spec, first):7.2f} {knn(spec, result.model):7.2f}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    ensure(DATA, lambda message: None)
    sys.stdout.write("width setting                      seed   gradient   used  gradient   used   kNN before, after\n")
    for width in arguments.widths:
        for clustering in ({"weight": 0}, *SETTINGS):
            for seed in range(arguments.seeds):
                sys.stdout.write(measure(width, clustering, seed, arguments.rounds) + "\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
