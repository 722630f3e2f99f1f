"""The coordinator's half of a composed method."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fedssl.artifacts.tensors import Tensors
from fedssl.methods.api import Context, Metrics, ServerState, Update
from fedssl.methods.composition.client import ComposedClient
from fedssl.methods.composition.modules import tensors_of

Reducer = Callable[[Sequence[Update], ServerState, Context], tuple[Tensors, Metrics]]
"""The next global weights from the updates (client-id order) and the state; metrics for people beside them."""


@dataclass(frozen=True, slots=True)
class ComposedServer:
    """The coordinator's half: one reducer for the shared modules, and each part's own rule for its own tensors."""

    client: ComposedClient
    reduce: Reducer

    def initial_state(self, modules: nn.ModuleDict, ctx: Context) -> ServerState:
        state = tensors_of(modules, self.client.sent(modules))
        for part in self.client.parts:
            state.update(part.initial_server_state(modules, ctx))
        return state

    def broadcast(self, state: ServerState, ctx: Context) -> Tensors:
        return state

    def aggregate(self, state: ServerState, updates: Sequence[Update], ctx: Context) -> tuple[ServerState, Metrics]:
        names = self.client.reduced(ctx)
        weights, metrics = self.reduce([_only(update, names) for update in updates], state, ctx)
        next_state = dict(weights)
        for part in self.client.parts:
            next_state.update(part.aggregate(state, updates, ctx))
        return next_state, metrics


def _only(update: Update, names: frozenset[str]) -> Update:
    return dataclasses.replace(update, load=lambda: _Selection(update.load(), names))


class _Selection(Mapping[str, torch.Tensor]):
    """Some of a mapping's tensors, loaded no earlier than they are asked for."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], names: frozenset[str]) -> None:
        self._tensors = tensors
        self._names = names

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._names))

    def __len__(self) -> int:
        return len(self._names)
