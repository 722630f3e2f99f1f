"""Supervised FedAvg: cross-entropy on labelled clients, the upper baseline of FedU's Table 1.

McMahan et al. 2017, Algorithm 1. FedU does not describe the setting. Here: the same optimiser as in the self-supervised
runs, and one augmented view. The classifier is linear, on the encoder's representation, and averaged like everything
else.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import nn

from fedssl.artifacts.tensors import Tensors
from fedssl.errors import MethodError
from fedssl.methods.api import Batch, ClientData, Context, Terms
from fedssl.methods.composition.modules import encoder_width
from fedssl.methods.composition.part import Objective, Online
from fedssl.protocol.methods.supervised import SupervisedConfig

CLASSIFIER = "classifier"


@dataclass(frozen=True)
class CrossEntropy(Objective):
    """Cross-entropy of a linear classifier."""

    config: SupervisedConfig

    shared: ClassVar[tuple[str, ...]] = (CLASSIFIER,)
    num_views: ClassVar[int] = 1

    def heads(self, modules: nn.ModuleDict, ctx: Context) -> dict[str, nn.Module]:
        return {CLASSIFIER: nn.Linear(encoder_width(modules), self.config.num_classes)}

    def begin(self, modules: nn.ModuleDict, broadcast: Tensors, data: ClientData, ctx: Context) -> None:
        if data.labels is None:
            raise MethodError("supervised needs labelled images at every client; these have no labels")
        if len(data) and int(data.labels.max()) >= self.config.num_classes:
            raise MethodError(
                f"a label is {int(data.labels.max())}, but method.num_classes is {self.config.num_classes}: raise it"
            )

    def terms(self, online: Online, modules: nn.ModuleDict, batch: Batch, ctx: Context) -> Terms:
        assert batch.labels is not None, "`begin` has checked it"
        return {"cross_entropy": F.cross_entropy(modules[CLASSIFIER](online.h[0]).float(), batch.labels)}, {}
