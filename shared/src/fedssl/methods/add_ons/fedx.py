"""FedX as an add-on: two-sided knowledge distillation on any objective with two views and a projector.

Han et al. 2022, FedX: Unsupervised Federated Learning with Cross Knowledge Distillation, Eq. 6-13. The objective's own
loss is L_c^local; `local_contrastive`, `local_relational`, `global_contrastive` and `global_relational` weigh it and
the other three, each 1 in the paper and 0 in its ablation (Fig. 5). Table 2's "L_local-KD only" has both global weights
at 0, and the add-on `proximal` or `scaffold` next to it.

- h, the prediction layer of Eq. 9, is `fedx_predictor`: separate from the objective's own predictor, sent and averaged.
- F is `fedx_teacher`: frozen copies of the broadcast's encoder and projector, in evaluation mode, loaded in every
  round, neither kept nor sent. Its projector's output is z^g; it has no predictor.
- B_r is the stream `references`: as many other images of the client as the batch has, one view each. They pass the
  online network together with the views if the objective's views pass as one batch. tau is `temperature`.

Variants: `rel_kl` "reference" is the authors' code, which exchanges the arguments of the divergences in Eq. 7 and 11.
It is the default because the published numbers come from it. "paper" is the printed Jensen-Shannon divergence.
`variant` does the same for Eq. 9. "reference", the default, is NT-Xent on (p1, g2): both are anchors, the positive is
in the denominator, gradients flow through p1. "paper" is as printed: only p1 are anchors, and the denominator sums over
the other samples' p1 and g2, without the positive. Eq. 10 is only implemented as in the code: anchors are predictions
of both views, references the teacher's embeddings.

`relational` matters on objectives with a predictor g. "projections", the default, takes z of Eq. 6 from the projector,
as on SimCLR (Eq. 3). "predictions" takes z = g(f(x)) as Eq. 5 defines it for BYOL; the random images then pass g too,
as a batch of their own. The authors' code has no objective with a predictor, so it does not decide between the two.

A batch here counts the anchors: FedX's batch of 128 is 64 anchors and 64 references, so `batch_size` 64. On FedBYOL and
FedU (methods not in the authors' code), h is a second predictor besides BYOL's g, and DAPU applies only to g.

Deviation: the teacher embeds only the second views and the references, because the equations use nothing else; in the
authors' code it embeds the first views too. Cold start: nothing is kept.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from fedssl.artifacts.tensors import Tensors
from fedssl.errors import MethodError
from fedssl.losses import cross_model_contrast, nt_xent, relational_divergence
from fedssl.methods.api import Batch, ClientData, Context, Losses, Terms
from fedssl.methods.composition.modules import copy_of, load_modules, module_of
from fedssl.methods.composition.part import ENCODER, PREDICTOR, PROJECTOR, Online, Part
from fedssl.methods.composition.streams import REFERENCES
from fedssl.models import build_mlp
from fedssl.protocol.methods.add_ons import FedXConfig
from fedssl.protocol.model import MLPConfig

_OWN_PREDICTOR, _TEACHER = "fedx_predictor", "fedx_teacher"


@dataclass(frozen=True)
class CrossDistillation(Part):
    """Distil the relations among a client's images, locally and from the global model."""

    config: FedXConfig

    shared: ClassVar[tuple[str, ...]] = (_OWN_PREDICTOR,)

    @property
    def streams(self) -> tuple[str, ...]:
        return (REFERENCES,) if self.config.local_relational or self.config.global_relational else ()

    @property
    def objective_weight(self) -> float:
        return self.config.local_contrastive

    @property
    def _is_global(self) -> bool:
        return bool(self.config.global_contrastive or self.config.global_relational)

    def heads(self, modules: nn.ModuleDict, ctx: Context) -> dict[str, nn.Module]:
        if not self._is_global:
            return {}
        projector = ctx.spec.model.projector
        if projector is None:
            raise MethodError("fedx needs a projector")  # the spec's check refuses this earlier
        width = projector.out_dim
        head = self.config.predictor or MLPConfig(hidden_dims=(width,), batch_norm=False)
        teacher = nn.ModuleDict({name: copy_of(modules[name]) for name in (ENCODER, PROJECTOR)})
        return {_OWN_PREDICTOR: build_mlp(head, width, width), _TEACHER: teacher}

    def begin(self, modules: nn.ModuleDict, broadcast: Tensors, data: ClientData, ctx: Context) -> None:
        if self._is_global:
            teacher = module_of(modules, _TEACHER, nn.ModuleDict)
            load_modules(teacher, teacher.keys(), broadcast, "broadcast")
            teacher.eval()

    def terms(self, online: Online, modules: nn.ModuleDict, batch: Batch, ctx: Context) -> Terms:
        losses: Losses = {}
        if self.config.local_relational:
            divergence = self._divergence(*self._related(online, modules))
            losses["local_relational"] = self.config.local_relational * divergence
        if self._is_global:
            losses.update(self._global_terms(online, modules, batch))
        return losses, {}

    def _related(self, online: Online, modules: nn.ModuleDict) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return z of both views and of the random images, as `relational` requires."""
        _, references = online.extra[REFERENCES]
        if self.config.relational == "projections":
            return online.z[0], online.z[1], references
        predictor = modules[PREDICTOR]
        first, second = online.predicted or tuple(predictor(z) for z in online.z)
        return first, second, predictor(references)

    def _global_terms(self, online: Online, modules: nn.ModuleDict, batch: Batch) -> Losses:
        seen = {}
        if self.config.global_contrastive:
            seen["view"] = batch.views[1]
        if self.config.global_relational:
            seen["references"] = batch.extra[REFERENCES]
        teacher = module_of(modules, _TEACHER, nn.ModuleDict)
        with torch.no_grad():
            embeddings = teacher[PROJECTOR](teacher[ENCODER](torch.cat(list(seen.values())))).chunk(len(seen))
        g = dict(zip(seen, embeddings, strict=True))
        losses: Losses = {}
        views = online.z[: 2 if "references" in g else 1]
        p = modules[_OWN_PREDICTOR](torch.cat(views)).chunk(len(views))
        if "view" in g:
            loss = cross_model_contrast if self.config.variant == "paper" else nt_xent
            contrast = loss(p[0], g["view"], self.config.temperature)
            losses["global_contrastive"] = self.config.global_contrastive * contrast
        if "references" in g:
            divergence = self._divergence(p[0], p[1], g["references"])
            losses["global_relational"] = self.config.global_relational * divergence
        return losses

    def _divergence(self, a_BD: torch.Tensor, b_BD: torch.Tensor, references_RD: torch.Tensor) -> torch.Tensor:
        return relational_divergence(a_BD, b_BD, references_RD, self.config.temperature, self.config.rel_kl)
