"""Weights that depend only on a seed."""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

M = TypeVar("M", bound=nn.Module)


def initialised(build: Callable[[], M], seed: int) -> M:
    """Run `build` with torch's CPU generator seeded to `seed`, and restore the generator's state afterwards.

    torch's initialisers only draw from the global generator. No other thread may draw from it during the call. `build`
    must create its modules on the CPU.
    """
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed: that would seed the generators of the accelerators too, which are not forked here.
        torch.default_generator.manual_seed(seed)
        return build()
