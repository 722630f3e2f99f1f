"""FedU's merge rule: the client takes the global predictor only if its network drifted little.

Zhuang et al. 2021, Collaborative Unsupervised Visual Representation Learning from Decentralized Data, Sections 3.4 and
3.5. The client's encoder (with projector) f_theta is overwritten with the global f_phi, its target f_xi stays, and

    p_theta = p_phi if d < mu, p_theta otherwise                                               (Eq. 3)

d is the divergence of the client's last local training, mu is `mu`; d and the decision are kept with the client.

    paper      d = || theta_r - phi_{r-1} ||_2^2 over encoder and projector
    reference  d = mean over the encoder's convolutions of || w_after - w_before ||_2          (EasyFL)

The default is "reference": mu = 0.4 (CIFAR-10) and 0.6 (CIFAR-100) only make sense for it. The first download, and any
after the client lost its state, brings the global predictor.

Table 4's ablations: `aggregate` selects which of the client's encoders is sent, `update` which take the global one, and
`predictor` whether the global predictor replaces the local one always, never or by Eq. 3. An online encoder that is not
updated is kept with the client. phi_{r-1} is where local training started, which is the global encoder unless `update`
is "target". Modules of add-ons are overwritten.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from fedssl.artifacts.tensors import Tensors
from fedssl.methods.api import ClientData, ClientState, Context, Schedule
from fedssl.methods.composition.follower import TARGET
from fedssl.methods.composition.modules import load_modules, module_of
from fedssl.methods.composition.part import ENCODER, PREDICTOR, PROJECTOR, Merge
from fedssl.methods.merges.divergence import (
    MergeMemory,
    copies,
    mean_convolution_distance,
    memory,
    parameter_distance,
    take,
)
from fedssl.protocol.methods.merges import DAPUConfig

_MEMORY, _START = "dapu", "dapu_start"


@dataclass(frozen=True)
class DivergenceAwarePredictorUpdate(Merge):
    """Overwrite the encoder; take or keep the predictor."""

    config: DAPUConfig

    kept: ClassVar[tuple[str, ...]] = (_MEMORY,)

    def heads(self, modules: nn.ModuleDict, ctx: Context) -> dict[str, nn.Module]:
        local = (PREDICTOR,) if self.config.update != "target" else (ENCODER, PROJECTOR, PREDICTOR)
        numbers = {"distance": torch.zeros(()), "takes_global": torch.ones((), dtype=torch.uint8)}
        return {_MEMORY: MergeMemory(modules, local, **numbers), _START: copies(modules, (ENCODER, PROJECTOR))}

    def source(self, name: str) -> str:
        return TARGET.names.get(name, name) if self.config.aggregate == "target" else name

    def receive(
        self,
        modules: nn.ModuleDict,
        names: tuple[str, ...],
        broadcast: Tensors,
        state: ClientState | None,
        ctx: Context,
    ) -> None:
        load_modules(modules, names, broadcast, "broadcast")
        if state is None:
            return
        if self.config.update != "online":
            TARGET.restart(modules)
        local = memory(modules, _MEMORY).local
        if self.config.update == "target":
            _restore(modules, local, TARGET.names)
        if not self._takes_global_predictor(modules):
            _restore(modules, local, (PREDICTOR,))

    def _takes_global_predictor(self, modules: nn.ModuleDict) -> bool:
        if self.config.predictor != "dapu":
            return self.config.predictor == "global"
        return bool(memory(modules, _MEMORY).number("takes_global"))

    def begin(self, modules: nn.ModuleDict, broadcast: Tensors, data: ClientData, ctx: Context) -> None:
        take(module_of(modules, _START, nn.ModuleDict), modules)

    def end(self, modules: nn.ModuleDict, data: ClientData, schedule: Schedule, ctx: Context) -> None:
        start, kept = module_of(modules, _START, nn.ModuleDict), memory(modules, _MEMORY)
        if self.config.distance == "reference":
            distance = mean_convolution_distance(modules[ENCODER], start[ENCODER])
        else:
            distance = parameter_distance((modules[name] for name in start), start.values()).square()
        kept.number("distance").copy_(distance)
        kept.number("takes_global").copy_(distance < self.config.mu)
        take(kept.local, modules)


def _restore(modules: nn.ModuleDict, local: nn.ModuleDict, names: Iterable[str]) -> None:
    for name in names:
        modules[name].load_state_dict(local[name].state_dict())
