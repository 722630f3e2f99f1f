"""How far a network has moved, and the copies of it that it is compared with: FedU, FedEMA, FedRLC."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from fedssl.methods.composition.modules import copy_of, module_of
from fedssl.models import Encoder


class MergeMemory(nn.Module):
    """The state that a merge rule keeps on the client: a frozen copy of some of its modules, and numbers by name."""

    def __init__(self, modules: nn.ModuleDict, names: Iterable[str], **numbers: Tensor) -> None:
        super().__init__()
        self.local = copies(modules, names)
        for name, number in numbers.items():
            self.register_buffer(name, number)

    def number(self, name: str) -> Tensor:
        """Return one of the numbers, to be changed in place."""
        return self.get_buffer(name)


def memory(modules: nn.ModuleDict, name: str) -> MergeMemory:
    """Return the memory of this name."""
    return module_of(modules, name, MergeMemory)


def copies(modules: nn.ModuleDict, names: Iterable[str]) -> nn.ModuleDict:
    """Return frozen copies of those named modules that exist, under the same names."""
    return nn.ModuleDict({name: copy_of(modules[name]) for name in names if name in modules})


def take(into: nn.ModuleDict, modules: nn.ModuleDict) -> None:
    """Overwrite the copies with the modules' current tensors."""
    for name, copy in into.items():
        copy.load_state_dict(modules[name].state_dict())


@torch.no_grad()
def mean_convolution_distance(now: nn.Module, then: nn.Module) -> Tensor:
    """Return mean_l || w_l - w'_l ||_2 over the convolutions l of an encoder, as in EasyFL: not squared, one term per
    layer.

    The encoder names the convolutions that count: the 17 of a ResNet-18's stem and blocks, but not the 1x1 ones of its
    shortcuts, BatchNorm or heads.
    """
    assert isinstance(now, Encoder)
    weights, before = dict(now.named_parameters()), dict(then.named_parameters())
    norms = [torch.linalg.vector_norm(weights[name] - before[name]) for name in now.convolutions()]
    return torch.stack(norms).mean()


@torch.no_grad()
def parameter_distance(now: Iterable[nn.Module], then: Iterable[nn.Module]) -> Tensor:
    """Return || w - w' ||_2 over all parameters of the modules, pairwise, as one vector."""
    norms = [
        torch.linalg.vector_norm(parameter - before)
        for module, other in zip(now, then, strict=True)
        for parameter, before in zip(module.parameters(), other.parameters(), strict=True)
    ]
    distance: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return distance


@torch.no_grad()
def parameter_length(modules: Iterable[nn.Module]) -> Tensor:
    """Return || w ||_2 over all parameters of the modules, as one vector."""
    norms = [torch.linalg.vector_norm(parameter) for module in modules for parameter in module.parameters()]
    length: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return length
