"""FedProx as an add-on: a pull towards the global weights.

Li et al. 2020, Federated Optimization in Heterogeneous Networks, Eq. 2: (mu/2) ||w - w_g||^2 over every parameter that
is trained, including the heads of the objective and the add-ons; mu is `mu`. FedX's Table 2 combines it with local
distillation and does not state mu: 0.01 is the default.

w_g is the broadcast, whatever the merge rule does with it; a parameter that is not in it is pulled to its first value.

Deviations: FLESD's code leaves the 1/2 out, so its mu is half of this one's. FedDecorr's FedProx compares the
parameters with themselves, which gives 0; the reference here is a copy.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from fedssl.artifacts.tensors import Tensors
from fedssl.losses import proximal
from fedssl.methods.api import Batch, ClientData, Context, Terms
from fedssl.methods.composition.part import Online, Part
from fedssl.methods.composition.snapshots import Snapshot, snapshot, trained_parameters
from fedssl.protocol.methods.add_ons import ProximalConfig

_GLOBAL = "proximal_global"


@dataclass(frozen=True)
class Proximal(Part):
    """(mu/2) ||w - w_g||^2."""

    config: ProximalConfig

    built_last: ClassVar[bool] = True

    def heads(self, modules: nn.ModuleDict, ctx: Context) -> dict[str, nn.Module]:
        return {_GLOBAL: Snapshot(trained_parameters(modules))}

    def begin(self, modules: nn.ModuleDict, broadcast: Tensors, data: ClientData, ctx: Context) -> None:
        snapshot(modules, _GLOBAL).load({**trained_parameters(modules), **broadcast})

    def terms(self, online: Online, modules: nn.ModuleDict, batch: Batch, ctx: Context) -> Terms:
        reference = snapshot(modules, _GLOBAL).tensors()
        now = dict(modules.named_parameters())
        return {"proximal": proximal({name: now[name] for name in reference}, reference, self.config.mu)}, {}
