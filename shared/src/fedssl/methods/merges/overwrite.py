"""The merge rule of FedAvg: the broadcast replaces the client's weights."""

from torch import nn

from fedssl.artifacts.tensors import Tensors
from fedssl.methods.api import ClientState, Context
from fedssl.methods.composition.modules import load_modules
from fedssl.methods.composition.part import Merge


class Overwrite(Merge):
    """The broadcast replaces the client's weights, as in FedAvg."""

    def receive(
        self,
        modules: nn.ModuleDict,
        names: tuple[str, ...],
        broadcast: Tensors,
        state: ClientState | None,
        ctx: Context,
    ) -> None:
        load_modules(modules, names, broadcast, "broadcast")


OVERWRITE = Overwrite()
