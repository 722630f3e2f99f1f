"""The names that libraries give to a network's tensors, and the names that fedssl gives to the same tensors.

Each family is recognised by its names. fedssl's encoders and torchvision's networks keep their names; timm's ResNets
have torchvision's. Hugging Face's ResNets are renamed, tensor by tensor, to torchvision's:

    embedder.embedder.convolution, .normalization                 conv1, bn1
    encoder.stages.S.layers.L.shortcut.convolution, .normalization    layer(S+1).L.downsample.0, .1
    encoder.stages.S.layers.L.layer.K.convolution, .normalization     layer(S+1).L.conv(K+1), .bn(K+1)
    classifier.1                                                  fc
"""

import re
from collections.abc import Iterable
from typing import Literal

from fedssl.errors import ArtifactError

Family = Literal["fedssl", "torchvision", "huggingface"]
"""The origin of the names in a file. `torchvision` includes timm's and those of all other networks, which are kept."""

PREFIX = "encoder."
"""The beginning of the name of every tensor of an encoder in a fedssl model."""

CLASSIFIERS = ("fc", "classifier", "head", "head.fc", "heads.head")
"""The modules that classify in the networks of torchvision and timm. An encoder has none of them."""

_ADAPTER = (".lora_a", ".lora_b", ".lora_scale")

_NORMALISATION = r"(weight|bias|running_mean|running_var|num_batches_tracked)"
_LAYER = r"encoder\.stages\.(\d{1,3})\.layers\.(\d{1,3})"
_HUGGINGFACE = (
    (re.compile(r"embedder\.embedder\.convolution\.weight"), "conv1.weight"),
    (re.compile(rf"embedder\.embedder\.normalization\.{_NORMALISATION}"), "bn1.{0}"),
    (re.compile(rf"{_LAYER}\.shortcut\.convolution\.weight"), "layer{0:+}.{1}.downsample.0.weight"),
    (re.compile(rf"{_LAYER}\.shortcut\.normalization\.{_NORMALISATION}"), "layer{0:+}.{1}.downsample.1.{2}"),
    (re.compile(rf"{_LAYER}\.layer\.(\d)\.convolution\.weight"), "layer{0:+}.{1}.conv{2:+}.weight"),
    (re.compile(rf"{_LAYER}\.layer\.(\d)\.normalization\.{_NORMALISATION}"), "layer{0:+}.{1}.bn{2:+}.{3}"),
    (re.compile(r"classifier\.1\.(weight|bias)"), "fc.{0}"),
)


class _Group(str):
    """A group of a match. The format `+` adds 1 to its number."""

    def __format__(self, spec: str) -> str:
        return str(int(self) + 1) if spec == "+" else str(self)


def family_of(names: Iterable[str]) -> Family:
    """Return the family that uses these names.

    >>> family_of(["conv1.weight", "fc.bias"]), family_of(["encoder.conv1.weight", "projector.0.weight"])
    ('torchvision', 'fedssl')
    """
    found = list(names)
    if any("embedder.embedder." in name for name in found):
        return "huggingface"
    return "fedssl" if any(name.startswith(PREFIX) for name in found) else "torchvision"


def encoder_name(name: str, family: Family) -> str | None:
    """Return the name that a tensor has in a fedssl model, or None if it belongs to no encoder.

    Raises ArtifactError if the family has no such name.

    >>> encoder_name("resnet.encoder.stages.0.layers.1.layer.0.convolution.weight", "huggingface")
    'encoder.layer1.1.conv1.weight'
    >>> encoder_name("conv1.weight", "torchvision"), encoder_name("projector.0.weight", "fedssl")
    ('encoder.conv1.weight', None)
    """
    if family == "fedssl":
        return name if name.startswith(PREFIX) else None
    return PREFIX + (name if family == "torchvision" else _torchvision_name(name))


def is_classifier(name: str) -> bool:
    """Return whether a tensor of a fedssl model belongs to the classifier of the network that it was taken from.

    >>> is_classifier("encoder.fc.weight"), is_classifier("encoder.layer4.0.conv1.weight")
    (True, False)
    """
    module, _, leaf = name.removeprefix(PREFIX).rpartition(".")
    return module in CLASSIFIERS and leaf in ("weight", "bias")


def is_adapter(name: str) -> bool:
    """Return whether a tensor of a fedssl model belongs to a layer's low-rank adapter.

    >>> is_adapter("encoder.blocks.0.attn.qkv.lora_a"), is_adapter("encoder.blocks.0.attn.qkv.weight")
    (True, False)
    """
    return name.endswith(_ADAPTER)


def _torchvision_name(name: str) -> str:
    own = name.removeprefix("resnet.")
    for pattern, template in _HUGGINGFACE:
        if (match := pattern.fullmatch(own)) is not None:
            return template.format(*map(_Group, match.groups()))
    raise ArtifactError(
        f"the file has the names of a Hugging Face network, but its ResNets have no {name!r}, and only they can be "
        "renamed: save the network with the names of torchvision or timm"
    )
