"""Momentum contrast: queries against keys of a slowly following network and a queue of earlier keys.

What FedMoCo and FedProtoCL have in common: He et al. 2020, Eq. 1 and 2, as in EasyFL's code.

- f_q is the online network; f_k, `key_encoder` and `key_projector`, is a copy of it at the start of every round, after
  the merge, and follows by f_k = m f_k + (1 - m) f_q after every step, parameters only. m is `key_momentum`.
- Q, the module `queue`, is a ring of unit vectors that stays with the client from round to round; it is neither
  averaged nor sent. Both views are queries and keys, both losses are added, and then both sets of keys enter the queue.
- Cold start: the queue holds what it holds before the first round, random unit vectors from the run's seed.
- With `data.local_crops`, M smaller crops are queries, too, and keys are only of the two views: the loss is 2 times the
  mean over all 2 + 2 M pairs of different views. DINO's authors train MoCo-v2 with crops (Caron et al. 2021, Table 14
  and Appendix E) and print no formula; these are the pairs of their Eq. 3.

EasyFL shuffles the key's batch and restores its order, "for making use of BatchNorm". On one device, where a batch's
statistics do not depend on its order, that changes only rounding, so it is left out here. EasyFL's key network follows
before the forward pass, here it follows after the step: the keys are the same, because it starts as a copy. The queue
changes with the forward pass, as BatchNorm's statistics do.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from fedssl.artifacts.tensors import Tensors
from fedssl.losses import info_nce
from fedssl.methods.api import Batch, ClientData, Context, Terms
from fedssl.methods.composition.follower import KEYS
from fedssl.methods.composition.modules import embed_local, module_of
from fedssl.methods.composition.part import Objective, Online
from fedssl.methods.composition.ring import Ring
from fedssl.protocol.methods.fedmoco import MomentumContrastConfig

QUEUE = "queue"


@dataclass(frozen=True)
class MomentumContrast(Objective):
    """InfoNCE of each view's query with the other view's key, against the queue."""

    config: MomentumContrastConfig

    kept: ClassVar[tuple[str, ...]] = (QUEUE,)
    joint_forward: ClassVar[bool] = False
    compiles: ClassVar[bool] = False  # the queue's length follows the client's number of images

    def heads(self, modules: nn.ModuleDict, ctx: Context) -> dict[str, nn.Module]:
        keys_QD = torch.randn(self.config.queue_size, self.config.embedding_width(ctx.spec.model))
        return {**KEYS.built(modules), QUEUE: Ring(F.normalize(keys_QD, dim=1))}

    def begin(self, modules: nn.ModuleDict, broadcast: Tensors, data: ClientData, ctx: Context) -> None:
        KEYS.restart(modules)
        share = int(self.config.max_queue_share * len(data))
        key_queue(modules).length = max(1, min(self.config.queue_size, share))

    def terms(self, online: Online, modules: nn.ModuleDict, batch: Batch, ctx: Context) -> Terms:
        k1, k2 = (KEYS.embed(modules, view) for view in batch.views)
        queue, temperature = key_queue(modules), self.config.contrast_temperature
        z1, z2 = online.z
        loss = info_nce(z1, k2, queue(), temperature) + info_nce(z2, k1, queue(), temperature)
        if local := embed_local(modules, batch):
            loss = loss + sum(info_nce(z, key, queue(), temperature) for z in local for key in (k1, k2))
            loss = loss / (1 + len(local))  # two times the mean over the 2 + 2 M pairs
        queue.push(torch.cat([k1, k2]))
        return {"info_nce": loss}, {}

    def step_constants(self, modules: nn.ModuleDict, ctx: Context) -> Hashable:
        return key_queue(modules).length

    def after_step(self, modules: nn.ModuleDict, ctx: Context) -> None:
        KEYS.follow(modules, self.config.key_momentum)


def key_queue(modules: nn.ModuleDict) -> Ring:
    """Return Q."""
    return module_of(modules, QUEUE, Ring)
