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
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedssl.cli.compare.arguments import read_variant
from fedssl.cli.specs import apply_change
from fedssl.data.datasets import load_dataset
from fedssl.experiments.ladders import read_ladder
from fedssl.experiments.overlays import overlay
from fedssl.experiments.reproduction import dataset_places
from fedssl.experiments.variants import Variant, baselines_of, build_spec, values_of
from fedssl.simulation import simulate

NUM_DEVELOPMENT = 10_000
SEED = 2026

STEPS = "training.optimizer.schedule=cosine_per_step"
NO_DECAY = "training.optimizer.weight_decay=0.0"
# As many epochs in twice as many rounds, and so twice the traffic; for --set num_rounds=6.
EPOCH = "num_rounds=12,evaluation.every=12,training.local_epochs=1"
CROPS = "data.local_crops={num_crops=4,image_size=16}"
SERVER = 'aggregation.server_optimizer={name="fedavgm",learning_rate=%s,beta_1=%s}'
ADAM = 'training.optimizer={name="adam",learning_rate=0.001,weight_decay=0.0,schedule="cosine_per_step"}'
SIMCLR = read_variant("fedsimclr=fedsimclr")
VARIANTS = [
    SIMCLR,
    *baselines_of(SIMCLR),
    *map(
        read_variant,
        (
            "fedbyol=fedbyol:target_momentum=0.97",
            "fedema=fedema:target_momentum=0.97",
            "byol-kl=fedema+crossed_kl:target_momentum=0.97",
            "moco=fedmoco:temperature=0.1,key_momentum=0.9",
            "align-uniform=fedalignuniform",
            "vicreg=fedvicreg",
            f"barlow=fedbarlow:training.optimizer.learning_rate=0.01,{STEPS},{EPOCH}",
            "batch-256=fedsimclr:training.batch_size=256,training.optimizer.learning_rate=0.2",
            "batch-64=fedsimclr:training.batch_size=64",
            "batch-32=fedsimclr:training.batch_size=32",
            "rate-0.2=fedsimclr:training.optimizer.learning_rate=0.2",
            "rate-0.05=fedsimclr:training.optimizer.learning_rate=0.05",
            f"per-step=fedsimclr:{STEPS}",
            f"no-decay=fedsimclr:{NO_DECAY}",
            "temperature-0.05=fedsimclr:temperature=0.05",
            "temperature-0.2=fedsimclr:temperature=0.2",
            "temperature-0.5=fedsimclr:temperature=0.5",
            "average=fedsimclr:aggregation.encoder_average.decay=0.7",
            "fedavgm=fedsimclr:" + SERVER % ("1.0", "0.5"),
            "fedavgm-0.9=fedsimclr:" + SERVER % ("1.0", "0.9"),
            "server-rate-2=fedsimclr:" + SERVER % ("2.0", "0.0"),
            "recalibrate=fedsimclr:model.batch_norm=recalibrate",
            "group-norm=fedsimclr:model.encoder.norm=group",
            f"multi-crop=fedsimclr:{CROPS}",
            f"epochs-1=fedsimclr:{EPOCH}",
            "views=fedsimclr:data.augmentation.min_scale=0.08",
            "projector-wide=fedsimclr:model.projector.hidden_dims=[1024]",
            *(f"{name}=fedsimclr+{name}" for name in ("fur", "dsr", "fedx", "proximal", "scaffold", "decorrelation")),
            f"steps-epochs=fedsimclr:{STEPS},{EPOCH}",
            f"no-decay-steps-epochs=fedsimclr:{NO_DECAY},{STEPS},{EPOCH}",
            f"all-crops=fedsimclr:{NO_DECAY},{STEPS},{EPOCH},{CROPS}",
            f"adam=fedsimclr:{ADAM},{EPOCH}",
            f"dsr-steps-epochs=fedsimclr+dsr:{STEPS},{EPOCH}",
            f"fur-steps-epochs=fedsimclr+fur:{STEPS},{EPOCH}",
            # As many epochs of all clients together, with the traffic of epochs-1.
            *(
                f"{name}=fedsimclr:{STEPS},{EPOCH},num_rounds={rounds},evaluation.every={rounds},cohort.fraction={share}"
                for name, rounds, share in (
                    ("three-clients", 20, 0.6),
                    ("two-clients", 30, 0.4),
                    ("one-client", 60, 0.2),
                )
            ),
            # Not candidates, but reasons for the gap.
            "iid=fedsimclr:partition.scheme=iid",
        ),
    ),
    *(
        replace(read_variant(text), pooled=True)
        for text in (
            "centralised-2-epochs=fedsimclr:num_rounds=2,evaluation.every=2,training.local_epochs=1",
            "centralised-batch-640=fedsimclr:training.batch_size=640",
        )
    ),
]
CANDIDATES = {each.name: each for each in VARIANTS}


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
