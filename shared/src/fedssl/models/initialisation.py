"""Weights that depend on a seed and on nothing else."""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

M = TypeVar("M", bound=nn.Module)


def initialised(build: Callable[[], M], seed: int) -> M:
    """Runs `build` with torch's CPU generator seeded to `seed`, and puts the generator's state back after.

    torch's initialisers draw from the global generator and take no other. The state is borrowed for the length of the
    call, so no other thread may draw from it meanwhile. `build` must create its modules on the CPU.
    """
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed: that would seed the generators of the accelerators too, which are not forked here.
        torch.default_generator.manual_seed(seed)
        return build()
