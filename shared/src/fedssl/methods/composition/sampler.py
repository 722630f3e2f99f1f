"""Random numbers that a step draws."""

import torch
from torch import nn

from fedssl.methods.composition.modules import module_of


class Sampler(nn.Module):
    """The round's source of randomness, which advances from step to step."""

    generator: torch.Generator | None = None

    def start(self, seed: int, device: torch.device) -> None:
        """Begin a round. The generator object stays the same, because captured steps draw from it."""
        if self.generator is None:
            self.generator = torch.Generator(device)
        self.generator.manual_seed(seed)


def generator_of(modules: nn.ModuleDict, name: str) -> torch.Generator:
    """Return the generator of the sampler of this name, which the part's `begin` has started."""
    sampler = module_of(modules, name, Sampler)
    assert sampler.generator is not None, "`begin` has set it"
    return sampler.generator
