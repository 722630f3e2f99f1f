"""FedMAE: FedAvg of masked autoencoders.

He et al. 2022, Section 3, as in the authors' code. A share `mask_ratio` of the N patches of an image is hidden, drawn
again for each image and step. The encoder, a ViT, gets the class token and the visible patches with their positions.
The decoder gets their tokens after the encoder's last LayerNorm, one learnt token for each hidden patch, and fixed
positions, and predicts pixels. The loss is the mean squared error of the hidden patches, whose pixels are standardised
patch by patch with `normalize_pixels` (`fedssl.losses.masked_reconstruction`).

Encoder and decoder are averaged and overwrite the client's. The decoder is not part of what is evaluated or exported.
Cold start: nothing is kept.

Add-ons see the representation of the visible patches, as h and as z.

Deviations: the encoder's positions are learnt, and its first weights are timm's; in the authors' code, positions are
fixed and linear maps start Xavier-uniform. With `pooling = "mean"` the last LayerNorm is `fc_norm`, which the encoder
applies to the mean of its tokens; here it normalises each token. Images are the views of the spec's augmentation; MAE
only crops and flips.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from fedssl.artifacts.tensors import Tensors
from fedssl.data_parallel import split_rows
from fedssl.losses import masked_reconstruction
from fedssl.methods.api import Batch, ClientData, Context, Terms
from fedssl.methods.composition.modules import module_of
from fedssl.methods.composition.part import ENCODER, MaskedTokens, Objective, Online
from fedssl.methods.composition.sampler import Sampler, generator_of
from fedssl.models import VisionTransformer
from fedssl.models.patches import PatchDecoder, patchify, random_masking
from fedssl.protocol.methods.fedmae import FedMAEConfig

DECODER, MASKS = "decoder", "masks"


@dataclass(frozen=True)
class MAE(Objective):
    """Predict the pixels of hidden patches."""

    config: FedMAEConfig

    shared: ClassVar[tuple[str, ...]] = (DECODER,)
    num_views: ClassVar[int] = 1
    compiles: ClassVar[bool] = False  # the compiler does not support drawing from a generator

    def heads(self, modules: nn.ModuleDict, ctx: Context) -> dict[str, nn.Module]:
        config, encoder, data = self.config, _encoder(modules), ctx.spec.data
        decoder = PatchDecoder(
            encoder.feature_dim,
            encoder.num_patches,
            encoder.patch_size**2 * data.channels,
            width=config.decoder_width,
            depth=config.decoder_depth,
            num_heads=config.decoder_heads,
        )
        return {DECODER: decoder, MASKS: Sampler()}

    def begin(self, modules: nn.ModuleDict, broadcast: Tensors, data: ClientData, ctx: Context) -> None:
        module_of(modules, MASKS, Sampler).start(ctx.seed("masks"), ctx.device)

    def online(self, modules: nn.ModuleDict, batch: Batch, ctx: Context) -> Online:
        [images], encoder = batch.views, _encoder(modules)
        shape, generator = (len(images), encoder.num_patches), generator_of(modules, MASKS)
        noise = torch.rand(shape, generator=generator, device=generator.device).to(images.device)
        masking = random_masking(noise, self.config.mask_ratio)
        tokens = split_rows(encoder.visible_tokens, images, masking.visible)
        h = encoder.pooled(tokens)
        return Online(h=(h,), z=(h,), projected=(h,), masked=MaskedTokens(tokens, masking.restore, masking.mask))

    def terms(self, online: Online, modules: nn.ModuleDict, batch: Batch, ctx: Context) -> Terms:
        assert online.masked is not None, "`online` has set it"
        tokens, restore, mask = online.masked
        predicted = split_rows(modules[DECODER], tokens, restore)
        patches = patchify(batch.views[0], _encoder(modules).patch_size)
        return {"reconstruction": masked_reconstruction(predicted, patches, mask, self.config.normalize_pixels)}, {}


def _encoder(modules: nn.ModuleDict) -> VisionTransformer:
    return module_of(modules, ENCODER, VisionTransformer)  # the spec's check refuses others earlier
