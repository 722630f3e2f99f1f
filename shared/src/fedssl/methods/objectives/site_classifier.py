"""A linear classifier on an encoder that exists, trained with the labels of the sites that have some.

FedAvg (McMahan et al. 2017, Algorithm 1) of cross-entropy; with several labels per image, the mean of one binary
cross-entropy per pair of an image and a label. The encoder is frozen, or fine-tuned with a learning rate of its own. A
client's weight in the mean is the number of its labelled training images: neither its unlabelled images nor those that
are held out are trained on or counted. A class that a client does not have only lowers that class's logits there, as in
any FedAvg of unequal sites.

The first weights of the classifier are those in `model.initial`, for example the exact ones of `ridge-probe`, or zeros.
Each client first measures the classifier that it receives on its held-out images (`held_out_accuracy`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from fedssl.artifacts.tensors import Tensors
from fedssl.errors import DataError, SpecError
from fedssl.methods.api import Batch, ClientData, Context, Metrics, ServerState, Terms, Update
from fedssl.methods.composition.client import ClientAlgorithm
from fedssl.methods.composition.embedding import embed
from fedssl.methods.composition.modules import encoder_width
from fedssl.methods.composition.part import ENCODER, Objective, Online, Wire
from fedssl.methods.objectives.cross_entropy import CLASSIFIER
from fedssl.models.classifier import BIAS, CLASSES, WEIGHT, classes_digest
from fedssl.protocol.methods.classifier import ClassifierConfig
from fedssl.protocol.plan import ArtifactPlan, TensorSpec

HELD_OUT_ACCURACY = "held_out_accuracy"


@dataclass(frozen=True)
class SiteClassifier(Objective):
    """Cross-entropy of a linear classifier over the labelled training images of a site."""

    config: ClassifierConfig

    shared: ClassVar[tuple[str, ...]] = (CLASSIFIER,)
    num_views: ClassVar[int] = 1

    def heads(self, modules: nn.ModuleDict, ctx: Context) -> dict[str, nn.Module]:
        classifier = nn.Linear(encoder_width(modules), len(self.config.classes))
        for parameter in classifier.parameters():
            nn.init.zeros_(parameter)
        return {CLASSIFIER: classifier}

    def load_start(self, modules: nn.ModuleDict, tensors: Tensors, ctx: Context) -> str:
        if self.config.start == "zero":
            return ""
        if not {WEIGHT, BIAS, CLASSES} <= tensors.keys():
            if self.config.start is None:
                return ""
            raise SpecError(
                "method.start is given, but the weights of model.initial hold no classifier of named classes: give a "
                "run of ridge-probe or classifier, or leave method.start out"
            )
        if not torch.equal(tensors[CLASSES], self._digest):
            raise SpecError(
                "the classifier in model.initial has other classes than method.classes, or the same in another order: "
                "list the classes of that run, or set method.start to zero"
            )
        classifier = modules[CLASSIFIER]
        classifier.load_state_dict({"weight": tensors[WEIGHT], "bias": tensors[BIAS]})
        return f"its classifier of {len(self.config.classes)} classes"

    def begin(self, modules: nn.ModuleDict, broadcast: Tensors, data: ClientData, ctx: Context) -> None:
        if data.labels is None or data.held_out is None:
            raise DataError(f"{ctx.client_id} has no labels, which classifier needs: it cannot take part")
        if not data.num_trained:
            raise DataError(
                f"{ctx.client_id} has no labelled image to train on: label more, or lower method.test_share"
            )

    def terms(self, online: Online, modules: nn.ModuleDict, batch: Batch, ctx: Context) -> Terms:
        assert batch.labels is not None, "`begin` has checked it"
        logits_BC = modules[CLASSIFIER](online.h[0]).float()
        if self.config.multi_label:
            loss = F.binary_cross_entropy_with_logits(logits_BC, batch.labels.float())
        else:
            loss = F.cross_entropy(logits_BC, batch.labels)
        return {"cross_entropy": loss}, {}

    @property
    def wire(self) -> Wire:
        return Wire(plan=_plan, initial_state=self._initial_state, aggregate=_keep)

    @property
    def _digest(self) -> torch.Tensor:
        return classes_digest(self.config.classes, multi_label=self.config.multi_label)

    def _initial_state(self, modules: nn.ModuleDict, ctx: Context) -> Tensors:
        return {CLASSES: self._digest}


@dataclass(frozen=True)
class ClassifierClient(ClientAlgorithm):
    """A client that trains on its labelled images only."""

    @property
    def config(self) -> ClassifierConfig:
        """Return the config of the objective."""
        assert isinstance(self.host, SiteClassifier), "the registry makes no other"
        return self.host.config

    def freezes(self, ctx: Context) -> bool:
        return self.config.encoder_learning_rate is None or super().freezes(ctx)

    def learning_rate_factors(self, ctx: Context) -> Mapping[str, float]:
        own = self.config.encoder_learning_rate
        return {} if own is None else {ENCODER: own / ctx.spec.training.optimizer.learning_rate}

    def trained(self, data: ClientData) -> ClientData:
        return data.trained()

    def judge(self, modules: nn.ModuleDict, data: ClientData, ctx: Context) -> Metrics:
        assert data.labels is not None, "`begin` has checked it"
        assert data.held_out is not None, "`begin` has checked it"
        chosen = data.held_out.nonzero().flatten()
        if not len(chosen):
            return {}
        logits_NC = embed([modules[ENCODER], modules[CLASSIFIER]], data.at(chosen).images, ctx)
        labels = data.labels[chosen]
        right = (logits_NC >= 0) == labels.bool() if labels.ndim == 2 else logits_NC.argmax(dim=1) == labels
        return {HELD_OUT_ACCURACY: float(right.double().mean())}


def _plan(modules: nn.ModuleDict, ctx: Context) -> ArtifactPlan:
    return ArtifactPlan(broadcast=(TensorSpec(name=CLASSES, dtype="I64", shape=(4,), reduce="keep"),), update=())


def _keep(state: ServerState, updates: Sequence[Update], ctx: Context) -> Tensors:
    return {CLASSES: state[CLASSES]}
