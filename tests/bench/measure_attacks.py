"""Measure what reducers lose to dishonest clients, and what they cost without any.

A run whose weights are not finite any more counts as NaN.

Ten clients train FedSimCLR on the digits; the last clients' updates are replaced by an attack. The table has the linear
probe in percent, mean and range over the seeds; `untrained` is the same encoder before the first round.
Run it with `python tests/bench/measure_attacks.py --seeds 3`; progress goes to stderr, the table to stdout.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fedssl.data import ImageData
from fedssl.data.partitioning import partition_dataset
from fedssl.engine import run_aggregation, run_local_round, start_run
from fedssl.engine.aggregation import ServerResult
from fedssl.errors import MethodError
from fedssl.evaluation.suite import evaluate_encoder, load_encoder, load_labelled
from fedssl.methods import METHODS
from fedssl.methods.api import ClientData, Context, Update
from fedssl.protocol.runs import RunSpec

NUM_CLIENTS = 10
Tensors = Mapping[str, Tensor]
Attack = Callable[[Tensor, Tensor], Tensor]
Replace = Callable[[dict[str, Tensor], Tensors, ImageData, int], dict[str, Tensor]]
REDUCERS: dict[str, dict[str, Any]] = {
    "mean": {"name": "mean"},
    "median": {"name": "median"},
    "trimmed_mean": {"name": "trimmed_mean", "num_trimmed": 2},
    "multi_krum": {"name": "multi_krum", "num_byzantine": 2},
    "geometric_median": {"name": "geometric_median"},
}
ATTACKS: dict[str, tuple[int, Attack]] = {
    "nobody": (0, lambda update, broadcast: update),
    "2 turn the step round, three times as long": (2, lambda update, broadcast: broadcast - 3 * (update - broadcast)),
    "2 scale the step by 100": (2, lambda update, broadcast: broadcast + 100 * (update - broadcast)),
    "2 send zeros": (2, lambda update, broadcast: torch.zeros_like(update)),
}
SPLITS: dict[str, dict[str, Any]] = {
    "iid": {"scheme": "iid"},
    "Dirichlet 0.1": {"scheme": "dirichlet", "alpha": 0.1},
}


def spec_of(reducer: str, split: str, seed: int, rounds: int) -> RunSpec:
    """Return the spec of one federation."""
    return RunSpec.model_validate(
        {
            "seed": seed,
            "num_rounds": rounds,
            "method": {"name": "fedsimclr", "reducer": REDUCERS[reducer]},
            "model": {"encoder": {"widths": [16, 32]}, "projector": {"hidden_dims": [32], "out_dim": 16}},
            "data": {"channels": 1, "image_size": 8, "augmentation": {"flip": 0.0}},
            "training": {"local_epochs": 2, "batch_size": 16, "optimizer": {"learning_rate": 0.05}},
            "cohort": {"min_clients": NUM_CLIENTS, "min_updates": NUM_CLIENTS},
            "partition": {"dataset": "digits", "num_clients": NUM_CLIENTS, "seed": seed, **SPLITS[split]},
            "evaluation": {"dataset": "digits", "measures": ["probe"]},
        }
    )


def attacked(update: Tensors, broadcast: Tensors, attack: Attack) -> dict[str, Tensor]:
    """Return an update whose floating-point tensors are replaced."""
    return {
        name: attack(tensor, broadcast[name]) if tensor.is_floating_point() else tensor
        for name, tensor in update.items()
    }


def probe(spec: RunSpec, model: Tensors) -> float:
    """Return the linear probe's accuracy in percent."""
    assert spec.evaluation is not None
    labelled = load_labelled(spec.evaluation.dataset, spec.data, max_train=None, max_test=None, seed=spec.seed)
    return 100 * evaluate_encoder(load_encoder(model, spec), labelled, spec.evaluation, spec.data)["probe"]


def federated(spec: RunSpec, num_dishonest: int, replace: Replace) -> ServerResult | None:
    """Return the result of the last round, or None if the run could not be continued.

    `replace`: returns what a dishonest client sends, from its honest update, the broadcast, its images and the round.
    """
    assert spec.partition is not None
    method, shards = METHODS[spec.method.name], partition_dataset(spec.partition, spec.data).by_client
    server = start_run(method, Context(spec=spec, round_number=0))
    names = sorted(shards)
    states: dict[str, Any] = dict.fromkeys(names)
    for number in range(1, spec.num_rounds + 1):
        updates = []
        for index, name in enumerate(names):
            data = ClientData(torch.from_numpy(shards[name].images))
            ctx = Context(spec=spec, round_number=number, client_id=name)
            found = run_local_round(method, server.broadcast, states[name], data, ctx)
            states[name], sent = found.state, found.update
            if index >= NUM_CLIENTS - num_dishonest:
                sent = replace(sent, server.broadcast, shards[name], number)
            updates.append(Update(name, len(data), lambda sent=sent: sent))  # type: ignore[misc]
        try:
            server = run_aggregation(method, server.state, updates, Context(spec=spec, round_number=number))
        except MethodError as error:
            print(error, file=sys.stderr)  # noqa: T201
            return None
    return server


def train(spec: RunSpec, num_dishonest: int, attack: Attack) -> tuple[float, float]:
    """Return the probe before the first round and after the last, or NaN if the run could not be continued."""
    before = probe(spec, start_run(METHODS[spec.method.name], Context(spec=spec, round_number=0)).broadcast)
    last = federated(spec, num_dishonest, lambda sent, broadcast, images, number: attacked(sent, broadcast, attack))
    try:
        return before, float("nan") if last is None else probe(spec, last.broadcast)
    except MethodError:
        return before, float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=8)
    given = parser.parse_args()
    torch.set_num_threads(1)
    for split in SPLITS:
        untrained: list[float] = []
        for attack, (num_dishonest, change) in ATTACKS.items():
            cells = []
            for reducer in REDUCERS:
                found = [
                    train(spec_of(reducer, split, seed, given.rounds), num_dishonest, change)
                    for seed in range(given.seeds)
                ]
                untrained += [before for before, _ in found]
                after = [value for _, value in found]
                half = (max(after) - min(after)) / 2
                cells.append(f"{reducer} {statistics.mean(after):.1f} ± {half:.1f}")
                print(split, attack, cells[-1], file=sys.stderr, flush=True)  # noqa: T201
            print(f"{split:14} | {attack:44} | " + " | ".join(cells))  # noqa: T201
        print(f"{split:14} | untrained {statistics.mean(untrained):.1f}")  # noqa: T201


if __name__ == "__main__":
    main()
