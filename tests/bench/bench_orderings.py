"""Orderings at a size that two CPU cores can train, over three seeds.

    python tests/bench/bench_orderings.py                         everything: about an hour on one core
    python tests/bench/bench_orderings.py federation --seeds 0    one claim, one seed
    make bench ARGS="-k orderings -s"                             the same, asserted

`federation` and `objective` have the setting of `fedssl compare --ladder best --on cifar10-class`, 6 rounds and a
smaller encoder; CIFAR-10 is an image folder or .npz file in the folder of data sets. `fedx` and `flesd` have
Fashion-MNIST: in the other setting FedX is below its host. SSD's orderings are in `measure_hard_separation.py`.

The heterogeneity of the clients, the local epochs, the losses and their weights are those of the papers. The encoder
and the numbers of images and rounds are not. Therefore only the orderings are checked, not the published accuracies.
"""

import argparse
import functools
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from fedssl.cli.datasets.fetching import data_folder, ensure
from fedssl.evaluation.suite import evaluate_encoder, load_encoder, load_labelled
from fedssl.experiments.ladders import read_ladder
from fedssl.experiments.overlays import overlay
from fedssl.experiments.reproduction import dataset_places
from fedssl.experiments.variants import build_spec, values_of
from fedssl.protocol.evaluation import EvaluationConfig
from fedssl.protocol.runs import RunSpec
from fedssl.simulation import Result, simulate

SEEDS = (0, 1, 2)
DATA = "fashion-mnist"
SMALL = {"num_rounds": 6, "model": {"encoder": {"widths": [16, 32, 64, 128]}}, "evaluation": {"every": 6}}
Scores = dict[str, float]

_STRONG = {"crop": "resized", "min_scale": 0.2, "jitter": 0.8, "brightness": 0.4, "contrast": 0.4, "greyscale": 0.0}
_WEAK = {"crop": "padded", "padding": 4, "jitter": 1.0, "brightness": 0.4, "contrast": 0.4, "greyscale": 0.0}


def _spec(
    seed: int, *, images: int, clients: int, alpha: float, augmentation: dict[str, Any], **sections: Any
) -> RunSpec:
    return RunSpec.model_validate(
        {
            "seed": seed,
            "data": {"channels": 1, "image_size": 28, "mean": [0.286], "std": [0.353], "augmentation": augmentation},
            "cohort": {"min_clients": clients},
            "partition": {
                "dataset": DATA, "num_clients": clients, "alpha": alpha, "max_images": images, "seed": seed,
            },
            "watch": {"num_images": 0},
            **sections,
        }
    )  # fmt: skip


def _model(out_dim: int, hidden: int) -> dict[str, Any]:
    encoder = {"name": "convnet", "widths": [16, 32, 64]}
    return {"encoder": encoder, "projector": {"hidden_dims": [hidden], "out_dim": out_dim}}


def _probe(tensors: Mapping[str, torch.Tensor], spec: RunSpec) -> float:
    labelled = load_labelled(DATA, spec.data, max_train=10_000, max_test=None, seed=0, root=data_folder())
    config = EvaluationConfig(dataset=DATA, measures=("probe",))
    return evaluate_encoder(load_encoder(tensors, spec), labelled, config, spec.data)["probe"]


def _simulate(spec: RunSpec) -> Result:
    torch.set_num_threads(1)
    ensure(DATA, lambda message: None)
    return simulate(spec, data_root=data_folder())


def fedx(seed: int) -> Scores:
    """Return the scores of FedX and its host, with FedX's weak augmentation and equal numbers of images per step."""
    scores = {}
    for name, batch_size in (("fedsimclr", 64), ("fedx", 32)):
        spec = _spec(
            seed,
            images=4000,
            clients=10,
            alpha=0.5,
            augmentation=_WEAK,
            num_rounds=20,
            method={"name": name},
            model=_model(out_dim=64, hidden=128),
            training={
                "local_epochs": 5,
                "batch_size": batch_size,
                "optimizer": {"learning_rate": 0.01, "weight_decay": 1e-5},
            },
        )
        scores[name] = _probe(_simulate(spec).model, spec)
    return scores


def ladder(seed: int, names: tuple[str, ...]) -> Scores:
    """Return the scores of variants of the ladder `best`, by linear probe. Each client has images of two classes."""
    best = read_ladder("best")
    place = dataset_places(["cifar10"], data_folder())["cifar10"]
    base = overlay(best.setting("cifar10-class"), SMALL)
    base = overlay(base, {"partition": {"dataset": place}, "evaluation": {"dataset": place, "measures": ["probe"]}})
    variants = {each.name: each for each in best.variants(base)}
    torch.set_num_threads(1)
    scores = {}
    for name in names:
        evaluations = simulate(build_spec(values_of(base, variants[name], seed))).evaluations_by_round
        scores[name] = evaluations[max(evaluations)]["probe"]
    return scores


def flesd(seed: int) -> Scores:
    """Return the scores of Min-Local, FLESD-cc (one round) and FLESD (two), all with 40 local epochs in total."""
    local = {"method": {"name": "flesd", "merge": {"name": "local"}, "reducer": {"name": "none"}}}
    distilled = {
        "method": {
            "name": "flesd",
            "reducer": {
                "name": "distillation", "num_epochs": 40, "batch_size": 64, "num_anchors": 256, "momentum": 0.99,
            },
        },
        "public_data": {"dataset": DATA, "num_images": 1000, "seed": 77 + seed},
    }  # fmt: skip
    scores: Scores = {}
    for name, rounds, sections in (("min-local", 1, local), ("flesd-cc", 1, distilled), ("flesd", 2, distilled)):
        spec = _spec(
            seed,
            images=4000,
            clients=4,
            alpha=0.1,
            augmentation=_STRONG,
            num_rounds=rounds,
            model=_model(out_dim=64, hidden=64),
            training={
                "local_epochs": 40 // rounds,
                "batch_size": 128,
                "drop_last": False,
                "optimizer": {"name": "adam", "learning_rate": 1e-3, "weight_decay": 1e-6},
            },
            **sections,
        )
        result = _simulate(spec)
        if name == "min-local":
            scores[name] = min(_probe(_own(state), spec) for state in result.client_states.values())
        else:
            scores[name] = _probe(result.model, spec)
    return scores


def _own(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a client's own weights, taken from its state."""
    key = next(name for name in sorted(state) if "encoder." in name)
    prefix = key.partition("encoder.")[0]
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}


_FEDERATION = ("local-only", "fedsimclr", "two-clients", "centralised")
_OBJECTIVE = ("fedbyol", "fedsimclr")

CLAIMS: dict[str, tuple[Callable[[int], Scores], tuple[str, ...]]] = {
    "federation": (functools.partial(ladder, names=_FEDERATION), _FEDERATION),
    "objective": (functools.partial(ladder, names=_OBJECTIVE), _OBJECTIVE),
    "fedx": (fedx, ("fedsimclr", "fedx")),
    "flesd": (flesd, ("min-local", "flesd-cc", "flesd")),
}
"""For each claim, the function that measures it, and the order that was found, lowest first."""


def measure(claim: str, seeds: tuple[int, ...]) -> Scores:
    """Print the scores of each seed as they come, and return their means."""
    run, _ = CLAIMS[claim]
    by_seed: list[Scores] = []
    for seed in seeds:
        by_seed.append(run(seed))
        _tell(f"{claim}, seed {seed}: " + ", ".join(f"{name} {value:.4f}" for name, value in by_seed[-1].items()))
    means = {name: statistics.fmean(scores[name] for scores in by_seed) for name in by_seed[0]}
    spread = {name: statistics.pstdev(scores[name] for scores in by_seed) for name in by_seed[0]}
    _tell(f"{claim}, mean: " + ", ".join(f"{name} {value:.4f} ({spread[name]:.4f})" for name, value in means.items()))
    return means


def _tell(line: str) -> None:
    print(line, flush=True)  # noqa: T201


@pytest.mark.parametrize("claim", CLAIMS)
def test_the_orderings_of_the_papers_hold(claim: str) -> None:
    means = measure(claim, SEEDS)
    found = [means[name] for name in CLAIMS[claim][1]]
    assert found == sorted(found)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("claims", nargs="*", help=f"which of {', '.join(CLAIMS)}; none: all")
    parser.add_argument("--seeds", type=lambda text: tuple(map(int, text.split(","))), default=SEEDS)
    arguments = parser.parse_args()
    for wanted in arguments.claims or CLAIMS:
        measure(wanted, arguments.seeds)
