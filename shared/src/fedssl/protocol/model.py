"""The network that a run trains."""

import json
import tomllib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, StringConstraints, field_validator, model_validator

from fedssl.protocol.base import StrictModel
from fedssl.protocol.initial import InitialConfig

Width = Annotated[int, Field(ge=1, le=65_536)]
NormName = Literal["batch", "group", "layer"]
ParameterPattern = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.*]+$", max_length=256)]
"""A parameter's name, in which `*` stands for any characters."""

BatchNormPolicy = Literal["average", "local", "recalibrate"]

Setting = Literal[
    "stem", "widths", "norm", "patch_size", "pooling", "depth", "first_weights", "timm_model", "timm_width"
]


@dataclass(frozen=True, slots=True)
class EncoderKind:
    """A kind of encoder, as far as it is known without building it.

    `builder` is the function that builds it, as "module:function": it takes an `EncoderConfig`, the number of image
    channels and the image size, which is None if it is not known. `settings` are the fields of `EncoderConfig` that it
    reads. `feature_dim` is the width of its representation; None if that is the last of `widths`. `is_convolutional`:
    whether its layers are convolutions, over which FedU and FedEMA can measure how far it moved. `has_linear_layers`:
    whether it has linear layers, which low-rank adapters need. `smallest_image` is the height and width in pixels of
    the smallest images that it can take.
    """

    builder: str
    settings: tuple[Setting, ...] = ()
    feature_dim: int | None = None
    is_convolutional: bool = True
    has_linear_layers: bool = False
    smallest_image: int = 1


_TIMM = "timm:"
_CONVNEXT = EncoderKind(
    "fedssl.models.convnext:build_convnext", feature_dim=768, has_linear_layers=True, smallest_image=32
)
_VIT = "fedssl.models.vision_transformer:build_vision_transformer"
_VIT_SETTINGS: tuple[Setting, ...] = ("patch_size", "pooling", "depth")

ENCODERS = {
    "convnet": EncoderKind("fedssl.models.convnet:build_convnet", ("widths", "norm")),
    "resnet18": EncoderKind("fedssl.models.resnet:build_resnet", ("stem", "norm", "first_weights"), 512),
    "resnet34": EncoderKind("fedssl.models.resnet:build_resnet", ("stem", "norm", "first_weights"), 512),
    "resnet50": EncoderKind("fedssl.models.resnet:build_resnet", ("stem", "norm", "first_weights"), 2048),
    "resnet101": EncoderKind("fedssl.models.resnet:build_resnet", ("stem", "norm", "first_weights"), 2048),
    "convnext-tiny": _CONVNEXT,
    "convnext-small": _CONVNEXT,
    "vit-tiny": EncoderKind(_VIT, _VIT_SETTINGS, 192, is_convolutional=False, has_linear_layers=True),
    "vit-small": EncoderKind(_VIT, _VIT_SETTINGS, 384, is_convolutional=False, has_linear_layers=True),
    "vit-base": EncoderKind(_VIT, _VIT_SETTINGS, 768, is_convolutional=False, has_linear_layers=True),
    "timm": EncoderKind(
        "fedssl.models.timm_network:build_timm",
        ("timm_model", "timm_width"),
        is_convolutional=False,
        has_linear_layers=True,
    ),
}
"""The encoders that a spec can name."""

if TYPE_CHECKING:
    EncoderName = str
else:
    EncoderName = Literal[tuple(ENCODERS)]


class EncoderConfig(StrictModel):
    """The network that the federation trains. Its output h is the representation."""

    name: EncoderName = Field(
        default="convnet",
        description="`convnet` is the small one for CPUs; ResNets are torchvision's, ConvNeXts and ViTs timm's.",
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
    norm: NormName = Field(
        default="batch",
        exclude_if=lambda it: it == "batch",
        description="ConvNet and ResNets only. `batch`: BatchNorm, whose statistics are averaged in the federation. "
        "The others have none: `group`: GroupNorm of 32 groups, or of as many as divide both 32 and the number of "
        "channels; `layer`: LayerNorm over all channels and pixels of an image. ConvNeXts and ViTs have LayerNorm per "
        "position.",
    )
    patch_size: Literal[4, 8, 14, 16] = Field(
        default=16,
        exclude_if=lambda it: it == 16,
        description="ViTs only: height and width of a patch in pixels; data.image_size must be a multiple of it.",
    )
    pooling: Literal["class_token", "mean"] = Field(
        default="class_token",
        exclude_if=lambda it: it == "class_token",
        description="ViTs only: the representation is the class token or the mean over the patches.",
    )
    depth: int = Field(
        default=12,
        ge=1,
        le=48,
        exclude_if=lambda it: it == 12,
        description="ViTs only: number of transformer blocks. The published networks have 12; fewer train on a CPU.",
    )

    first_weights: Literal["torchvision", "torch"] = Field(
        default="torchvision",
        exclude_if=lambda it: it == "torchvision",
        description="ResNets only: how convolutions start. `torchvision`: normal with variance 2 / fan_out; `torch`: "
        "PyTorch's default, uniform with variance 1 / (3 fan_in), as in the code of FedU, FedEMA and SSD.",
    )

    timm_model: Annotated[str, StringConstraints(pattern=r"^[a-z0-9_]+$", max_length=100)] | None = Field(
        default=None,
        exclude_if=lambda it: it is None,
        description='timm only: the name of its network, such as `regnety_004`. `name = "timm:regnety_004"` sets it.',
    )
    timm_version: Annotated[str, StringConstraints(pattern=r"^[0-9a-z.]+$", max_length=30)] | None = Field(
        default=None,
        exclude_if=lambda it: it is None,
        description="timm only: the version that the coordinator and every worker must have installed.",
    )
    timm_width: Width | None = Field(
        default=None,
        exclude_if=lambda it: it is None,
        description="timm only: the width of the network's representation, as `num_classes=0` gives it.",
    )

    @model_validator(mode="before")
    @classmethod
    def _split_name(cls, given: Any) -> Any:
        """Read `timm:NAME` as the name timm and the network's name."""
        name = given.get("name") if isinstance(given, dict) else None
        if not isinstance(name, str) or not name.startswith(_TIMM):
            return given
        return {**given, "name": "timm", "timm_model": name.removeprefix(_TIMM)}

    @model_validator(mode="after")
    def _pins_timm(self) -> "EncoderConfig":
        if self.name != "timm":
            return self
        if self.timm_model is None:
            raise ValueError('encoder.name timm needs the name of a network: write name = "timm:regnety_004"')
        if self.timm_version is None or self.timm_width is None:
            code = f"import timm; print(timm.__version__, timm.create_model('{self.timm_model}', num_classes=0)"
            raise ValueError(
                f"encoder timm:{self.timm_model} needs timm_version, the version that the coordinator and all workers "
                "have, and timm_width, that of its representation. Where timm is installed, this prints both: "
                f'python -c "import torch; {code}.eval()(torch.zeros(1, 3, 224, 224)).shape[1])"'
            )
        return self

    @property
    def has_patches(self) -> bool:
        """True if it cuts images into patches, each with a token of its own."""
        return "patch_size" in ENCODERS[self.name].settings

    @property
    def is_convolutional(self) -> bool:
        """True if its layers are convolutions."""
        return ENCODERS[self.name].is_convolutional

    @property
    def has_batch_norm(self) -> bool:
        """True if it has BatchNorm. True for every network of timm, because only building it shows."""
        return self.name == "timm" or ("norm" in ENCODERS[self.name].settings and self.norm == "batch")

    def check_image_size(self, image_size: int) -> None:
        """Raise ValueError, with what to change, if the encoder cannot take images of this height and width."""
        if image_size < (smallest := ENCODERS[self.name].smallest_image):
            raise ValueError(
                f"{self.name} halves images five times, and {image_size} pixels are too few: set data.image_size to "
                f"{smallest} or more, or choose another encoder"
            )
        if self.has_patches and image_size % self.patch_size:
            larger = -(-image_size // self.patch_size) * self.patch_size
            raise ValueError(
                f"{self.name} cuts images into patches of {self.patch_size} pixels, and {image_size} is not a multiple "
                f"of that: set data.image_size to {larger}, or choose another patch_size (4, 8, 14 or 16)"
            )

    @property
    def feature_dim(self) -> int:
        """H, the width of the representation."""
        own = self.timm_width if self.name == "timm" else None
        return own or ENCODERS[self.name].feature_dim or self.widths[-1]

    def is_same_network(self, other: "EncoderConfig") -> bool:
        """Return whether both describe the same network. Settings that this kind of encoder does not read do not count.

        >>> EncoderConfig(name="resnet18", widths=(8,)).is_same_network(EncoderConfig(name="resnet18"))
        True
        """
        return str(self) == str(other)

    def __str__(self) -> str:
        """Return a short and complete description.

        >>> print(EncoderConfig(), "and", EncoderConfig(name="resnet18"))
        convnet 32-64-128-256 and resnet18 (cifar stem)
        """
        if self.name == "timm":
            return f"{_TIMM}{self.timm_model} (timm {self.timm_version})"
        settings = ENCODERS[self.name].settings
        widths = f" {'-'.join(map(str, self.widths))}" if "widths" in settings else ""
        details = [f"{self.stem} stem"] if "stem" in settings else []
        if "norm" in settings and self.norm != "batch":
            details.append(f"{self.norm} norm")
        if "patch_size" in settings:
            details.append(f"patches of {self.patch_size}, {self.pooling.replace('_', ' ')}")
        if "depth" in settings and self.depth != 12:
            details.append(f"{self.depth} block{'s' if self.depth > 1 else ''}")
        return f"{self.name}{widths}" + (f" ({', '.join(details)})" if details else "")


def read_encoder(given: Any) -> Any:
    """Read an encoder as a person writes it: its name, or a table in TOML or JSON. Raises ValueError.

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
    except (ValueError, RecursionError):  # a number of too many digits is a ValueError too
        raise ValueError(
            'write a name such as resnet18, or a table such as { name = "convnet", widths = [32, 64] }'
        ) from None


class MLPConfig(StrictModel):
    """Fully connected head: hidden layers with optional BatchNorm and ReLU, then one linear layer."""

    hidden_dims: tuple[Width, ...] = Field(default=(512,), max_length=4)
    out_dim: Width = 256
    batch_norm: bool = Field(default=True, description="BatchNorm after each hidden layer.")
    activation: Literal["relu", "gelu"] = Field(
        default="relu",
        exclude_if=lambda it: it == "relu",
        description="After each hidden layer and its BatchNorm: ReLU, or GELU as in DINO's head.",
    )
    out_batch_norm: bool = Field(
        default=False, description="BatchNorm without learnt scale and shift after the last layer (Orchestra)."
    )


class LoRAConfig(StrictModel):
    """Low-rank adapters of the encoder's linear layers (LoRA, Hu et al. 2022): W + (alpha / rank) B A, W frozen."""

    rank: int = Field(ge=1, le=4096, description="r, the rank of the change of each layer.")
    alpha: float | None = Field(
        default=None,
        gt=0,
        le=1e4,
        description="The change is scaled by alpha / rank. Null: rank, so that it is not scaled.",
    )
    layers: tuple[ParameterPattern, ...] = Field(
        default=("blocks.*.attn.*",),
        min_length=1,
        max_length=64,
        description="The linear layers that have an adapter, by name, where `*` stands for any characters: those of "
        "the attention by default; `blocks.*.mlp.*` are the others, and `stages.*.mlp.*` those of a ConvNeXt.",
    )

    @property
    def scale(self) -> float:
        """The factor of B A."""
        return 1.0 if self.alpha is None else self.alpha / self.rank


class ModelConfig(StrictModel):
    """Encoder and heads. A method builds only the heads that it uses."""

    encoder: EncoderConfig = EncoderConfig()
    projector: MLPConfig | None = Field(
        default=MLPConfig(), description="Null: the losses use the representation itself."
    )
    predictor: MLPConfig = Field(
        default=MLPConfig(),
        description="Used by methods that predict (BYOL, SimSiam); its output is as wide as the projector's.",
    )
    initial: InitialConfig | None = Field(
        default=None,
        description="The weights that the encoder starts from. Null: random ones, from the run's seed.",
        exclude_if=lambda it: it is None,
    )
    trainable: tuple[ParameterPattern, ...] | None = Field(
        default=None,
        max_length=64,
        description="The encoder's parameters that are trained, by name, such as `layer4.*`, where `*` stands for any "
        "characters; the heads always are. All others are frozen: they keep their initial values and are not sent, and "
        "BatchNorms without a trained parameter use the start's statistics. Null: all are trained.",
        exclude_if=lambda it: it is None,
    )

    lora: LoRAConfig | None = Field(
        default=None,
        description="Adapters that are trained in place of the encoder's own parameters, which are frozen unless "
        "`trainable` names them. Clients send only the adapters and the heads. Null: no adapters.",
        exclude_if=lambda it: it is None,
    )

    batch_norm: BatchNormPolicy = Field(
        default="average",
        description="How BatchNorm is federated. `average`: scales, shifts and statistics are "
        "averaged like all weights. `local`: each client keeps its own, and sends none (FedBN, Li et al. 2021); the "
        "global encoder keeps the initial ones. `recalibrate`: averaged, and each client sets the statistics of the "
        "encoder that it receives to those of its own images, before it trains or evaluates.",
        exclude_if=lambda it: it == "average",
    )

    @property
    def freezes(self) -> bool:
        """True if some of the encoder's parameters are frozen."""
        return self.trainable is not None or self.lora is not None

    @model_validator(mode="after")
    def _has_batch_norm(self) -> "ModelConfig":
        if self.batch_norm != "average" and not self.encoder.has_batch_norm:
            raise ValueError(
                f'model.batch_norm = "{self.batch_norm}" applies to BatchNorm, and {self.encoder} has none: '
                "leave it out"
            )
        return self

    @model_validator(mode="after")
    def _can_adapt(self) -> "ModelConfig":
        if self.lora is None:
            return self
        if not ENCODERS[self.encoder.name].has_linear_layers:
            raise ValueError(
                f"model.lora adapts linear layers, and {self.encoder.name} has none: choose a ViT or a ConvNeXt, or "
                "name the layers that are trained in model.trainable"
            )
        if self.lora.rank > self.encoder.feature_dim:
            raise ValueError(
                f"model.lora.rank is {self.lora.rank}, and the layers of {self.encoder.name} have at most the rank "
                f"{self.encoder.feature_dim}: lower model.lora.rank"
            )
        return self

    @field_validator("trainable")
    @classmethod
    def _trains_something(cls, patterns: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if patterns is not None and not patterns:
            raise ValueError(
                "model.trainable is empty, and no encoder would be trained: name the parameters that are, such as "
                '"layer4.*", or leave it out to train all of them'
            )
        if patterns is not None and len(set(patterns)) != len(patterns):
            raise ValueError("model.trainable lists a pattern twice: list each once")
        return patterns
