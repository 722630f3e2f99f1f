"""FedDecorr as an add-on: features that do not predict one another.

Shi et al. 2023, Towards Understanding and Mitigating Dimensional Collapse in Heterogeneous Federated Learning, Eq. 6:
beta ||K||_F^2 / D^2 of the features' correlations K; beta is `weight`. FedDecorr itself applies it to the
representation of supervised clients (`on` "h"). FedU2's port, and with it the rows of SSD's tables, adds 0.1 (D(z1) +
D(z2)) on the embeddings: `on` "z", the default.

Deviation of the default variant: FedDecorr's code leaves the diagonal out and does not divide x^T x by the batch, so
its value is about B times the paper's. The published weight 0.1 belongs to it.
"""

from dataclasses import dataclass

import torch
from torch import nn

from fedssl.losses import decorrelation
from fedssl.methods.api import Batch, Context, Terms
from fedssl.methods.composition.part import Online, Part
from fedssl.protocol.methods.add_ons import DecorrelationConfig


@dataclass(frozen=True)
class Decorrelation(Part):
    """The correlations of the features, summed over the views."""

    config: DecorrelationConfig

    def terms(self, online: Online, modules: nn.ModuleDict, batch: Batch, ctx: Context) -> Terms:
        features = online.z if self.config.on == "z" else online.h
        losses = [decorrelation(x, self.config.variant) for x in features]
        return {"decorrelation": self.config.weight * torch.stack(losses).sum()}, {}
