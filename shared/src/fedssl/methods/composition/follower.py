"""Networks that follow the online one: the target of BYOL and Orchestra, DINO's teacher, the keys of MoCo and FLESD."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from fedssl.methods.composition.modules import copy_of
from fedssl.methods.composition.part import ENCODER, PROJECTOR


@dataclass(frozen=True, slots=True)
class Follower:
    """A frozen copy t of the online network o that follows it by t = m t + (1 - m) o, parameters only: its BatchNorm
    keeps its own statistics. `names` are its modules, by the online module that each follows, encoder first. An online
    module that a run does not have has no follower."""

    names: Mapping[str, str]

    def built(self, modules: nn.ModuleDict) -> dict[str, nn.Module]:
        """Return the follower of the online network as it is now."""
        return {name: copy_of(modules[online]) for online, name in self.names.items() if online in modules}

    def present(self, modules: nn.ModuleDict) -> dict[str, str]:
        """Return those of `names` that the run has."""
        return {online: name for online, name in self.names.items() if name in modules}

    def restart(self, modules: nn.ModuleDict) -> None:
        """Copy the online network into it, including BatchNorm's statistics."""
        for online, name in self.present(modules).items():
            modules[name].load_state_dict(modules[online].state_dict())

    @torch.no_grad()
    def follow(self, modules: nn.ModuleDict, momentum: float | torch.Tensor) -> None:
        """Move it towards the online network. A momentum that changes from step to step is a tensor (1)."""
        weight = 1 - momentum
        for online, name in self.present(modules).items():
            for slow, fast in zip(modules[name].parameters(), modules[online].parameters(), strict=True):
                slow.lerp_(fast, weight)

    def network(self, modules: nn.ModuleDict) -> list[nn.Module]:
        """Return its modules, encoder first."""
        return [modules[name] for name in self.present(modules).values()]

    @torch.no_grad()
    def embed(self, modules: nn.ModuleDict, images: torch.Tensor) -> torch.Tensor:
        """Return its outputs for a batch, without gradients."""
        for module in self.network(modules):
            images = module(images)
        return images


TARGET = Follower({ENCODER: "target_encoder", PROJECTOR: "target_projector"})
"""The target network of the objectives that have one."""

PROTOTYPES = "prototypes"
TEACHER = Follower({ENCODER: "teacher_encoder", PROJECTOR: "teacher_projector", PROTOTYPES: "teacher_prototypes"})
"""DINO's teacher."""

TARGETS = (TARGET, TEACHER)
"""The networks that stay with the client, and that predictions are made of."""

KEYS = Follower({ENCODER: "key_encoder", PROJECTOR: "key_projector"})
"""The network that makes the keys of momentum contrast."""
