"""FedDINO: FedAvg of DINO, with the teacher local and persistent.

Caron et al. 2021, Eq. 2 to 4 and Algorithm 1. The student's logits of an image are s = n(g(f(x))) n(W)^T: encoder f,
projector g, prototypes W (K, D), n the unit vector, that is, the last layer of the authors' code with its scale fixed
to 1. The loss is the cross-entropy of softmax((t - c) / tau_t), t the teacher's logits of one view, against
log-softmax(s / tau_s) of each other view, averaged over all pairs (`fedssl.losses.dino`). With `data.local_crops`, the
student also sees smaller crops (multi-crop, Section 3.1): t is of the two views, s of them and of the crops.

- The teacher follows the student in each step, t = m t + (1 - m) s, parameters only: its BatchNorm keeps its own
  statistics. m is `target_momentum`, and grows to 1 by a cosine over the run.
- c is the moving average of the teacher's mean logits (`dino_center`), after each step. With micro-batches, all parts
  of a batch have the same c, and their mean moves it once.
- tau_t is constant in a round and goes linearly from `first_teacher_temperature` to `teacher_temperature` over the
  first rounds; in the authors' code, over the first epochs.
- In the first `num_frozen_rounds` rounds W gets no gradient, as in the first epoch of the authors' code.

Student, projector and prototypes are averaged and overwrite the client's. Teacher and c stay with the client, as BYOL's
target does in FedU (Zhuang et al. 2021): DINO's paper has no federation. Cold start: the teacher is a copy of the
student just received, and c is 0.

DINO's two views differ in blur and solarisation: `data.second_view`. Add-ons see only the two views.

Deviations: the projector comes from the run's model config; DINO's own is 2048-2048-256 with `activation = "gelu"`
and without BatchNorm. It starts from PyTorch's first weights, while DINO's linear layers start from a truncated normal
of deviation 0.02.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedssl.artifacts.tensors import Tensors
from fedssl.losses import dino, dino_center
from fedssl.methods.api import Batch, ClientData, Context, Schedule, Terms
from fedssl.methods.composition.follower import PROTOTYPES, TEACHER
from fedssl.methods.composition.modules import embed_local, module_of
from fedssl.methods.composition.part import PROJECTOR, Objective, Online
from fedssl.methods.composition.progress import PROGRESS, Progress, cosine_to_one, progress
from fedssl.protocol.methods.feddino import FedDINOConfig
from fedssl.unit_vectors import unit

CENTER = "center"


class Prototypes(nn.Module):
    """From embeddings (B, D) to their cosines with K prototypes, (B, K)."""

    def __init__(self, width: int, num_prototypes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_prototypes, width))
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))  # as PyTorch's linear layers
        self.is_frozen = False

    def forward(self, z_BD: Tensor) -> Tensor:
        weight_KD = self.weight.detach() if self.is_frozen else self.weight
        with torch.autocast(z_BD.device.type, enabled=False):  # cosines are computed in float32
            return F.linear(unit(z_BD.float()), unit(weight_KD))


class Center(nn.Module):
    """c (K), the mean of the current step's logits, and the teacher's temperature in this round."""

    current: Tensor
    total: Tensor
    num_logits: Tensor
    temperature: Tensor

    def __init__(self, num_prototypes: int) -> None:
        super().__init__()
        self.register_buffer("current", torch.zeros(num_prototypes))
        for name, shape in (("total", (num_prototypes,)), ("num_logits", ()), ("temperature", ())):
            self.register_buffer(name, torch.zeros(shape), persistent=False)

    @torch.no_grad()
    def collect(self, logits_NK: Tensor) -> None:
        """Add the teacher's logits of a part of the step's batch."""
        self.total.add_(logits_NK.float().sum(dim=0))
        self.num_logits.add_(len(logits_NK))

    @torch.no_grad()
    def move(self, momentum: float) -> None:
        """Move c by the mean of what was collected, and forget it. c stays if the loss was left out (FedX)."""
        moved = dino_center(self.current, [(self.total / self.num_logits)[None]], momentum)
        self.current.copy_(torch.where(self.num_logits > 0, moved, self.current))
        self.total.zero_()
        self.num_logits.zero_()


@dataclass(frozen=True)
class DINO(Objective):
    """Predict the teacher's distribution over prototypes of the other view."""

    config: FedDINOConfig

    shared: ClassVar[tuple[str, ...]] = (PROJECTOR, PROTOTYPES)
    kept: ClassVar[tuple[str, ...]] = (*TEACHER.names.values(), CENTER)

    def heads(self, modules: nn.ModuleDict, ctx: Context) -> dict[str, nn.Module]:
        width, num_prototypes = self.config.embedding_width(ctx.spec.model), self.config.num_prototypes
        prototypes = {PROTOTYPES: Prototypes(width, num_prototypes)}
        teacher = TEACHER.built(nn.ModuleDict({**dict(modules.items()), **prototypes}))
        return {**prototypes, **teacher, CENTER: Center(num_prototypes), PROGRESS: Progress()}

    def start_cold(self, modules: nn.ModuleDict, ctx: Context) -> None:
        TEACHER.restart(modules)

    def begin(self, modules: nn.ModuleDict, broadcast: Tensors, data: ClientData, ctx: Context) -> None:
        center(modules).temperature.fill_(self.config.teacher_temperature_in(ctx.round_number))
        prototypes(modules).is_frozen = ctx.round_number <= self.config.num_frozen_rounds

    def start_steps(self, modules: nn.ModuleDict, schedule: Schedule, ctx: Context) -> None:
        progress(modules).start(schedule, ctx)

    def terms(self, online: Online, modules: nn.ModuleDict, batch: Batch, ctx: Context) -> Terms:
        own, num_views = center(modules), len(batch.views)
        teacher_NK = TEACHER.embed(modules, torch.cat(batch.views))
        students = prototypes(modules)(torch.cat(online.z)).chunk(num_views)
        if local := embed_local(modules, batch):
            students = (*students, *prototypes(modules)(torch.cat(local)).chunk(len(local)))
        # The temperature is a tensor, so that one program serves all rounds: (t - c) / tau is t / tau - c / tau.
        teachers = (teacher_NK / own.temperature).chunk(num_views)
        loss = dino(students, teachers, own.current / own.temperature, self.config.student_temperature, 1.0)
        own.collect(teacher_NK)
        return {"dino": loss}, {}

    def step_constants(self, modules: nn.ModuleDict, ctx: Context) -> bool:
        return prototypes(modules).is_frozen

    def after_step(self, modules: nn.ModuleDict, ctx: Context) -> None:
        momentum, done = self.config.target_momentum, progress(modules)
        center(modules).move(self.config.center_momentum)
        if self.config.target_momentum_schedule == "constant":
            TEACHER.follow(modules, momentum)
        else:
            TEACHER.follow(modules, cosine_to_one(momentum, done.rounds() / ctx.spec.num_rounds))
        done.advance()


def prototypes(modules: nn.ModuleDict) -> Prototypes:
    """Return W."""
    return module_of(modules, PROTOTYPES, Prototypes)


def center(modules: nn.ModuleDict) -> Center:
    """Return c."""
    return module_of(modules, CENTER, Center)
