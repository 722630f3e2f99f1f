"""Config of FedMAE."""

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from fedssl.protocol.data import DataConfig
from fedssl.protocol.methods.base import MethodInfo
from fedssl.protocol.methods.composed import ComposedConfig
from fedssl.protocol.methods.parts import Trait
from fedssl.protocol.model import ModelConfig


class FedMAEConfig(ComposedConfig):
    """FedAvg of MAE: a ViT sees some patches of an image, and a decoder predicts the pixels of the others."""

    info: ClassVar[MethodInfo] = MethodInfo(
        title="FedMAE",
        paper="He et al. 2022, Masked Autoencoders Are Scalable Vision Learners",
        equations="Section 3: the mean squared error of the pixels of masked patches",
        leaves_the_client="weights of encoder and decoder",
        stays_on_the_client="nothing between rounds",
    )

    traits: ClassVar[frozenset[Trait]] = frozenset()

    name: Literal["fedmae"] = "fedmae"
    mask_ratio: float = Field(
        default=0.75, gt=0, lt=1, description="Share of an image's patches that are hidden (MAE: 0.75)."
    )
    normalize_pixels: bool = Field(
        default=True, description="Predict the pixels of each patch after standardising them (MAE's Table 1d)."
    )
    decoder_width: int = Field(default=128, ge=4, le=8192, description="Width of the decoder's tokens (MAE: 512).")
    decoder_depth: int = Field(default=2, ge=1, le=64, description="Number of the decoder's blocks (MAE: 8).")
    decoder_heads: int = Field(default=4, ge=1, le=256, description="Attention heads of each block (MAE: 16).")

    @model_validator(mode="after")
    def _heads_divide_the_width(self) -> "FedMAEConfig":
        if self.decoder_width % self.decoder_heads or self.decoder_width % 4:
            raise ValueError(
                f"method.decoder_width is {self.decoder_width}: set it to a multiple of decoder_heads "
                f"({self.decoder_heads}), and of 4 for the positions of patches"
            )
        return self

    def check(self, model: ModelConfig) -> None:
        super().check(model)
        if not model.encoder.has_patches:
            raise ValueError(
                f"fedmae hides patches, and {model.encoder.name} does not cut images into any: set model.encoder.name "
                "to vit-tiny, vit-small or vit-base"
            )

    def check_images(self, model: ModelConfig, data: DataConfig) -> None:
        num_patches = (data.image_size // model.encoder.patch_size) ** 2
        visible = int(num_patches * (1 - self.mask_ratio))
        if not 0 < visible < num_patches:
            raise ValueError(
                f"method.mask_ratio {self.mask_ratio} leaves {visible} of {num_patches} patches visible: at least one "
                "must be visible and one hidden; change mask_ratio, model.encoder.patch_size or data.image_size"
            )
        if self.normalize_pixels and data.channels * model.encoder.patch_size**2 < 2:
            raise ValueError("a patch of one value has no variance: set method.normalize_pixels to false")
