"""A linear classifier on an existing encoder, trained with the labels of the sites that have some.

FedAvg (McMahan et al. 2017, Algorithm 1) of cross-entropy; with several labels per image, the mean of one binary
cross-entropy per pair of an image and a label. The encoder is frozen, or fine-tuned with a learning rate of its own. A
client's weight in the mean is the number of its labelled training images: neither its unlabelled images nor those that
are held out are trained on or counted. A class that a client does not have only lowers that class's logits there, as in
any FedAvg of unequal sites.

The first weights of the classifier are those in `model.initial`, for example the exact ones of `ridge-probe`, or zeros.
Each client first measures the classifier that it receives on its held-out images (`held_out_accuracy`).

With `personal_pull`, each client also trains a classifier v of its own, on the same batches and by the same optimiser
(Ditto, Li et al. 2021, "Ditto: Fair and Robust Federated Learning Through Personalization", Eq. 1 and Algorithm 1):

    min_v  F_k(v) + (personal_pull / 2) ||v - w||^2,

where w is the classifier that the client received. It stays on the client, and changes neither the encoder nor w. Its
first weights are those of the first w that the client receives; the paper starts both from the same weights, too. The
paper solves for v with separate steps; here each step of w is also one of v.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from fedssl.artifacts.tensors import Tensors
from fedssl.errors import DataError, SpecError
from fedssl.losses import proximal
from fedssl.methods.api import Batch, ClientData, Context, Metrics, ServerState, Terms, Update
from fedssl.methods.composition.client import ClientAlgorithm
from fedssl.methods.composition.embedding import embed
from fedssl.methods.composition.modules import copy_of, encoder_width
from fedssl.methods.composition.part import ENCODER, Objective, Online, Wire
from fedssl.methods.objectives.cross_entropy import CLASSIFIER
from fedssl.models.classifier import BIAS, CLASSES, PERSONAL, WEIGHT, classes_digest
from fedssl.protocol.methods.classifier import ClassifierConfig
from fedssl.protocol.plan import ArtifactPlan, TensorSpec

HELD_OUT_ACCURACY = "held_out_accuracy"
_RECEIVED = "received_classifier"


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
        return {"cross_entropy": self.cross_entropy(modules[CLASSIFIER](online.h[0]).float(), batch)}, {}

    def cross_entropy(self, logits_BC: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the loss of a classifier's logits for a batch."""
        assert batch.labels is not None, "`begin` has checked it"
        if self.config.multi_label:
            return F.binary_cross_entropy_with_logits(logits_BC, batch.labels.float())
        return F.cross_entropy(logits_BC, batch.labels)

    @property
    def wire(self) -> Wire:
        return Wire(plan=_plan, initial_state=self._initial_state, aggregate=_keep)

    @property
    def _digest(self) -> torch.Tensor:
        return classes_digest(self.config.classes, multi_label=self.config.multi_label)

    def _initial_state(self, modules: nn.ModuleDict, ctx: Context) -> Tensors:
        return {CLASSES: self._digest}


@dataclass(frozen=True)
class PersonalClassifier(SiteClassifier):
    """The classifier of all sites, and one of the client's own next to it."""

    kept: ClassVar[tuple[str, ...]] = (PERSONAL,)

    def heads(self, modules: nn.ModuleDict, ctx: Context) -> dict[str, nn.Module]:
        heads = super().heads(modules, ctx)
        own, received = copy.deepcopy(heads[CLASSIFIER]), copy_of(heads[CLASSIFIER])
        return {**heads, PERSONAL: own, _RECEIVED: received}

    def start_cold(self, modules: nn.ModuleDict, ctx: Context) -> None:
        modules[PERSONAL].load_state_dict(modules[CLASSIFIER].state_dict())

    def begin(self, modules: nn.ModuleDict, broadcast: Tensors, data: ClientData, ctx: Context) -> None:
        super().begin(modules, broadcast, data, ctx)
        modules[_RECEIVED].load_state_dict(modules[CLASSIFIER].state_dict())

    def terms(self, online: Online, modules: nn.ModuleDict, batch: Batch, ctx: Context) -> Terms:
        losses, metrics = super().terms(online, modules, batch, ctx)
        own = modules[PERSONAL]
        losses["personal_cross_entropy"] = self.cross_entropy(own(online.h[0].detach()).float(), batch)
        assert self.config.personal_pull is not None, "the registry makes it only then"
        now, received = dict(own.named_parameters()), dict(modules[_RECEIVED].named_parameters())
        losses["personal_pull"] = proximal(now, received, self.config.personal_pull)
        return losses, metrics


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
        images, labels = data.at(chosen).images, data.labels[chosen]
        measured = {}
        for name, prefix in ((CLASSIFIER, ""), (PERSONAL, "personal_")):
            if name not in modules:
                continue
            logits_NC = embed([modules[ENCODER], modules[name]], images, ctx)
            right = (logits_NC >= 0) == labels.bool() if labels.ndim == 2 else logits_NC.argmax(dim=1) == labels
            measured[f"{prefix}{HELD_OUT_ACCURACY}"] = float(right.double().mean())
        return measured


def site_classifier(config: ClassifierConfig) -> SiteClassifier:
    """Return the objective, with a personal classifier if the config asks for one."""
    return PersonalClassifier(config) if config.has_personal_heads else SiteClassifier(config)


def _plan(modules: nn.ModuleDict, ctx: Context) -> ArtifactPlan:
    return ArtifactPlan(broadcast=(TensorSpec(name=CLASSES, dtype="I64", shape=(4,), reduce="keep"),), update=())


def _keep(state: ServerState, updates: Sequence[Update], ctx: Context) -> Tensors:
    return {CLASSES: state[CLASSES]}
