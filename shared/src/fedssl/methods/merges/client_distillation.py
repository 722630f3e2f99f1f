"""A client with its own encoder may learn the similarities of FLESD's student before it trains.

The student's weights, which are the broadcast, do not fit its network. Their similarities do:

    S_ij = cos(z_i, z_j),   z_i the student's embedding of public image i, not augmented, in eval mode

and the client's network is trained to find the same among the public images, by the coordinator's own training
(`reducers/similarity_distillation.py`, with this one teacher) for `client_distillation.num_epochs` epochs, from its
own weights of the last round. Nothing else is broadcast or sent for this.

This step is not part of FLESD, whose clients with other architectures take nothing from the ensemble. It is off unless
the config asks for it. In the first round nothing has been distilled yet, so there is nothing to learn.
"""

from dataclasses import dataclass

from torch import nn

from fedssl.artifacts.tensors import Tensors
from fedssl.methods.api import Context
from fedssl.methods.composition.embedding import embed
from fedssl.methods.composition.modules import load_modules, tensors_of
from fedssl.methods.reducers.similarity import Ensemble, public_images
from fedssl.methods.reducers.similarity_distillation import STUDENT, SimilarityDistillation, network
from fedssl.protocol.methods.distillation import ClientDistillationConfig, DistillationConfig


@dataclass(frozen=True)
class LearnFromStudent:
    """Trains a client's own network on the student's similarities."""

    config: DistillationConfig
    lesson: ClientDistillationConfig

    def receive(self, modules: nn.ModuleDict, broadcast: Tensors, ctx: Context) -> None:
        """Train the network in `modules` on the similarities that the student in `broadcast` finds."""
        if ctx.round_number == 1:
            return
        model, public = ctx.spec.model, public_images(ctx)
        student = network(model.encoder, broadcast, "broadcast", ctx).to(ctx.device)
        z_ND = embed(list(student.values()), public.images, ctx)
        own = [name for name in STUDENT if name in modules]
        task = SimilarityDistillation(
            self.config.model_copy(update={"num_epochs": self.lesson.num_epochs}),
            Ensemble([z_ND], "representations-f32", len(public)),
            tensors_of(modules, own),
            self.config.encoder_of(ctx.client_id, model),
        )
        taught, _ = ctx.distil(task, ctx)
        load_modules(modules, own, taught, "distilled network")
