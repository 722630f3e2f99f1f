"""The training step of a client that trains on several devices."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fedssl.data_parallel import splitting
from fedssl.engine.steps import LossFunction, Step, StepValues, eager_step, micro_batches
from fedssl.methods.api import Batch, Context, Terms
from fedssl.methods.composition.client import ClientAlgorithm


class _Objective(nn.Module):
    """The objective in the form that DistributedDataParallel requires."""

    def __init__(self, algorithm: ClientAlgorithm, networks: nn.ModuleDict) -> None:
        super().__init__()
        self.algorithm, self.networks = algorithm, networks
        self.unused = nn.Parameter(torch.zeros(()))  # without one, torch warns that it found none

    def forward(self, batch: Batch, ctx: Context) -> Terms:
        return self.algorithm.objective(self.networks, batch, ctx)


def parallel_step(
    algorithm: ClientAlgorithm, modules: nn.ModuleDict, optimizer: torch.optim.Optimizer, ctx: Context
) -> Step:
    """Return the step of one round, which all processes take together on the same batches.

    `modules` are those that `split_encoders` has changed. They become the first process's. A step with fewer images
    than devices is computed by each process on its own.
    """
    step = eager_step(algorithm, modules, optimizer, ctx, _averaged(algorithm, modules, ctx))
    num_parts = ctx.spec.training.num_micro_batches

    def take(batch: Batch) -> StepValues:
        with splitting(min(len(part.indices) for part in micro_batches(batch, num_parts))):
            return step(batch)

    return take


def _averaged(algorithm: ClientAlgorithm, modules: nn.ModuleDict, ctx: Context) -> LossFunction:
    """Return the objective, whose gradients are the means over all processes."""
    # An objective may leave parameters out of some steps, as DINO does with its prototypes.
    parallel = DistributedDataParallel(
        _Objective(algorithm, modules).to(ctx.device), forward_sync_buffers=False, find_unused_parameters=True
    )

    def objective(modules: nn.ModuleDict, batch: Batch, ctx: Context) -> Terms:
        terms: Terms = parallel(batch, ctx)
        return terms

    return objective
