"""The types that methods and the engine exchange: contexts, batches, updates, and trainings on public images.

Shape suffixes used throughout: B batch, C image channels, H representation width, D embedding width, K clients.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn

from fedssl.aggregation import fixed_point_mean
from fedssl.aggregation.fixed_point import Factor, NarrowWords, TotalBits
from fedssl.aggregation.prefix_mean import PrefixMean
from fedssl.artifacts.tensors import Tensors
from fedssl.data.image_batches import Images
from fedssl.errors import MethodError
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.training import OptimizerConfig
from fedssl.seeding import derive_seed

Losses = dict[str, torch.Tensor]
"""Named terms, already weighted: their sum is minimised. Each must have a gradient."""

Measurements = dict[str, torch.Tensor]
"""Named numbers of a step that are reported and not minimised, as tensors on the device."""

Terms = tuple[Losses, Measurements]
"""The tensors that the objective or another part computes from a batch."""

ClientState = Tensors
"""The tensors that a method keeps on the client between rounds and never sends."""

ServerState = Tensors
"""The tensors that a method keeps on the coordinator between rounds."""

Metrics = dict[str, float]

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class ClientData:
    """One client's images, for training on a device. `images`: uint8 or int16 (N, C, size, size); `labels`: int64 (N,).

    For methods that use the sites' own labels, `labels` are -1 for an image without a label, may be the presence of
    several labels (N, C), and come with `held_out` (N,), true for the labelled images that are not trained on.

    The images are in the device's memory, or in a cache. `groups`: int64 (N,) on the CPU, equal for the images of one
    group (a patient), if the images have groups.
    """

    images: Images
    labels: torch.Tensor | None = None
    held_out: torch.Tensor | None = None
    groups: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.images)

    @property
    def num_trained(self) -> int:
        """The number of images that have a label and are not held out."""
        return int(self._is_trained().sum())

    def trained(self) -> "ClientData":
        """Return the images that have a label and are not held out."""
        return self.at(self._is_trained().nonzero().flatten())

    def at(self, indices: torch.Tensor) -> "ClientData":
        """Return the images at `indices`, in that order."""
        images = self.images
        if isinstance(images, torch.Tensor):
            own: Images = images.index_select(0, indices.to(images.device))
        else:
            own = images.subset(indices.cpu().numpy())
        labels, held_out = (None if each is None else each[indices] for each in (self.labels, self.held_out))
        groups = None if self.groups is None else self.groups[indices.cpu()]
        return ClientData(own, labels, held_out, groups)

    def to(self, device: torch.device | str) -> "ClientData":
        """Return the images for training on `device`, with their labels there."""
        labels, held_out = (None if each is None else each.to(device) for each in (self.labels, self.held_out))
        return ClientData(self.images.to(device), labels, held_out, self.groups)

    def _is_trained(self) -> torch.Tensor:
        """Return which images have a label and are not held out (N,). The method has checked that there are labels."""
        assert self.labels is not None, "the method refuses clients without labels"
        assert self.held_out is not None, "a site's labels come with their split"
        is_labelled = self.labels >= 0
        return (is_labelled.all(dim=1) if is_labelled.ndim == 2 else is_labelled) & ~self.held_out


def refuse_to_distil(task: "Distillation", ctx: "Context") -> "tuple[Tensors, Metrics]":
    """Refuse to train: the default of `Context.distil`, which the engine replaces during a round."""
    raise MethodError("training on public images is part of a round: call run_local_round or run_aggregation")


@dataclass(frozen=True, slots=True)
class MeanInputs:
    """The arguments of `fixed_point_mean`, except for the words, which the engine chooses."""

    updates: Iterable[Mapping[str, torch.Tensor]]
    weights: Sequence[float]
    base: Mapping[str, torch.Tensor] | None
    fraction_bits: int
    factor: Factor | None = None

    def mean(self, narrow: NarrowWords | None = None) -> Tensors:
        """Return the weighted mean, as a sum of integers. It consumes the updates."""
        return fixed_point_mean(
            self.updates, self.weights, self.base, fraction_bits=self.fraction_bits, factor=self.factor, narrow=narrow
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The client that computes, the round and the device. `client_id` "" is the coordinator. `round_number` counts from
    1; 0 is before the first round."""

    spec: RunSpec
    round_number: int
    client_id: str = ""
    device: torch.device = CPU
    dimensions: tuple[int, ...] | None = None
    """The dimensions of the embedding that belong to this client in the run (SSD); None if the method assigns none."""
    public: ClientData | None = None
    """The images that all clients and the coordinator hold (FLESD, FedCA), on the device; None if the spec names
    none."""
    distil: "Distil" = refuse_to_distil
    """Trains on the public images, besides local training. The engine provides it, because it owns the optimiser."""
    fixed_mean: Callable[[MeanInputs], Tensors] = MeanInputs.mean
    """Computes the means of a run with `aggregation.arithmetic = "fixed"`. The engine replaces it in a secure round, in
    which a client has only its own update and the coordinator only the sum of all."""
    total_bits: TotalBits | None = None
    """The bits of a round's total weight, from which the scales of 32-bit words follow; None if all have 64 bits."""
    prefix_mean: PrefixMean | None = None
    """The mean of the round's first updates, if the coordinator has begun it before the round closed."""
    restarting: Collection[str] = ()
    """The clients that have trained without a state that they had lost. If the update of one is used, all clients start
    cold after the round. Empty unless the method's config `restarts_states`."""

    def generator(self, purpose: str) -> torch.Generator:
        """Return a fresh generator on the device: the same for each call of this client in this round for this
        purpose."""
        seed = derive_seed(self.spec.seed, self.round_number, self.client_id, purpose)
        return torch.Generator(self.device).manual_seed(seed)

    def seed(self, purpose: str) -> int:
        """Return the seed behind `generator`, for libraries with generators of their own."""
        return derive_seed(self.spec.seed, self.round_number, self.client_id, purpose)


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's input. `views`: float (B, C, size, size), normalised; `indices`: int64 (B,) into the client's images;
    `extra`: further streams by name; `local_views`: smaller crops of the same images, each float (B, C, s, s)."""

    views: tuple[torch.Tensor, ...]
    indices: torch.Tensor
    labels: torch.Tensor | None
    extra: Mapping[str, torch.Tensor]
    local_views: tuple[torch.Tensor, ...] = ()


@dataclass(frozen=True, slots=True)
class Schedule:
    """A round's local training: how many epochs (zero is legal) of how many steps, at what learning rate."""

    num_epochs: int
    steps_per_epoch: int
    learning_rate: float


@dataclass(frozen=True, slots=True)
class Update:
    """One client's accepted update. `load` opens its tensors, which are released before the next client's are
    opened. `reopen` opens the file of those that `load` has checked, and gives None if it cannot; several files are
    open at a time, in two threads, and only to be measured. `metrics` of its training are only read in a secure round,
    whose sum has their means."""

    client_id: str
    num_examples: int
    load: Callable[[], Mapping[str, torch.Tensor]]
    metrics: Metrics = field(default_factory=dict)
    reopen: Callable[[], AbstractContextManager[Mapping[str, torch.Tensor] | None]] | None = None


class Distillation(Protocol):
    """A training on public images, in epochs: on the coordinator, or on a client before its local training. It has no
    state of its own: everything that changes is in the modules.

    A method whose coordinator trains declares it in its config (`distillation_epochs`). In a deployment, this training
    is a job on a queue of its own.
    """

    @property
    def num_epochs(self) -> int: ...

    @property
    def optimizer(self) -> OptimizerConfig: ...

    def build(self, ctx: Context) -> nn.ModuleDict:
        """Return the modules that are trained and those that they need, in their first state."""
        ...

    def steps(self, modules: nn.ModuleDict, epoch: int, ctx: Context) -> Iterator[Losses]:
        """Yield the losses of one epoch's steps. The optimiser takes its step before it asks for the next losses."""
        ...

    def result(self, modules: nn.ModuleDict) -> Tensors:
        """Return the tensors that are the result of the training."""
        ...


Distil = Callable[[Distillation, Context], tuple[Tensors, Metrics]]
"""Trains a task, and returns its result and its metrics."""
