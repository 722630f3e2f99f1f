"""FedBYOL: FedAvg of BYOL, with the target network local and persistent.

Grill et al. 2020, Eq. 2, symmetrised: L = (2 - 2 cos(p1, sg t2)) + (2 - 2 cos(p2, sg t1)); federated as in FedU
(Zhuang et al. 2021). The online encoder, projector and predictor are averaged and overwrite the client's. The target
(encoder and projector) is the client's own and follows by t = m t + (1 - m) o after every step, parameters only: its
BatchNorm stays in training mode and keeps its own statistics.

With `target_momentum_schedule` "cosine", m grows to 1 in each step of the whole run: 1 - (1 - m) (1 + cos(pi k/K)) / 2
(BYOL, Section 3.3). k/K is the share of the run that is done, by rounds and by the client's own steps within one.

With `data.local_crops`, M smaller crops predict, too, and the targets remain those of the two views: L is then 2 times
the mean of 2 - 2 cos(p, sg t) over all 2 + 2 M pairs of different views, which is the loss above for M = 0. DINO's
authors train BYOL with crops (Caron et al. 2021, Table 14 and Appendix E) and print no formula; these are the pairs of
their Eq. 3. Their BYOL was worse with crops than without (64.8 and 71.4 % of a ViT-S's linear probe on ImageNet).

Cold start: the target is a copy of the online network just received.
Deviation: in the first round, EasyFL's target is the online module itself, so its moving average has no effect. Here it
is a copy from the start, as both papers describe.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import nn

from fedssl.errors import MethodError
from fedssl.losses import byol_regression
from fedssl.methods.api import Batch, Context, Schedule, Terms
from fedssl.methods.composition.follower import TARGET
from fedssl.methods.composition.modules import embed_local
from fedssl.methods.composition.part import PREDICTOR, PROJECTOR, Objective, Online
from fedssl.methods.composition.progress import PROGRESS, Progress, cosine_to_one, progress
from fedssl.models import build_mlp
from fedssl.protocol.methods.fedbyol import BYOLConfig


@dataclass(frozen=True)
class BYOL(Objective):
    """Predict the target network's embedding of the other view."""

    config: BYOLConfig

    shared: ClassVar[tuple[str, ...]] = (PROJECTOR, PREDICTOR)
    kept: ClassVar[tuple[str, ...]] = tuple(TARGET.names.values())
    joint_forward: ClassVar[bool] = False

    def heads(self, modules: nn.ModuleDict, ctx: Context) -> dict[str, nn.Module]:
        model = ctx.spec.model
        if model.projector is None:
            raise MethodError("fedbyol needs a projector")  # the spec's check refuses this earlier
        width = model.projector.out_dim
        steps = {PROGRESS: Progress()} if self._is_scheduled else {}
        return {PREDICTOR: build_mlp(model.predictor, width, width), **TARGET.built(modules), **steps}

    @property
    def _is_scheduled(self) -> bool:
        return self.config.target_momentum_schedule == "cosine"

    def start_steps(self, modules: nn.ModuleDict, schedule: Schedule, ctx: Context) -> None:
        if self._is_scheduled:
            progress(modules).start(schedule, ctx)

    def start_cold(self, modules: nn.ModuleDict, ctx: Context) -> None:
        TARGET.restart(modules)

    def complete(self, online: Online, modules: nn.ModuleDict, batch: Batch, ctx: Context) -> Online:
        targets = tuple(TARGET.embed(modules, view) for view in batch.views)
        return replace(online, predicted=tuple(modules[PREDICTOR](z) for z in online.z), targets=targets)

    def terms(self, online: Online, modules: nn.ModuleDict, batch: Batch, ctx: Context) -> Terms:
        (p1, p2), (t1, t2) = online.predicted, online.targets
        loss = byol_regression(p1, t2) + byol_regression(p2, t1)
        if local := embed_local(modules, batch):
            predicted = modules[PREDICTOR](torch.cat(local)).chunk(len(local))
            loss = loss + sum(byol_regression(p, t) for p in predicted for t in (t1, t2))
            loss = loss / (1 + len(local))  # two times the mean over the 2 + 2 M pairs
        return {"regression": loss}, {}

    def after_step(self, modules: nn.ModuleDict, ctx: Context) -> None:
        if not self._is_scheduled:
            TARGET.follow(modules, self.config.target_momentum)
            return
        done = progress(modules)
        TARGET.follow(modules, cosine_to_one(self.config.target_momentum, done.rounds() / ctx.spec.num_rounds))
        done.advance()
