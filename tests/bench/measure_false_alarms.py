"""Count the alarms about updates (`engine/unusual_updates.py`) in simulated federations whose clients are all
honest.

Each federation has its own method, split of the digits, learning rate and seed. Every alarm is a false one. Run it
with `python tests/bench/measure_false_alarms.py --seeds 2`; progress goes to stderr, the table to stdout.
"""

import argparse
import itertools
import sys
from collections import Counter
from typing import Any

import torch

from fedssl.errors import FedSSLError
from fedssl.methods import METHODS
from fedssl.simulation import simulate

SPLITS: dict[str, dict[str, Any]] = {
    "iid, 4": {"num_clients": 4, "scheme": "iid"},
    "iid, 16": {"num_clients": 16, "scheme": "iid"},
    "classes, 5": {"num_clients": 5, "scheme": "classes"},
    "dirichlet 0.05, 8": {"num_clients": 8, "scheme": "dirichlet", "alpha": 0.05},
    "dirichlet 1, 6": {"num_clients": 6, "scheme": "dirichlet", "alpha": 1.0},
}
LEARNING_RATES = (0.01, 0.1, 0.5)
WITHOUT_WEIGHTS = ("flesd", "single")


def spec_of(method: str, split: str, learning_rate: float, seed: int, rounds: int) -> dict[str, Any]:
    """Return the spec of one federation, as a spec file has it."""
    return {
        "seed": seed,
        "num_rounds": rounds,
        "method": {"name": method},
        "model": {
            "encoder": {"name": "convnet", "widths": [8, 16]},
            "projector": {"hidden_dims": [32], "out_dim": 16},
        },
        "data": {"channels": 1, "image_size": 8, "augmentation": {"greyscale": 0.0}},
        "training": {"local_epochs": 1, "batch_size": 16, "optimizer": {"learning_rate": learning_rate}},
        "partition": {"dataset": "digits", "max_images": 480, "seed": seed, **SPLITS[split]},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2, help="number of seeds per method, split and learning rate")
    parser.add_argument("--first-seed", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--methods", nargs="+", default=[name for name in METHODS if name not in WITHOUT_WEIGHTS])
    given = parser.parse_args()
    torch.set_num_threads(1)
    updates: Counter[str] = Counter()
    alarms: Counter[str] = Counter()
    seeds = range(given.first_seed, given.first_seed + given.seeds)
    for method, split, rate, seed in itertools.product(given.methods, SPLITS, LEARNING_RATES, seeds):
        where = f"{method}, {split}, learning rate {rate}, seed {seed}"
        try:
            result = simulate(spec_of(method, split, rate, seed, given.rounds))
        except FedSSLError as error:  # a learning rate at which a method diverges, or a spec that it refuses
            print(f"{where}: {error}", file=sys.stderr, flush=True)  # noqa: T201
            continue
        for record in result.history:
            updates[split] += len(record.updates)
            alarms[split] += len(record.unusual)
            for alarm in record.unusual:
                print(f"{where}, round {record.round_number}: {alarm}", file=sys.stderr, flush=True)  # noqa: T201
    for split in SPLITS:
        print(f"{split:20} {alarms[split]:4} of {updates[split]:6} updates")  # noqa: T201
    print(f"{'all':20} {alarms.total():4} of {updates.total():6} updates")  # noqa: T201


if __name__ == "__main__":
    main()
