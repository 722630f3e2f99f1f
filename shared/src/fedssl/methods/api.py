"""What a method is: a record of pure parts that the engine calls.

Shape suffixes used throughout: B batch, C image channels, H representation width, D embedding width, K clients.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import nn

from fedssl.artifacts.tensors import Tensors
from fedssl.errors import MethodError
from fedssl.protocol.methods.base import MethodConfig
from fedssl.protocol.plan import ArtifactPlan
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.training import OptimizerConfig
from fedssl.seeding import derive_seed

Losses = dict[str, torch.Tensor]
"""Named terms, already weighted: their sum is what is minimised. A term without a gradient is no part of it: it is a
measurement, reported beside them under its own name."""

ClientState = Tensors
"""What a method keeps on the client between rounds and never sends."""

ServerState = Tensors
"""What a method keeps on the coordinator between rounds."""

Metrics = dict[str, float]

CPU = torch.device("cpu")

C = TypeVar("C", bound=MethodConfig)


@dataclass(frozen=True, slots=True)
class ClientData:
    """One client's images, on the device that trains. `images`: uint8 (N, C, size, size); `labels`: int64 (N,)."""

    images: torch.Tensor
    labels: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.images)


def nobody_distils(task: "Distillation", ctx: "Context") -> "tuple[Tensors, Metrics]":
    """Stands for the engine's training where there is none."""
    raise MethodError("training on public images is part of a round: call run_local_round or run_aggregation")


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Who computes what, when and where. `client_id` "" is the coordinator; `round_number` counts from 1, 0 is before
    the first."""

    spec: RunSpec
    round_number: int
    client_id: str = ""
    device: torch.device = CPU
    dimensions: tuple[int, ...] | None = None
    """The embedding's dimensions that are this client's own in the run (SSD); None where the method assigns none."""
    public: ClientData | None = None
    """The images that everybody holds (FLESD, FedCA), on the device; None where the spec names none."""
    distil: "Distil" = nobody_distils
    """How to train on the public images beside local training: the engine's, which owns the optimiser."""

    def generator(self, purpose: str) -> torch.Generator:
        """A fresh generator on the device, the same whenever this round of this client asks for this purpose."""
        seed = derive_seed(self.spec.seed, self.round_number, self.client_id, purpose)
        return torch.Generator(self.device).manual_seed(seed)

    def seed(self, purpose: str) -> int:
        """The seed behind `generator`, for libraries with generators of their own."""
        return derive_seed(self.spec.seed, self.round_number, self.client_id, purpose)


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's input. `views`: float (B, C, size, size), normalised; `indices`: int64 (B,) into the client's images;
    `extra`: further streams by name."""

    views: tuple[torch.Tensor, ...]
    indices: torch.Tensor
    labels: torch.Tensor | None
    extra: Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Schedule:
    """A round's local training: how many epochs (zero is legal) of how many steps, at what learning rate."""

    num_epochs: int
    steps_per_epoch: int
    learning_rate: float


@dataclass(frozen=True, slots=True)
class Update:
    """One client's accepted update. `load` opens its tensors, which are dropped before the next client's are opened."""

    client_id: str
    num_examples: int
    load: Callable[[], Mapping[str, torch.Tensor]]


class Distillation(Protocol):
    """A training on public images, in epochs: the coordinator's, or one before a client's own. Without state of its
    own: everything that changes is in the modules.

    A method whose coordinator has one says so in its config (`distillation_epochs`): deployed, it is a job on a queue
    of its own.
    """

    @property
    def num_epochs(self) -> int: ...

    @property
    def optimizer(self) -> OptimizerConfig: ...

    def build(self, ctx: Context) -> nn.ModuleDict:
        """What is trained, and what goes with it, as it is at the start."""
        ...

    def steps(self, modules: nn.ModuleDict, epoch: int, ctx: Context) -> Iterator[Losses]:
        """One epoch. The optimiser takes its step on each of the losses before the next is asked for."""
        ...

    def result(self, modules: nn.ModuleDict) -> Tensors:
        """What it was for."""
        ...


Distil = Callable[[Distillation, Context], tuple[Tensors, Metrics]]
"""Trains, and returns the task's result and what to tell people."""


class ClientAlgorithm(Protocol):
    """What a method does on a client. Without state of its own: everything that changes is in `modules`.

    One set of modules serves client after client: before each round all parameters and buffers get their first values
    again, and whatever else changes in a module, `merge` or `begin_epoch` must set.

    `objective` and `after_step` are the step. A GPU records it and repeats the recording for later batches, rounds and
    clients, so a step never waits for a number (no `float(x)`, `if x > 0`, `x[mask]` of tensors), changes tensors in
    place, and finds what it needs of the broadcast in `modules`.
    """

    @property
    def compiles(self) -> bool:
        """Whether the compiler makes one program of `objective` that serves all clients and rounds."""
        ...

    def architecture(self, ctx: Context) -> Hashable:
        """What `build` depends on beside the spec: the same for clients whose modules are alike."""
        ...

    def build(self, ctx: Context) -> nn.ModuleDict:
        """All modules, the method's buffers included, initialised from the run's seed alone."""
        ...

    def step_constants(self, modules: nn.ModuleDict, ctx: Context) -> Hashable:
        """What steps depend on beside the spec and the values of the modules' tensors. Where it differs from what it
        was, they are recorded anew."""
        ...

    def schedule(self, num_images: int, ctx: Context) -> Schedule:
        """How much and how fast to train."""
        ...

    def merge(
        self,
        modules: nn.ModuleDict,
        broadcast: Tensors,
        state: ClientState | None,
        data: ClientData,
        ctx: Context,
    ) -> None:
        """What "receive the global model" means. `state` None: the client starts cold. `modules` are in training mode
        and on the device."""
        ...

    def begin_epoch(self, modules: nn.ModuleDict, data: ClientData, epoch: int, ctx: Context) -> None:
        """What is computed from all images before an epoch: a clustering."""
        ...

    def batches(self, data: ClientData, epoch: int, ctx: Context) -> Iterator[Batch]:
        """One epoch's batches."""
        ...

    def objective(self, modules: nn.ModuleDict, batch: Batch, broadcast: Tensors, ctx: Context) -> Losses:
        """The loss terms of one batch."""
        ...

    def after_step(self, modules: nn.ModuleDict, ctx: Context) -> None:
        """What follows an optimiser step: a target network's moving average, a queue."""
        ...

    def finish(
        self, modules: nn.ModuleDict, data: ClientData, broadcast: Tensors, state: ClientState | None, ctx: Context
    ) -> tuple[Tensors, ClientState]:
        """The update to send and the state to keep."""
        ...


class ServerAlgorithm(Protocol):
    """What a method does on the coordinator."""

    def initial_state(self, modules: nn.ModuleDict, ctx: Context) -> ServerState:
        """The state before the first round, from freshly built client modules."""
        ...

    def broadcast(self, state: ServerState, ctx: Context) -> Tensors:
        """What goes down to every client of the round."""
        ...

    def aggregate(self, state: ServerState, updates: Sequence[Update], ctx: Context) -> tuple[ServerState, Metrics]:
        """The next state. `updates` come in client-id order."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Method(Generic[C]):
    """One method: its config, its wire surface and its two halves."""

    name: str
    config: type[C]
    artifacts: Callable[[C, RunSpec], ArtifactPlan]
    client: Callable[[C], ClientAlgorithm]
    server: Callable[[C], ServerAlgorithm]

    @property
    def version(self) -> int:
        """Differs wherever the mathematics or the plan does."""
        return self.config.info.version
