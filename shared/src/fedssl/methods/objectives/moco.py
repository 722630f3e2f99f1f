"""Momentum contrast: queries against keys of a slowly following network and a queue of earlier keys.

The part that FedMoCo and FedProtoCL have in common; He et al. 2020, Eq. 1 and 2, as in EasyFL's code.

- f_q is the online network; f_k, `key_encoder` and `key_projector`, is a copy of it at the start of every round, after
  the merge, and follows by f_k = m f_k + (1 - m) f_q after every step, parameters only. m is `key_momentum`.
- Q, the module `queue`, is a ring of unit vectors that stays with the client from round to round; it is neither
  averaged nor sent. Both views are queries and keys, both losses are added, and both sets of keys enter the queue
  afterwards.
- Cold start: the queue is what it is before the first round, random unit vectors from the run's seed.

EasyFL shuffles the key's batch and orders it back, "for making use of BatchNorm". On one device, where a batch's
statistics do not depend on its order, that changes nothing but rounding, so it is left out here.
EasyFL's key network follows before the forward pass, here after the step: the same keys, since it starts as a copy.
The queue moves with the forward pass, as BatchNorm's statistics do.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from fedssl.artifacts.tensors import Tensors
from fedssl.losses import info_nce
from fedssl.methods.api import Batch, ClientData, Context, Losses, Measurements
from fedssl.methods.composition.modules import copy_of, move_towards
from fedssl.methods.composition.part import ENCODER, PROJECTOR, Objective, Online
from fedssl.protocol.methods.fedmoco import MomentumContrastConfig

KEYS = {ENCODER: "key_encoder", PROJECTOR: "key_projector"}
"""What the key network's modules are called, by the online module that each follows."""

QUEUE = "queue"


class KeyQueue(nn.Module):
    """A ring of keys, of which the newest replace the oldest. `length` of its `size` places are in use."""

    keys: torch.Tensor
    position: torch.Tensor

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.register_buffer("keys", F.normalize(torch.randn(size, width), dim=1))
        self.register_buffer("position", torch.zeros((), dtype=torch.int64))
        self.length = size

    def forward(self) -> torch.Tensor:
        """The keys in use, (length, D)."""
        return self.keys[: self.length]

    @torch.no_grad()
    def push(self, keys_BD: torch.Tensor) -> None:
        """Take in unit vectors of new keys; of more than fit, the last."""
        newest = F.normalize(keys_BD.detach().float(), dim=1)[-self.length :]
        places = (self.position + torch.arange(len(newest), device=newest.device)) % self.length
        self.keys.index_copy_(0, places, newest)
        self.position.copy_((self.position + len(newest)) % self.length)


@dataclass(frozen=True)
class MomentumContrast(Objective):
    """InfoNCE of each view's query with the other view's key, against the queue."""

    config: MomentumContrastConfig

    kept: ClassVar[tuple[str, ...]] = (QUEUE,)
    joint_forward: ClassVar[bool] = False
    compiles: ClassVar[bool] = False  # the queue's length follows the client's number of images

    def heads(self, modules: nn.ModuleDict, ctx: Context) -> dict[str, nn.Module]:
        keys = {key: copy_of(modules[online]) for online, key in KEYS.items() if online in modules}
        return {**keys, QUEUE: KeyQueue(self.config.queue_size, self.config.embedding_width(ctx.spec.model))}

    def begin(self, modules: nn.ModuleDict, broadcast: Tensors, data: ClientData, ctx: Context) -> None:
        for online, key in _followers(modules).items():
            modules[key].load_state_dict(modules[online].state_dict())
        share = int(self.config.max_queue_share * len(data))
        key_queue(modules).length = max(1, min(self.config.queue_size, share))

    def terms(self, online: Online, modules: nn.ModuleDict, batch: Batch, ctx: Context) -> tuple[Losses, Measurements]:
        with torch.no_grad():
            k1, k2 = (keys_of(modules, view) for view in batch.views)
        queue, temperature = key_queue(modules), self.config.contrast_temperature
        z1, z2 = online.z
        loss = info_nce(z1, k2, queue(), temperature) + info_nce(z2, k1, queue(), temperature)
        queue.push(torch.cat([k1, k2]))
        return {"info_nce": loss}, {}

    def step_constants(self, modules: nn.ModuleDict, ctx: Context) -> Hashable:
        return key_queue(modules).length

    def after_step(self, modules: nn.ModuleDict, ctx: Context) -> None:
        for online, key in _followers(modules).items():
            move_towards(modules[key], modules[online], self.config.key_momentum)


def key_network(modules: nn.ModuleDict) -> list[nn.Module]:
    """f_k, encoder first."""
    return [modules[key] for key in _followers(modules).values()]


def keys_of(modules: nn.ModuleDict, images: torch.Tensor) -> torch.Tensor:
    """f_k of a batch of views."""
    for module in key_network(modules):
        images = module(images)
    return images


def key_queue(modules: nn.ModuleDict) -> KeyQueue:
    """Q."""
    queue = modules[QUEUE]
    assert isinstance(queue, KeyQueue)
    return queue


def _followers(modules: nn.ModuleDict) -> dict[str, str]:
    return {online: key for online, key in KEYS.items() if online in modules}
