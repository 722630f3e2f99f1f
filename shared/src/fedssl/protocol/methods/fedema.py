"""FedEMA: FedBYOL whose clients mix the global network with their own.

Zhuang et al. 2022, Divergence-Aware Federated Self-Supervised Learning. The objective is FedBYOL's. The mix is the
merge rule `ema`, whose module describes where paper and code differ.
"""

from typing import ClassVar, Literal

from pydantic import Field

from fedssl.protocol.methods.base import MethodInfo
from fedssl.protocol.methods.fedbyol import BYOLConfig
from fedssl.protocol.methods.merges import AnyMerge, EMAConfig


class FedEMAConfig(BYOLConfig):
    """FedBYOL whose clients mix the global network with their own, depending on how far they are apart."""

    info: ClassVar[MethodInfo] = MethodInfo(
        title="FedEMA",
        paper="Zhuang et al. 2022, Divergence-Aware Federated Self-Supervised Learning",
        equations="its moving average, as FedRLC prints it: Eq. 12 and the text below",
        leaves_the_client="weights of online encoder, projector and predictor",
        stays_on_the_client="the target network, the online network of its last round, its first divergence",
    )

    name: Literal["fedema"] = "fedema"
    merge: AnyMerge = Field(
        default=EMAConfig(), description="What a client does with the global model that it receives."
    )
