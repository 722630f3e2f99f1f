"""Copies of the trained parameters' shape, for parts that look at all of them: FedProx, SCAFFOLD."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn


def trained_parameters(modules: nn.Module) -> dict[str, Tensor]:
    """Every parameter that is trained, as `module.parameter`."""
    return {name: parameter for name, parameter in modules.named_parameters() if parameter.requires_grad}


class Snapshot(nn.Module):
    """One buffer for every named tensor, zero at first, under the same dotted name."""

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
        """The buffers by their dotted names."""
        return dict(self.named_buffers())

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Overwrite every buffer."""
        for name, buffer in self.named_buffers():
            buffer.copy_(tensors[name])


def snapshot(modules: nn.ModuleDict, name: str) -> Snapshot:
    """The module of this name, which is one."""
    found = modules[name]
    assert isinstance(found, Snapshot)
    return found
