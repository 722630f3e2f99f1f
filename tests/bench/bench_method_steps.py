"""The cost of one training step of each method, relative to that of its bare objective, within one run.

    python tests/bench/bench_method_steps.py            the table
    make bench ARGS="-k method_steps -s"                the same, asserted

The counts are images that pass an encoder with and without gradients, for each image of the batch, and multiply-adds of
the forward and the backward pass. They must be those that the method's equations need. The times are those of the whole
step, including the optimiser's, in turns with the objective's. They are only for information, because other work on the
machine affects them.
"""

import dataclasses
import statistics
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from fedssl.dimensions import client_dimensions
from fedssl.engine import start_run
from fedssl.engine.optimization import optimizer_for, take_step, total_loss
from fedssl.methods import METHODS
from fedssl.methods.api import Batch, ClientData, Context
from fedssl.methods.composition.client import ClientAlgorithm
from fedssl.methods.merges.overwrite import OVERWRITE
from fedssl.models.encoders import Encoder
from fedssl.protocol.runs import RunSpec
from support.methods import CONFIGS, PUBLIC

NEEDED = {
    "fedalignuniform": (2, 0),
    "fedbarlow": (2, 0),
    "fedbyol": (2, 2),
    "fedca": (3, 1),  # the client's network and the base model each embed the public images
    "feddecorr": (2, 0),
    "feddino": (2, 2),
    "fedema": (2, 2),
    "fedmae": (1, 0),  # of the visible patches only
    "fedmoco": (2, 2),
    "fedprox": (2, 0),
    "fedprotocl": (2, 2),
    "fedrlc": (2, 2),
    "fedsimclr": (2, 0),
    "fedsimsiam": (2, 0),
    "fedu": (2, 2),
    "fedu2": (2, 0),
    "fedvicreg": (2, 0),
    "fedx": (3, 2),  # the references; the teacher embeds second views and references
    "flesd": (2, 0),
    "ldawa": (2, 0),
    "orchestra": (3, 1),  # both views and the rotated one, the first only for its statistics; the target the first
    "scaffold": (2, 0),
    "single": (2, 2),
    "ssd": (2, 0),
    "supervised": (1, 0),
}
"""Passes of an image's views and streams through an encoder, with and without gradients."""

SLACK = 1.1
"""The largest ratio of all multiply-adds, those of heads and losses included, to the encoder's."""

BATCH, TURNS = 64, 7


@dataclass(frozen=True)
class Cost:
    """The cost of one step. `passes`: with and without gradients, per image of the batch."""

    passes: tuple[float, float]
    multiply_adds: float

    @property
    def units(self) -> float:
        """The number of forward passes, counting a backward pass as two."""
        return 3 * self.passes[0] + self.passes[1]


class Stepper:
    """A client in the middle of a round that takes the same step repeatedly."""

    def __init__(self, algorithm: ClientAlgorithm, spec: RunSpec, images: torch.Tensor) -> None:
        self._algorithm = algorithm
        data = ClientData(images, torch.arange(len(images)) % 10)
        dimensions = client_dimensions(spec, ["client-0"]).get("client-0")
        public = ClientData(images.flip(0)) if spec.public_data is not None else None
        self._ctx = Context(spec=spec, round_number=2, client_id="client-0", dimensions=dimensions, public=public)
        self._broadcast = start_run(METHODS[spec.method.name], dataclasses.replace(self._ctx, round_number=0)).received
        self.modules = algorithm.build(self._ctx)
        self.modules.to(memory_format=torch.channels_last).train()  # type: ignore[call-overload]
        algorithm.merge(self.modules, self._broadcast, None, data, self._ctx)
        algorithm.begin_epoch(self.modules, data, 0, self._ctx)
        self._batch: Batch = next(iter(algorithm.batches(data, 0, self._ctx)))
        self._optimizer = optimizer_for(self.modules, spec.training.optimizer, 1e-6)

    def step(self) -> None:
        """Take one step, as the engine does."""
        self._algorithm.before_step(self.modules, self._ctx)
        losses, _ = self._algorithm.objective(self.modules, self._batch, self._ctx)
        take_step(self._optimizer, total_loss(losses))
        self._algorithm.after_step(self.modules, self._ctx)

    def seconds(self) -> float:
        """Take one step, and return how long it took."""
        started = time.perf_counter()
        self.step()
        return time.perf_counter() - started

    def cost(self) -> Cost:
        """Take one step, and return its cost."""
        images = [0, 0]

        def count(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
            images[0 if output.requires_grad else 1] += len(output)

        encoders = [module for module in self.modules.modules() if isinstance(module, Encoder)]
        handles = [encoder.register_forward_hook(count) for encoder in encoders]
        with FlopCounterMode(display=False) as counter:
            self.step()
        for handle in handles:
            handle.remove()
        size = len(self._batch.indices)
        return Cost((images[0] / size, images[1] / size), counter.get_total_flops() / 2)


def spec_of(name: str) -> RunSpec:
    """Return a spec whose model is large enough that the encoder decides the cost, but small enough for two cores."""
    head = {"hidden_dims": [64], "out_dim": 64}
    encoder = {"name": "vit-tiny", "patch_size": 8} if name == "fedmae" else {"widths": [32, 64, 64]}
    return RunSpec.model_validate(
        {
            "method": {"name": name, **CONFIGS.get(name, {})},
            "model": {"encoder": encoder, "projector": head, "predictor": head},
            "training": {"batch_size": BATCH},
            "public_data": {**PUBLIC, "num_images": 256},
            "num_rounds": 100,
        }
    )


def alone(algorithm: ClientAlgorithm) -> ClientAlgorithm:
    """Return the algorithm without its add-ons and its merge rule."""
    return dataclasses.replace(algorithm, add_ons=(), merge_rule=OVERWRITE)


@dataclass(frozen=True)
class Line:
    """One method's row of the table."""

    name: str
    cost: Cost
    host: Cost
    time_ratio: float

    @property
    def ratio(self) -> float:
        """The multiply-adds relative to those of the objective."""
        return self.cost.multiply_adds / self.host.multiply_adds


def measure(name: str) -> Line:
    """Measure a method and its objective in turns."""
    spec = spec_of(name)
    images = torch.randint(0, 256, (256, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    algorithm = METHODS[name].bind(spec).client
    method, host = Stepper(algorithm, spec, images), Stepper(alone(algorithm), spec, images)
    costs = method.cost(), host.cost()
    ratios = [method.seconds() / host.seconds() for _ in range(TURNS)]
    return Line(name, *costs, statistics.median(ratios))


def table(lines: Iterable[Line]) -> str:
    """Return the table as text."""
    rows = [f"{'method':<16}{'passes':>10}{'needed':>10}{'MMACs/image':>13}{'MACs : host':>13}{'time : host':>13}"]
    for line in lines:
        passes, needed = ("{:.0f} + {:.0f}".format(*pair) for pair in (line.cost.passes, NEEDED[line.name]))
        each = line.cost.multiply_adds / BATCH / 1e6
        rows.append(f"{line.name:<16}{passes:>10}{needed:>10}{each:>13.1f}{line.ratio:>13.2f}{line.time_ratio:>13.2f}")
    return "\n".join([*rows, "passes: with + without gradients, of one image's views and streams through an encoder"])


def test_no_step_costs_more_than_its_equations_need(capsys: pytest.CaptureFixture[str]) -> None:
    assert NEEDED.keys() == METHODS.keys(), "say here what a new method's equations need"
    lines = [measure(name) for name in sorted(METHODS)]
    with capsys.disabled():
        print("\n" + table(lines))  # noqa: T201
    for line in lines:
        assert all(found <= needed for found, needed in zip(line.cost.passes, NEEDED[line.name], strict=True)), (
            line.name
        )
        assert line.ratio <= SLACK * line.cost.units / line.host.units, line.name


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(table(measure(name) for name in sys.argv[1:] or sorted(METHODS)))  # noqa: T201
