"""The merge rule of training without a federation: every client keeps its own weights, and nothing is sent.

The broadcast holds the initial weights in every round. A client takes them if it has no weights of its own yet or has
lost them. All of its networks are client state.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from fedssl.artifacts.tensors import Tensors
from fedssl.methods.api import ClientState, Context
from fedssl.methods.composition.modules import load_modules
from fedssl.methods.composition.part import Merge
from fedssl.protocol.methods.merges import LocalConfig


@dataclass(frozen=True)
class Local(Merge):
    """Keep the client's own weights."""

    config: LocalConfig

    sends: ClassVar[bool] = False

    def receive(
        self,
        modules: nn.ModuleDict,
        names: tuple[str, ...],
        broadcast: Tensors,
        state: ClientState | None,
        ctx: Context,
    ) -> None:
        if state is None:
            load_modules(modules, names, broadcast, "broadcast")
