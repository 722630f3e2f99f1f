"""FLESD's client: it sends similarities of public images in place of weights, and may train an encoder of its own."""

from dataclasses import dataclass

from torch import nn

from fedssl.artifacts.tensors import Tensors
from fedssl.methods.api import ClientState, Context
from fedssl.methods.composition.client import ClientAlgorithm
from fedssl.methods.composition.part import Part
from fedssl.methods.merges.client_distillation import LearnFromStudent
from fedssl.methods.reducers.similarity import SimilarityUpload
from fedssl.models.initialisation import on_meta_device
from fedssl.protocol.methods.distillation import DistillationConfig
from fedssl.protocol.model import EncoderConfig


@dataclass(frozen=True, kw_only=True)
class SimilarityClient(ClientAlgorithm):
    """A client of the reducer `distillation`. If its encoder is its own, it keeps its network and does not take the
    global one; it may learn from it instead."""

    config: DistillationConfig

    @property
    def upload(self) -> SimilarityUpload:
        """The tensors that replace the weights in the update."""
        return SimilarityUpload(self.config)

    @property
    def parts(self) -> tuple[Part, ...]:
        return (self.host, *self.add_ons, self.merge_rule, self.upload)

    @property
    def sends_modules(self) -> bool:
        return False

    def keeps_modules(self, ctx: Context) -> bool:
        return ctx.client_id in self.config.own_encoders

    def encoder(self, ctx: Context) -> EncoderConfig:
        return self.config.encoder_of(ctx.client_id, ctx.spec.model)

    @property
    def compiles(self) -> bool:
        """False if clients' encoders differ: they would be compiled in turn, in every round."""
        return not self.config.own_encoders and all(part.compiles for part in self.parts)

    def receive(self, modules: nn.ModuleDict, broadcast: Tensors, state: ClientState | None, ctx: Context) -> None:
        lesson = self.config.client_distillation
        if ctx.client_id not in self.config.own_encoders:
            self.merge_rule.receive(modules, self.sent(modules), broadcast, state, ctx)
        elif lesson is not None:
            LearnFromStudent(self.config, lesson).receive(modules, broadcast, ctx)

    def reduced(self, ctx: Context) -> frozenset[str]:
        with on_meta_device():
            plan = self.upload.wire.plan(self.modules(ctx), ctx)
        return frozenset(tensor.name for tensor in plan.update)
