"""SSD's projector distillation as an add-on: the representation learns from the embedding.

Fang et al. 2025, Soft Separation and Distillation, Eq. 9; delta is `delta`. The mean over the views of

    reference  mean_i KL(softmax(z_i / T) || softmax(h_i / T)),  T `temperature`   (SSD's code)
    paper      mean_i KL(softmax(h_i) || softmax(z_i))                             (Eq. 9)
    mse        mean over all entries of (h - z)^2                                  (Table 5)

The default is "reference", because the published numbers come from it; Table 5 finds little difference between them. h
and z are used as the networks return them, un-normalised (z before any other add-on, such as hard separation, changes
it), and gradients flow into both.

Deviation of the default from Eq. 9: reversed direction, and temperature 0.5 without a factor T^2.
"""

from dataclasses import dataclass

import torch
from torch import nn

from fedssl.losses import projector_distillation
from fedssl.methods.api import Batch, Context, Terms
from fedssl.methods.composition.part import Online, Part
from fedssl.protocol.methods.add_ons import PDConfig


@dataclass(frozen=True)
class ProjectorDistillation(Part):
    """Bring h and z together."""

    config: PDConfig

    def terms(self, online: Online, modules: nn.ModuleDict, batch: Batch, ctx: Context) -> Terms:
        losses = [
            projector_distillation(h, z, self.config.temperature, self.config.variant)
            for h, z in zip(online.h, online.projected, strict=True)
        ]
        return {"pd": self.config.delta * torch.stack(losses).mean()}, {}
