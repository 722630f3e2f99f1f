"""Parts of rounds, for tests of what happens within them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fedssl.artifacts.tensors import Tensors
from fedssl.engine import LocalResult, run_aggregation, run_local_round, start_run
from fedssl.engine.aggregation import ServerResult
from fedssl.methods import METHODS, site_data
from fedssl.methods.api import Batch, ClientData, Context, Losses, Terms, Update
from fedssl.methods.composition.client import ClientAlgorithm
from fedssl.protocol.runs import RunSpec
from support.methods import context, shards


@dataclass
class MemoryCheckpoint:
    """A distillation's checkpoint without a file."""

    saved: Tensors | None = None

    def load(self) -> Tensors | None:
        return self.saved

    def save(self, tensors: Tensors) -> None:
        self.saved = {name: tensor.cpu().clone() for name, tensor in tensors.items()}


def client_data(spec: RunSpec, client: str) -> ClientData:
    """Return a client's images, on the CPU."""
    return site_data.client_data(shards(spec)[client], spec, client)


def start(spec: RunSpec) -> ServerResult:
    """Return the state and the broadcast of the run before its first round."""
    return start_run(METHODS[spec.method.name], context(spec, 0))


def local_round(
    spec: RunSpec, broadcast: Tensors, client: str = "client-0", number: int = 1, state: Tensors | None = None
) -> LocalResult:
    """Train one client for a whole round, and return the result."""
    ctx = context(spec, number, client)
    return run_local_round(METHODS[spec.method.name], broadcast, state, client_data(spec, client), ctx)


def aggregate(
    spec: RunSpec, state: Mapping[str, torch.Tensor], updates: Sequence[tuple[int, Tensors]], number: int = 1
) -> ServerResult:
    """Aggregate updates of (num_examples, tensors) by client-0, client-1, ..., as the coordinator does."""
    named = [
        Update(f"client-{index}", num_examples, lambda tensors=tensors: tensors)  # type: ignore[misc]
        for index, (num_examples, tensors) in enumerate(updates)
    ]
    return run_aggregation(METHODS[spec.method.name], state, named, context(spec, number))


@dataclass(frozen=True)
class Training:
    """A client that has received the broadcast and is about to train."""

    algorithm: ClientAlgorithm
    modules: nn.ModuleDict
    data: ClientData
    broadcast: Tensors
    ctx: Context

    def batch(self, epoch: int = 0) -> Batch:
        """Return an epoch's first batch."""
        return next(self.algorithm.batches(self.data, epoch, self.ctx))

    def terms(self, batch: Batch) -> Terms:
        """Return the batch's losses and measurements, as a step computes them."""
        self.algorithm.before_step(self.modules, self.ctx)
        return self.algorithm.objective(self.modules, batch, self.ctx)

    def losses(self, batch: Batch) -> Losses:
        """Return only the batch's losses."""
        return self.terms(batch)[0]

    def values(self, batch: Batch) -> dict[str, float]:
        """Return the batch's losses and measurements as numbers."""
        return {name: float(term.detach()) for terms in self.terms(batch) for name, term in terms.items()}

    def outputs(self, batch: Batch) -> list[tuple[Any, Any]]:
        """Return h and z of each view as float64 arrays, computed from all views in one batch."""
        with torch.no_grad():
            h = self.modules["encoder"](torch.cat(batch.views))
            z = self.modules["projector"](h) if "projector" in self.modules else h
        pairs = zip(h.chunk(len(batch.views)), z.chunk(len(batch.views)), strict=True)
        return [(h.double().numpy(), z.double().numpy()) for h, z in pairs]


def training(
    spec: RunSpec,
    client: str = "client-0",
    number: int = 1,
    *,
    broadcast: Tensors | None = None,
    state: Tensors | None = None,
) -> Training:
    """Return the client at the moment before its first step."""
    ctx = context(spec, number, client)
    algorithm = METHODS[spec.method.name].bind(spec).client
    modules = algorithm.build(ctx)
    modules.to(memory_format=torch.channels_last).train()  # type: ignore[call-overload]
    received = start(spec).received if broadcast is None else broadcast
    data = client_data(spec, client)
    algorithm.merge(modules, received, state, data, ctx)
    return Training(algorithm, modules, data, received, ctx)
