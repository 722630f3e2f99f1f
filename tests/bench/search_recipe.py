"""Search the settings of the method `best` on development images and seeds that no comparison uses.

    python tests/bench/search_recipe.py results.jsonl --data DIR [--candidates A,B] [--seeds 100,101] [--set KEY=VALUE]
        [--device cuda] [--jobs 12]

DIR is a folder of data sets with CIFAR-10 (`cifar10/`, or `cifar10.npz`). 10,000 of its training images, drawn
once, become the development test split, and clients and probes get only the others: `cifar10-development.npz`. The test
images are not read. The setting is that of `fedssl compare --ladder best --on cifar10-class`.

Every finished run is a line of the results' file, and is not repeated: stop the search at any time, and continue it.
Runs keep their checkpoints in a folder next to that file, by seed and changes, so that an interrupted one continues.
"""

import argparse
import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedssl.cli.compare.arguments import read_variant
from fedssl.cli.specs import apply_change
from fedssl.data.datasets import load_dataset
from fedssl.experiments.jobs import run_in_processes
from fedssl.experiments.ladders import Rung, read_ladder
from fedssl.experiments.overlays import overlay
from fedssl.experiments.reproduction import dataset_places
from fedssl.experiments.runs import ComputeSettings, find_finished
from fedssl.experiments.variants import Variant, baselines_of, build_spec, values_of

NUM_DEVELOPMENT = 10_000
SEED = 2026

STEPS = "training.optimizer.schedule=cosine_per_step"
NO_DECAY = "training.optimizer.weight_decay=0.0"
# The same number of epochs in twice as many rounds, so twice the traffic; for --set num_rounds=6.
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
            # Not candidates, but explanations of the gap.
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
ON_RECIPE = [
    read_variant(f"{name}=fedsimclr:{changes}")
    for name, changes in (
        ("two-clients", ""),
        ("two-clients-per-step", STEPS),
        ("two-clients-rate-0.2", "training.optimizer.learning_rate=0.2"),
        ("two-clients-rate-0.05", "training.optimizer.learning_rate=0.05"),
        ("two-clients-no-decay", NO_DECAY),
        ("two-clients-batch-64", "training.batch_size=64"),
        ("two-clients-crops", CROPS),
        ("two-clients-average", "aggregation.encoder_average.decay=0.8"),
        ("two-clients-fedavgm-0.9", SERVER % ("1.0", "0.9")),
        ("two-clients-recalibrate", "model.batch_norm=recalibrate"),
    )
] + [
    read_variant(text)
    for text in (
        "two-clients-align-uniform=fedalignuniform",
        "two-clients-ssd=ssd",
        "two-clients-byol-kl=fedema+crossed_kl:target_momentum=0.97",
    )
]
"""Changes of the ladder's rung `two-clients`, which get its number of rounds in any setting."""
WITH_ONE_CLIENT = [
    read_variant("one-client=fedsimclr"),
    read_variant("one-client-average=fedsimclr:aggregation.encoder_average.decay=0.8"),
]
"""The same with one client per round."""
SHORT = {
    "thirds": (2, 3, "0.0", ""),
    "thirds-0.4": (2, 3, "0.4", ""),
    "thirds-0.6": (2, 3, "0.6", ""),
    "thirds-0.8": (2, 3, "0.8", ""),
    "fifths-0.75": (2, 5, "0.75", ""),
    "one-client-thirds-0.6": (1, 3, "0.6", ""),
    "one-client-thirds-0.6-average": (1, 3, "0.6", "aggregation.encoder_average.decay=0.98"),
    "five-clients-quarters-0.8": (5, 4, "0.8", ""),
    "thirds-0.6-temperature-0.15": (2, 3, "0.6", "temperature=0.15"),
    "thirds-0.6-temperature-0.2": (2, 3, "0.6", "temperature=0.2"),
    "thirds-0.6-crops": (2, 3, "0.6", CROPS),
    # Not a candidate, but an explanation of the rest of the gap.
    "thirds-0.6-iid": (2, 3, "0.6", "partition.scheme=iid"),
}
"""Rounds shorter than an epoch: clients per round, rounds per epoch, the momentum across rounds, and other changes."""


def candidates(base: Mapping[str, Any]) -> dict[str, Variant]:
    """Return all candidates in the setting `base` by name. Raises SpecError if a rung cannot have its rounds."""

    def work(clients: int, rounds: int = 1) -> dict[str, Any]:
        rung = Rung(name="", method="fedsimclr", one_epoch=True, clients_per_round=clients, rounds_per_epoch=rounds)
        return rung.same_work(base)

    two = [replace(each, changes=overlay(work(2), each.changes)) for each in ON_RECIPE]
    one = [replace(each, changes=overlay(work(1), each.changes)) for each in WITH_ONE_CLIENT]
    short = [
        replace(each, changes=overlay(work(clients, rounds), each.changes))
        for name, (clients, rounds, momentum, changes) in SHORT.items()
        for each in [read_variant(f"{name}=fedsimclr:" + ",".join(filter(None, (SERVER % ("1.0", momentum), changes))))]
    ]
    return {each.name: each for each in (*VARIANTS, *two, *one, *short)}


def development_set(root: Path) -> Path:
    """Return the file of the development images, after writing it if it is missing."""
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


def main() -> None:
    """Run every candidate that is not finished."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--candidates", help="none: all of them")
    parser.add_argument("--seeds", default="100,101")
    parser.add_argument("--set", action="append", default=[], dest="changes")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time, each in a process of its own")
    arguments = parser.parse_args()
    base = read_ladder("best").setting("cifar10-class")
    place = str(development_set(arguments.data))
    base = overlay(base, {"partition": {"dataset": place}, "evaluation": {"dataset": place}})
    for change in arguments.changes:
        apply_change(base, change)
    known = candidates(base)
    lines = arguments.results.read_text().splitlines() if arguments.results.exists() else []
    done = [(each["candidate"], each["seed"], each["changes"]) for each in map(json.loads, lines)]
    folder = arguments.results.with_suffix(".runs") / hashlib.sha256(repr(arguments.changes).encode()).hexdigest()[:8]
    tasks = {
        (name, seed): (build_spec(values_of(base, known[name], seed)), folder / f"{name}-seed{seed}")
        for seed in map(int, arguments.seeds.split(","))
        for name in (arguments.candidates.split(",") if arguments.candidates else known)
        if (name, seed, arguments.changes) not in done
    }
    machine = ComputeSettings(device=arguments.device)
    for key, reason in run_in_processes([(key, *task) for key, task in tasks.items()], machine, arguments.jobs):
        if reason is not None:
            print(f"{key}: {reason}", flush=True)  # noqa: T201
            continue
        run = find_finished(*tasks[key])
        assert run is not None, "the process ended with a result"
        line = {
            "candidate": key[0],
            "seed": key[1],
            "untrained": run.untrained,
            "trained": run.last,
            "seconds": round(run.seconds, 1),
            "changes": arguments.changes,
        }
        with arguments.results.open("a") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
