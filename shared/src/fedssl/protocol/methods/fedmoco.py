"""FedMoCo: FedAvg of MoCo, in its versions 1 and 2; and what it has in common with FedProtoCL.

He et al. 2020, Momentum Contrast, Eq. 1 and 2; Chen et al. 2020, Improved Baselines with Momentum Contrastive Learning;
federated as in EasyFL's code: the query encoder and projector are averaged and overwrite the client's. The objective is
`MomentumContrast`, whose module explains how the symbols are named and where it differs.

`variant` "v2" is the default because it is the stronger of the two: a projector with one hidden layer (EasyFL:
512-512(BN, ReLU)-128), temperature 0.2, and a cosine learning-rate schedule. "v1" has a linear projector
(`model.projector.hidden_dims = []`, width 128), temperature 0.07, a constant learning rate and weaker colour jitter.

FedX, which compares with FedMoCo, gives no details except temperature 0.1. Its other baselines have embeddings of
width 256.
"""

from typing import ClassVar, Literal

from pydantic import Field

from fedssl.protocol.methods.base import MethodInfo
from fedssl.protocol.methods.composed import ComposedConfig
from fedssl.protocol.model import ModelConfig


class MomentumContrastConfig(ComposedConfig):
    """The common settings of FedMoCo and FedProtoCL: a following key network and a queue of its keys."""

    queue_size: int = Field(default=4096, ge=1, le=1_000_000, description="Keys in the queue (EasyFL: 4096).")
    max_queue_share: float = Field(
        default=0.5,
        gt=0,
        le=1e6,
        description="The queue is no longer than this share of the client's images. A longer one would hold the keys "
        "of most images, so an image's own key would be among its negatives. EasyFL has no such limit, "
        "and clients that "
        "do not reach it.",
    )
    key_momentum: float = Field(
        default=0.99, ge=0, le=1, description="m of key = m key + (1 - m) query, after every step (EasyFL: 0.99)."
    )

    @property
    def contrast_temperature(self) -> float:
        """The temperature of InfoNCE."""
        raise NotImplementedError


class FedMoCoConfig(MomentumContrastConfig):
    """FedAvg of MoCo."""

    takes_local_crops: ClassVar[bool] = True

    info: ClassVar[MethodInfo] = MethodInfo(
        title="FedMoCo",
        paper="He et al. 2020, Momentum Contrast for Unsupervised Visual Representation Learning (v1); Chen et al. "
        "2020, Improved Baselines with Momentum Contrastive Learning (v2); federated as in EasyFL",
        equations="MoCo Eq. 1 (InfoNCE, both orders of the views) and 2 (the key network)",
        leaves_the_client="weights of encoder and projector",
        stays_on_the_client="the queue of keys",
    )

    name: Literal["fedmoco"] = "fedmoco"
    variant: Literal["v1", "v2"] = Field(
        default="v2",
        description="`v2` has a projector with a hidden layer and temperature 0.2; `v1` a linear one and 0.07.",
    )
    temperature: float | None = Field(
        default=None, gt=0, le=100, description="Temperature of InfoNCE; if None, the variant's. FedX's tables use 0.1."
    )

    @property
    def contrast_temperature(self) -> float:
        """The temperature that the spec sets, or the variant's."""
        if self.temperature is not None:
            return self.temperature
        return 0.07 if self.variant == "v1" else 0.2

    def check(self, model: ModelConfig) -> None:
        super().check(model)
        if self.variant == "v1" and model.projector is not None and model.projector.hidden_dims:
            raise ValueError("fedmoco v1 has a linear projector: set model.projector.hidden_dims to [], or use v2")
