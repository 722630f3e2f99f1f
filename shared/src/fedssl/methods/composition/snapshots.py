"""Copies of all trained parameters, for the parts that need them: FedProx, SCAFFOLD."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fedssl.methods.composition.modules import module_of


def trained_parameters(modules: nn.Module) -> dict[str, Tensor]:
    """Return every parameter that is trained, by its name `module.parameter`."""
    return {name: parameter for name, parameter in modules.named_parameters() if parameter.requires_grad}


class Snapshot(nn.Module):
    """One buffer per named tensor, initially zero, under the same dotted name."""

    def __init__(self, like: Mapping[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in like.items():
            *path, leaf = name.split(".")
            node: nn.Module = self
            for step in path:
                if step not in dict(node.named_children()):
                    node.add_module(step, nn.Module())
                node = node.get_submodule(step)
            node.register_buffer(leaf, torch.zeros_like(tensor))

    def tensors(self) -> dict[str, Tensor]:
        """Return the buffers by their dotted names."""
        return dict(self.named_buffers())

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Overwrite every buffer."""
        for name, buffer in self.named_buffers():
            buffer.copy_(tensors[name])


def snapshot(modules: nn.ModuleDict, name: str) -> Snapshot:
    """Return the snapshot of this name."""
    return module_of(modules, name, Snapshot)
