"""Measurements of a client's encoder after training: whether representations collapse, and how far it moved."""

import math
from collections.abc import Mapping

import torch
from torch import nn

from fedssl.evaluation import effective_rank, feature_std
from fedssl.evaluation.monitoring import DIVERGENCE, EFFECTIVE_RANK, EMBEDDING_STD, FEATURE_STD
from fedssl.methods.api import ClientData, Context, Metrics
from fedssl.methods.composition.embedding import embed_stages
from fedssl.methods.composition.part import ENCODER, PROJECTOR
from fedssl.models.batch_norm import norm_tensors

_FEWEST_FOR_RANK = 8


def observe(modules: nn.ModuleDict, data: ClientData, broadcast: Mapping[str, torch.Tensor], ctx: Context) -> Metrics:
    """Return the metrics that `spec.watch` monitors, from the client's first images, not augmented, in eval mode.

    `effective_rank`: of the centred h, between 1 and their width (SSD Eq. 11). It is left out for fewer than 8 images,
    because the rank of n images is at most n - 1. `feature_std`: of the unit h, times the square root of their width,
    0 to 1. `embedding_std`: the same of z if there is a projector, which can collapse while h does not. `divergence`:
    ||w - w_g|| / ||w_g|| over the encoder's parameters, if the broadcast has them, without a BatchNorm that the client
    keeps.

    Changes nothing and draws no random number. Returns nothing if the run is not monitored.
    """
    num_images = min(ctx.spec.watch.num_images, len(data))
    if num_images == 0 or ENCODER not in modules:
        return {}
    images = data.images[:num_images]
    networks = [modules[name] for name in (ENCODER, PROJECTOR) if name in modules]
    h_NH, *z_ND = embed_stages(networks, images, ctx)
    observed: Metrics = {}
    if num_images > 1:
        if num_images >= _FEWEST_FOR_RANK:
            observed[EFFECTIVE_RANK] = effective_rank(h_NH, center=True)
        observed[FEATURE_STD] = _spread(h_NH)
        if z_ND:
            observed[EMBEDDING_STD] = _spread(z_ND[0])
    if (divergence := _divergence(modules[ENCODER], broadcast, ctx)) is not None:
        observed[DIVERGENCE] = divergence
    return {name: value for name, value in observed.items() if math.isfinite(value)}


def _spread(x_ND: torch.Tensor) -> float:
    return feature_std(x_ND) * math.sqrt(x_ND.shape[1])


@torch.no_grad()
def _divergence(encoder: nn.Module, broadcast: Mapping[str, torch.Tensor], ctx: Context) -> float | None:
    left_out = norm_tensors(encoder) if ctx.spec.model.batch_norm == "local" else frozenset()
    own = {f"{ENCODER}.{name}": each for name, each in encoder.named_parameters() if name not in left_out}
    if any(name not in broadcast or broadcast[name].shape != parameter.shape for name, parameter in own.items()):
        return None
    # Moved before they are converted: in one call, the host would convert them, and send twice as many bytes to a GPU.
    received = {name: broadcast[name].to(parameter.device).double() for name, parameter in own.items()}
    length = torch.stack([tensor.square().sum() for tensor in received.values()]).sum()
    distance = torch.stack([(own[name].double() - tensor).square().sum() for name, tensor in received.items()]).sum()
    return float((distance / length).sqrt()) if float(length) > 0 else None
