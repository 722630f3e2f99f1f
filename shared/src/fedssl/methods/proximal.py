"""FedProx as an add-on: a pull towards the global weights.

Li et al. 2020, Federated Optimization in Heterogeneous Networks, Eq. 2: (mu/2) ||w - w_g||^2 over the parameters that
are trained and sent; mu is `mu`. FedX's Table 2 puts it onto local distillation, with no mu given: 0.01 is the default.

Deviation: FLESD's code leaves the 1/2 out, so its mu is half of this one's. FedDecorr's FedProx compares the parameters
with themselves; the reference here is a copy of the broadcast.
"""

from dataclasses import dataclass

import torch
from torch import nn

from fedssl.artifacts.tensors import Tensors
from fedssl.losses import proximal
from fedssl.methods.api import Batch, ClientData, Context, Losses
from fedssl.methods.composition import copy_of
from fedssl.methods.parts import ENCODER, PREDICTOR, PROJECTOR, Online, Part
from fedssl.protocol.methods.add_ons import ProximalConfig

_TRAINED = (ENCODER, PROJECTOR, PREDICTOR)
_START = "proximal_start"


@dataclass(frozen=True)
class Proximal(Part):
    """(mu/2) ||w - w_g||^2."""

    config: ProximalConfig

    def heads(self, modules: nn.ModuleDict, ctx: Context) -> dict[str, nn.Module]:
        return {_START: copy_of(nn.ModuleDict({name: modules[name] for name in _TRAINED if name in modules}))}

    def begin(self, modules: nn.ModuleDict, broadcast: Tensors, data: ClientData, ctx: Context) -> None:
        for name, module in _start(modules).items():
            module.load_state_dict(modules[name].state_dict())

    def terms(self, online: Online, modules: nn.ModuleDict, batch: Batch, ctx: Context) -> Losses:
        names = list(_start(modules))
        now = [parameter for name in names for parameter in modules[name].parameters()]
        start: list[torch.Tensor] = [parameter for name in names for parameter in _start(modules)[name].parameters()]
        return {"proximal": proximal(now, start, self.config.mu)}


def _start(modules: nn.ModuleDict) -> nn.ModuleDict:
    start = modules[_START]
    assert isinstance(start, nn.ModuleDict)
    return start
