"""What network a run trains."""

import json
import tomllib
from typing import Annotated, Any, Literal

from pydantic import Field

from fedssl.protocol.base import StrictModel

Width = Annotated[int, Field(ge=1, le=65_536)]

RESNET_WIDTHS = {"resnet18": 512, "resnet50": 2048}


class EncoderConfig(StrictModel):
    """The network that the federation is for; its output h feeds everything downstream."""

    name: Literal["convnet", "resnet18", "resnet50"] = Field(
        default="convnet", description="`convnet` is the small one for CPUs; the ResNets are torchvision's."
    )
    stem: Literal["cifar", "imagenet"] = Field(
        default="cifar",
        description="ResNets only. `cifar`: 3x3 convolution of stride 1 and no max-pool; `imagenet`: 7x7 and max-pool.",
    )
    widths: tuple[Width, ...] = Field(
        default=(32, 64, 128, 256),
        min_length=1,
        max_length=8,
        fail_fast=True,
        description="ConvNet only: channels of each stride-2 block; the last is the representation's width.",
    )

    @property
    def feature_dim(self) -> int:
        """H, the width of the representation."""
        return self.widths[-1] if self.name == "convnet" else RESNET_WIDTHS[self.name]

    def is_same_network(self, other: "EncoderConfig") -> bool:
        """Whether both describe one network: settings that this kind of encoder does not read do not count.

        >>> EncoderConfig(name="resnet18", widths=(8,)).is_same_network(EncoderConfig(name="resnet18"))
        True
        """
        return str(self) == str(other)

    def __str__(self) -> str:
        """For people, and complete.

        >>> print(EncoderConfig(), "and", EncoderConfig(name="resnet18"))
        convnet 32-64-128-256 and resnet18 (cifar stem)
        """
        if self.name == "convnet":
            return f"convnet {'-'.join(map(str, self.widths))}"
        return f"{self.name} ({self.stem} stem)"


def read_encoder(given: Any) -> Any:
    """An encoder as a person writes it: its name, or a table in TOML or JSON. Raises ValueError.

    >>> read_encoder("resnet18"), read_encoder("{ name = 'convnet', widths = [8, 16] }")
    ({'name': 'resnet18'}, {'name': 'convnet', 'widths': [8, 16]})
    """
    if not isinstance(given, str):
        return given
    text = given.strip()
    if not text.startswith("{"):
        return {"name": text} if text else None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        return tomllib.loads(f"encoder = {text}")["encoder"]
    except (tomllib.TOMLDecodeError, RecursionError):
        raise ValueError(
            'write a name such as resnet18, or a table such as { name = "convnet", widths = [32, 64] }'
        ) from None


class MLPConfig(StrictModel):
    """Fully connected head: hidden layers with optional BatchNorm and ReLU, then one linear layer."""

    hidden_dims: tuple[Width, ...] = Field(default=(512,), max_length=4)
    out_dim: Width = 256
    batch_norm: bool = Field(default=True, description="BatchNorm after each hidden layer.")
    out_batch_norm: bool = Field(
        default=False, description="BatchNorm without learnt scale and shift after the last layer (Orchestra)."
    )


class ModelConfig(StrictModel):
    """Encoder and heads. A method builds only the heads that it uses."""

    encoder: EncoderConfig = EncoderConfig()
    projector: MLPConfig | None = Field(
        default=MLPConfig(), description="None: the losses work on the representation itself."
    )
    predictor: MLPConfig = Field(
        default=MLPConfig(),
        description="Used by methods that predict (BYOL, SimSiam); its output is as wide as the projector's.",
    )
