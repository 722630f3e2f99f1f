"""The cost of a simulation beyond its training, and the gain from a second process, as ratios within one run.

    python tests/bench/bench_simulation.py              the table
    make bench ARGS="-k simulation -s"                  the same, asserted

A round of many small clients: `simulate` in one process and in two takes turns with a bare loop, which loads the
weights, trains the same model by the same loss on tensors made beforehand, and takes the mean. Each process uses one
CPU thread. The first round of each turn is left out: it prepares what later ones use. The start is reported separately.
"""

import os
import statistics
import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from fedssl.cores import num_usable_cores
from fedssl.data import ImageData
from fedssl.losses import nt_xent
from fedssl.methods import METHODS
from fedssl.methods.api import Context
from fedssl.protocol.runs import RunSpec
from fedssl.simulation import simulate

NUM_CLIENTS, IMAGES, BATCH, ROUNDS, TURNS = 16, 128, 32, 4, 5
LEAST_OF_BARE_LOOP, LEAST_GAIN = 0.75, 1.2
"""The least ratio of clients per second: one process to the bare loop, and two to one if there are two cores."""

SPEC = RunSpec.model_validate(
    {
        "num_rounds": ROUNDS,
        "method": {"name": "fedsimclr"},
        "model": {"projector": {"hidden_dims": [256], "out_dim": 128}},
        "data": {"channels": 1, "image_size": 28},
        "training": {"batch_size": BATCH, "local_epochs": 1},
        "watch": {"num_images": 0},
    }
)


def clients() -> dict[str, ImageData]:
    """Return the clients, which have images of noise."""
    rng = np.random.default_rng(0)
    shape = (IMAGES, 1, 28, 28)
    return {f"client-{n:02}": ImageData(rng.integers(0, 256, shape, np.uint8)) for n in range(NUM_CLIENTS)}


def bare_round_seconds() -> list[float]:
    """Return the seconds of each round of the bare loop, without the first."""
    modules = METHODS["fedsimclr"].bind(SPEC).client.build(Context(spec=SPEC, round_number=0))
    network = nn.Sequential(modules["encoder"], modules["projector"]).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    config, found = SPEC.training.optimizer, []
    batches = [torch.rand(2 * BATCH, 1, 28, 28).to(memory_format=torch.channels_last) for _ in range(IMAGES // BATCH)]
    model = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    for _ in range(ROUNDS):
        started = time.perf_counter()
        sums = {name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in model.items()}
        for _ in range(NUM_CLIENTS):
            network.load_state_dict(model)
            optimizer = torch.optim.SGD(
                network.parameters(), config.learning_rate, config.momentum, weight_decay=config.weight_decay
            )
            for batch in batches:
                z1, z2 = network(batch).chunk(2)
                optimizer.zero_grad()
                nt_xent(z1, z2, 0.5).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            for name, tensor in network.state_dict().items():
                sums[name] += tensor
        model = {name: (tensor / NUM_CLIENTS).to(model[name].dtype) for name, tensor in sums.items()}
        found.append(time.perf_counter() - started)
    return found[1:]


@dataclass(frozen=True)
class Turn:
    """Clients per second of the bare loop, one process and two, and the seconds that two processes need to start."""

    bare: float
    one: float
    two: float
    start: float


def rate(seconds: list[float]) -> float:
    """Return the clients per second of the median round."""
    return NUM_CLIENTS / statistics.median(seconds)


def take_turn() -> Turn:
    """Run all three, one after the other."""
    bare = rate(bare_round_seconds())
    one = simulate(SPEC, clients())
    started = time.perf_counter()
    two = simulate(SPEC, clients(), jobs=2)
    all_seconds = time.perf_counter() - started
    rounds = [[record.seconds for record in result.history] for result in (one, two)]
    # Training waits in the first round until the processes have been started.
    start = all_seconds - sum(rounds[1]) + max(0.0, rounds[1][0] - statistics.median(rounds[1][1:]))
    return Turn(bare, rate(rounds[0][1:]), rate(rounds[1][1:]), start)


def measure() -> tuple[float, float, str]:
    """Return the median ratios of one process to the bare loop and of two to one, and the table for people."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        turns = [take_turn() for _ in range(TURNS)]
    finally:
        torch.set_num_threads(before)
    overhead = statistics.median(turn.one / turn.bare for turn in turns)
    gain = statistics.median(turn.two / turn.one for turn in turns)
    lines = [
        f"{NUM_CLIENTS} clients x {IMAGES} images, {TURNS} turns, load {os.getloadavg()[0]:.1f} "
        f"on {num_usable_cores()} cores",
        f"{'clients/s':<20}{'bare loop':>12}{'simulate':>12}{'--jobs 2':>12}{'start, s':>12}",
        *(f"{'':<20}{turn.bare:>12.2f}{turn.one:>12.2f}{turn.two:>12.2f}{turn.start:>12.1f}" for turn in turns),
        f"median ratios: simulate / bare loop {overhead:.3f}, --jobs 2 / simulate {gain:.3f}",
    ]
    return overhead, gain, "\n".join(lines)


def test_a_simulation_keeps_up_with_the_bare_loop_and_two_processes_are_faster() -> None:
    overhead, gain, table = measure()
    print(f"\n{table}")  # noqa: T201
    assert overhead >= LEAST_OF_BARE_LOOP
    if num_usable_cores() > 1:
        assert gain >= LEAST_GAIN


if __name__ == "__main__":
    print(measure()[2])  # noqa: T201
