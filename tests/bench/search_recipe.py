"""Search the settings of the method `best` on development images and seeds that no comparison uses.

    python tests/bench/search_recipe.py results.jsonl --data DIR [--candidates A,B] [--seeds 100,101] [--set KEY=VALUE]

DIR is a folder of data sets with CIFAR-10 (`cifar10/`, or `cifar10.npz`). 10,000 of its training images, drawn
once, become the development test split, and clients and probes get only the others: `cifar10-development.npz`. The test
images are not read. The setting is that of `fedssl compare --ladder best --on cifar10-class`.

Every finished run is a line of the results' file, and is not repeated: stop the search at any time, and continue it.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedssl.cli.specs import apply_change
from fedssl.data.datasets import load_dataset
from fedssl.experiments.ladders import read_ladder
from fedssl.experiments.overlays import overlay
from fedssl.experiments.reproduction import dataset_places
from fedssl.experiments.variants import Variant, baselines_of, build_spec, values_of
from fedssl.simulation import simulate

NUM_DEVELOPMENT = 10_000
SEED = 2026

_SIMCLR = Variant("fedsimclr", "fedsimclr")
CANDIDATES = {
    each.name: each
    for each in (
        _SIMCLR,
        *baselines_of(_SIMCLR),
        Variant("fedbyol", "fedbyol", changes={"target_momentum": 0.97}),
        Variant("fedema", "fedema", changes={"target_momentum": 0.97}),
        Variant("batch-64", "fedsimclr", changes={"training": {"batch_size": 64}}),
        Variant("batch-32", "fedsimclr", changes={"training": {"batch_size": 32}}),
        Variant("rate-0.2", "fedsimclr", changes={"training": {"optimizer": {"learning_rate": 0.2}}}),
        Variant("rate-0.05", "fedsimclr", changes={"training": {"optimizer": {"learning_rate": 0.05}}}),
        Variant("per-step", "fedsimclr", changes={"training": {"optimizer": {"schedule": "cosine_per_step"}}}),
        Variant("temperature-0.05", "fedsimclr", changes={"temperature": 0.05}),
        Variant("temperature-0.2", "fedsimclr", changes={"temperature": 0.2}),
        Variant("temperature-0.5", "fedsimclr", changes={"temperature": 0.5}),
        Variant("average", "fedsimclr", changes={"aggregation": {"encoder_average": {"decay": 0.7}}}),
        Variant(
            "fedavgm",
            "fedsimclr",
            changes={
                "aggregation": {"server_optimizer": {"name": "fedavgm", "learning_rate": 1.0, "beta_1": 0.5}},
            },
        ),
        Variant(
            "fedavgm-0.9",
            "fedsimclr",
            changes={
                "aggregation": {"server_optimizer": {"name": "fedavgm", "learning_rate": 1.0, "beta_1": 0.9}},
            },
        ),
        Variant(
            "server-rate-2",
            "fedsimclr",
            changes={
                "aggregation": {"server_optimizer": {"name": "fedavgm", "learning_rate": 2.0, "beta_1": 0.0}},
            },
        ),
        Variant("recalibrate", "fedsimclr", changes={"model": {"batch_norm": "recalibrate"}}),
        Variant("local-norm", "fedsimclr", changes={"model": {"batch_norm": "local"}}),
        Variant(
            "multi-crop", "fedsimclr", changes={"data": {"local_crops": {"num_crops": 4, "image_size": 16}}}
        ),
        # As many epochs in twice as many rounds, and so twice the traffic; for --set num_rounds=6.
        Variant("epochs-1", "fedsimclr", changes={"num_rounds": 12, "training": {"local_epochs": 1}}),
        Variant("views", "fedsimclr", changes={"data": {"augmentation": {"min_scale": 0.08}}}),
        Variant("projector-wide", "fedsimclr", changes={"model": {"projector": {"hidden_dims": [1024], "out_dim": 256}}}),
        Variant("no-decay", "fedsimclr", changes={"training": {"optimizer": {"weight_decay": 0.0}}}),
        Variant("fur", "fedsimclr", ("fur",)),
        Variant("dsr", "fedsimclr", ("dsr",)),
        Variant("fedx", "fedsimclr", ("fedx",)),
        Variant("proximal", "fedsimclr", ("proximal",)),
        Variant("scaffold", "fedsimclr", ("scaffold",)),
        Variant("decorrelation", "fedsimclr", ("decorrelation",)),
        Variant("align-uniform", "fedalignuniform"),
        Variant("vicreg", "fedvicreg"),
        Variant("barlow", "fedbarlow"),
        Variant("moco", "fedmoco"),
        Variant("byol-kl", "fedema", ("crossed_kl",), changes={"target_momentum": 0.97}),
    )
}  # fmt: skip


def development_set(root: Path) -> Path:
    """Return the file of the development images; write it if it is missing."""
    path = root / "cifar10-development.npz"
    if not path.exists():
        images = load_dataset(dataset_places(["cifar10"], root)["cifar10"], "train", root)
        order = np.random.default_rng(SEED).permutation(len(images))
        arrays: dict[str, Any] = {}
        for prefix, part in (("", order[NUM_DEVELOPMENT:]), ("test_", order[:NUM_DEVELOPMENT])):
            assert images.labels is not None, "the images have labels"
            arrays |= {f"{prefix}images": images.images[part], f"{prefix}labels": images.labels[part]}
        np.savez(path, **arrays)
    return path


def measure(candidate: Variant, seed: int, base: dict[str, Any]) -> dict[str, Any]:
    """Train one candidate, and return its measures."""
    started = time.process_time()
    result = simulate(build_spec(values_of(base, candidate, seed)))
    evaluations = result.evaluations_by_round
    return {
        "candidate": candidate.name,
        "seed": seed,
        "untrained": evaluations[0],
        "trained": evaluations[max(evaluations)],
        "cpu_seconds": round(time.process_time() - started, 1),
    }


def main() -> None:
    """Run what is not finished."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--candidates", default=",".join(CANDIDATES))
    parser.add_argument("--seeds", default="100,101")
    parser.add_argument("--set", action="append", default=[], dest="changes")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    base = read_ladder("best").setting("cifar10-class")
    place = str(development_set(arguments.data))
    base = overlay(base, {"partition": {"dataset": place}, "evaluation": {"dataset": place}})
    for change in arguments.changes:
        apply_change(base, change)
    lines = arguments.results.read_text().splitlines() if arguments.results.exists() else []
    done = [(each["candidate"], each["seed"], each["changes"]) for each in map(json.loads, lines)]
    for seed in map(int, arguments.seeds.split(",")):
        for name in arguments.candidates.split(","):
            if (name, seed, arguments.changes) not in done:
                line = {**measure(CANDIDATES[name], seed, base), "changes": arguments.changes}
                with arguments.results.open("a") as file:
                    file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
