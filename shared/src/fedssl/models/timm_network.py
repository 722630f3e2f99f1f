"""Any network of timm by its name, `timm:NAME`, with timm's tensor names."""

import difflib
import importlib.metadata
from typing import Any

import torch
from torch import Tensor, nn

from fedssl.artifacts.tensors import DTYPES
from fedssl.errors import LibraryMissing, SpecError
from fedssl.models.encoders import Encoder
from fedssl.models.torchvision_guard import import_torchvision
from fedssl.protocol.data import channels_in_words
from fedssl.protocol.model import EncoderConfig

_DROP_RATES = ("drop_prob", "drop_rate")  # of timm's DropPath and DropBlock; of networks that call F.dropout


class TimmNetwork(Encoder):
    """The part of an Encoder that timm's networks lack: each gets a class that derives from its own and from this."""

    libraries = ("timm",)

    def layer_prefixes(self) -> list[tuple[str, ...]]:
        """Raise SpecError, because timm's networks have no common order of layers."""
        raise SpecError("training.optimizer.layer_decay needs an order of layers, which networks of timm do not have")


def build_timm(config: EncoderConfig, channels: int, image_size: int | None) -> Encoder:
    """Return timm's network with fresh random weights, without its classifier, and without dropout or random depth.

    Random depth and dropout draw from a generator that depends on the machine's earlier work, so they are switched off.
    No weights are downloaded. Raises LibraryMissing if timm is not installed in the spec's version, and SpecError if it
    has no such network, or one that cannot take images of this size, or is not as wide as the spec states.
    """
    timm = _import_timm(config)
    name = config.timm_model or ""
    if not timm.is_model(name):
        near = difflib.get_close_matches(name, timm.list_models(), 3)
        hint = f": similar names are {', '.join(near)}" if near else ""
        raise SpecError(f"timm {config.timm_version} has no network {name!r}{hint}")
    settings: dict[str, Any] = {"in_chans": channels, "num_classes": 0}
    if image_size is not None and timm_defaults(config).fixed_input_size:
        settings["img_size"] = image_size
    try:
        network: nn.Module = timm.create_model(name, pretrained=False, **settings)
    except (TypeError, ValueError, RuntimeError, AssertionError) as error:
        what = f"{channels_in_words(channels)} and images of {image_size} pixels"
        raise SpecError(f"{config} cannot be built for {what}: {error}; change data.image_size") from None
    _make_deterministic(network)
    if others := {str(each.dtype) for each in network.state_dict().values() if each.dtype not in DTYPES}:
        raise SpecError(f"{config} has tensors of {', '.join(sorted(others))}, which cannot be sent: choose another")
    if clash := sorted(vars(Encoder).keys() & dict(network.named_children()).keys()):
        raise SpecError(f"{config} has a module {clash[0]}, which is a name of fedssl's encoders: choose another")
    network.__class__ = type("TimmNetwork", (type(network), TimmNetwork), {})
    assert isinstance(network, TimmNetwork)
    network.feature_dim = config.feature_dim
    if image_size is not None:
        _try(network, config, channels, image_size)
    return network


def timm_defaults(config: EncoderConfig) -> Any:
    """Return what timm declares about the network (`PretrainedCfg`): its classifier, and whether its images have
    one size. Raises LibraryMissing."""
    return _import_timm(config).models.get_pretrained_cfg(config.timm_model)


def _import_timm(config: EncoderConfig) -> Any:
    wanted = config.timm_version
    try:
        found = importlib.metadata.version("timm")
    except importlib.metadata.PackageNotFoundError:
        raise LibraryMissing(f"{config} needs timm, which is not installed here: pip install timm=={wanted}") from None
    if found != wanted:
        raise LibraryMissing(
            f"{config} needs timm {wanted}, and {found} is installed here: pip install timm=={wanted}, or create a run "
            f"with model.encoder.timm_version = {found!r}"
        )
    import_torchvision()  # before timm, which imports it without our guard
    import timm

    return timm


def _make_deterministic(network: nn.Module) -> None:
    for module in network.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for rate in _DROP_RATES:
            if hasattr(module, rate):
                setattr(module, rate, 0.0)


@torch.no_grad()
def _try(network: Encoder, config: EncoderConfig, channels: int, image_size: int) -> None:
    """Raise SpecError unless it takes such images and is as wide as the spec states. Sets `bypassed`."""
    device = next(network.parameters()).device
    layers = {name: module for name, module in network.named_modules() if isinstance(module, nn.Linear)}
    called: set[nn.Module] = set()
    handles = [layer.register_forward_hook(lambda layer, *_: called.add(layer)) for layer in layers.values()]
    try:
        h: Tensor = network.eval()(torch.zeros(2, channels, image_size, image_size, device=device))
    except (RuntimeError, ValueError, AssertionError) as error:
        what = f"images of {image_size} pixels: {str(error).splitlines()[0]}"
        raise SpecError(f"{config} cannot take {what}; change data.image_size") from None
    finally:
        network.train()
        for handle in handles:
            handle.remove()
    network.bypassed = frozenset(name for name, layer in layers.items() if layer not in called)
    if h.shape != (2, config.feature_dim):
        raise SpecError(
            f"{config} gives representations of the shape {tuple(h.shape[1:])}, and model.encoder.timm_width is "
            f"{config.feature_dim}: set it to what the network gives, or choose a network that gives one vector"
        )
