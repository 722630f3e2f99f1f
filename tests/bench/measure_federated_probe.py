"""Measure the federated probe against the central probe and against each site's own, on one encoder.

Run it with `python tests/bench/measure_federated_probe.py [--data-folder DIR]`; it prints a row per data set and seed.
All accuracies are of the same test images of all classes. The encoder is FedSimCLR's after a few rounds over the sites.
`federated` is `ridge-probe`; `difference` its largest relative difference from the ridge regression of all sites'
training images in one place; `central` the linear probe `fast` of these images; `own` is `ridge-probe` of one site at a
time. The sites come from a Dirichlet distribution, so that a site may lack most classes.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fedssl.artifacts.tensors import Tensors, save_tensors
from fedssl.cli.datasets.fetching import data_folder
from fedssl.data import ImageData
from fedssl.data.partitioning import partition_dataset
from fedssl.evaluation import extract_features, linear_probe
from fedssl.evaluation.suite import load_encoder, load_labelled
from fedssl.methods.objectives.ridge_probe import PENALTIES, SOLUTIONS
from fedssl.methods.site_data import client_data
from fedssl.models.classifier import BIAS, WEIGHT
from fedssl.protocol.runs import RunSpec
from fedssl.simulation import simulate

_COLUMNS = ("federated", "central", "own mean", "lowest", "highest")
_HEADER = f"{'data':<16}{'seed':>5}" + "".join(f"{name:>11}" for name in _COLUMNS) + "  difference\n"
DATA: dict[str, dict[str, Any]] = {
    "fashion-mnist": {"channels": 1, "image_size": 28, "mean": [0.286], "std": [0.353]},
    "cifar10": {"channels": 3, "image_size": 32},
}


def dataset_of(name: str, args: argparse.Namespace) -> str:
    """Return the folder of class folders that stands for a data set in --data-folder, or the set's name."""
    own = None if args.data_folder is None else args.data_folder / name
    return str(own) if own is not None and (own / "train").is_dir() else name


def spec_of(name: str, seed: int, args: argparse.Namespace, **changes: Any) -> RunSpec:
    """Return FedSimCLR on the sites, or another method on top of it."""
    document = {
        "seed": seed,
        "num_rounds": args.rounds,
        "method": {"name": "fedsimclr"},
        "model": {"encoder": {"widths": [32, 64, 128]}, "projector": {"hidden_dims": [128], "out_dim": 64}},
        "data": DATA[name],
        "training": {"local_epochs": 1, "batch_size": 128, "optimizer": {"learning_rate": 0.1}},
        "partition": {
            "dataset": dataset_of(name, args),
            "num_clients": args.sites,
            "alpha": args.alpha,
            "max_images": args.images,
            "seed": seed,
        },
        "watch": {"num_images": 0},
    }
    return RunSpec.model_validate({**document, **changes})


def accuracy(model: Tensors, h_NH: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the share of test images that a run's classifier predicts, in percent."""
    return 100 * float(((h_NH @ model[WEIGHT].T + model[BIAS]).argmax(dim=1) == labels).double().mean())


def measured(name: str, seed: int, args: argparse.Namespace, folder: Path, root: Path) -> list[float]:
    """Return the accuracies of the federated and the central probe, the mean, lowest and highest of the sites' own, and
    the largest relative difference from the central ridge regression."""
    base = spec_of(name, seed, args)
    assert base.partition is not None
    sites = partition_dataset(base.partition, base.data, root).by_client
    trained, weights = simulate(base, sites).model, folder / "encoder.safetensors"
    save_tensors(trained, weights)
    some = next(iter(sites.values()))
    spec = spec_of(
        name,
        seed,
        args,
        method={"name": "ridge-probe", "classes": some.class_names or list("0123456789"), "min_images": 1},
        model={**base.model.model_dump(exclude={"projector"}), "initial": {"weights": str(weights)}},
        num_rounds=2,
        cohort={"min_clients": 1},
    )
    test = load_labelled(dataset_of(name, args), spec.data, max_train=2, max_test=args.test, seed=0, root=root).test
    assert test.labels is not None
    encoder = load_encoder(trained, spec)
    h_NH, labels = extract_features(encoder, test, spec.data), torch.from_numpy(test.labels)
    federated = simulate(spec, sites).model
    own = [_own(spec, site, each, h_NH, labels) for site, each in sites.items()]
    train_NH, train_labels = _pooled(spec, sites, encoder)
    central = 100 * linear_probe(train_NH, train_labels, h_NH, labels).accuracy
    return [
        accuracy(federated, h_NH, labels),
        central,
        statistics.mean(own),
        min(own),
        max(own),
        _difference(federated, train_NH, train_labels),
    ]


def _own(spec: RunSpec, site: str, images: ImageData, h_NH: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the accuracy of one site's own probe, or of its class if it has images of one class."""
    assert images.labels is not None
    if len(set(images.labels.tolist())) == 1:
        return 100 * float((labels == int(images.labels[0])).double().mean())
    return accuracy(simulate(spec, {site: images}).model, h_NH, labels)


def _pooled(
    spec: RunSpec, sites: Mapping[str, ImageData], encoder: torch.nn.Module
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the representations and labels of all sites' training images in one place."""
    found = []
    for site, images in sites.items():
        data = client_data(images, spec, site)
        assert data.held_out is not None
        assert data.labels is not None
        trained = (~data.held_out).numpy().nonzero()[0]
        found.append((extract_features(encoder, images.subset(trained), spec.data), data.labels[trained]))
    return torch.cat([h for h, _ in found]), torch.cat([labels for _, labels in found])


def _difference(federated: Tensors, h_NH: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the largest relative difference of the ten solutions from least squares on all images, in float64."""
    x_NX = torch.cat([h_NH.double(), torch.ones(len(h_NH), 1, dtype=torch.float64)], dim=1)
    y_NC = torch.nn.functional.one_hot(labels, federated[WEIGHT].shape[0]).double()
    penalised = torch.ones(x_NX.shape[1], dtype=torch.float64)
    penalised[-1] = 0
    worst = 0.0
    for penalty, solution in zip(federated[PENALTIES].tolist(), federated[SOLUTIONS], strict=True):
        if penalty:
            rows = penalised.mul(penalty).sqrt().diag()
            expected = torch.linalg.lstsq(
                torch.cat([x_NX, rows]), torch.cat([y_NC, torch.zeros_like(solution)])
            ).solution
            worst = max(worst, float((solution - expected).abs().max() / expected.abs().max()))
    return worst


def main() -> int:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", default="fashion-mnist,cifar10")
    parser.add_argument("--data-folder", type=Path, default=None)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--sites", type=int, default=5)
    parser.add_argument("--alpha", type=float, default=0.1)
    parser.add_argument("--images", type=int, default=4000, help="training images of all sites together")
    parser.add_argument("--test", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    sys.stdout.write(_HEADER)
    for name in args.data.split(","):
        rows = []
        for seed in range(args.seeds):
            with tempfile.TemporaryDirectory() as folder:
                row = measured(name, seed, args, Path(folder), args.data_folder or data_folder())
            rows.append(row)
            _show(name, str(seed), row)
        _show(name, "mean", [statistics.mean(column) for column in zip(*rows, strict=True)])
    return 0


def _show(name: str, seed: str, row: list[float]) -> None:
    *accuracies, difference = row
    numbers = "".join(f"{value:>11.2f}" for value in accuracies)
    sys.stdout.write(f"{name:<16}{seed:>5}{numbers}  {difference:.1e}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
