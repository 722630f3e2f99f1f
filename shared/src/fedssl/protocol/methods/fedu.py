"""FedU: FedBYOL whose clients take the global predictor only if they drifted little.

Zhuang et al. 2021, Collaborative Unsupervised Visual Representation Learning from Decentralized Data. Eq. 1 and 2 are
FedBYOL's objective (m is `target_momentum`). Eq. 3 and the ablations of Table 4 are the merge rule `dapu`, whose
module describes where paper and code differ.
"""

from typing import ClassVar, Literal

from pydantic import Field

from fedssl.protocol.methods.base import MethodInfo
from fedssl.protocol.methods.fedbyol import BYOLConfig
from fedssl.protocol.methods.merges import AnyMerge, DAPUConfig


class FedUConfig(BYOLConfig):
    """FedBYOL whose clients take the global predictor only if they drifted little."""

    info: ClassVar[MethodInfo] = MethodInfo(
        title="FedU",
        paper="Zhuang et al. 2021, Collaborative Unsupervised Visual Representation Learning from Decentralized Data",
        equations="FedU Eq. 1 to 3",
        leaves_the_client="weights of online encoder, projector and predictor",
        stays_on_the_client="the target network, the predictor, the divergence and the decision that follows from it",
    )

    name: Literal["fedu"] = "fedu"
    merge: AnyMerge = Field(
        default=DAPUConfig(),
        description="What a client does with the global model that it receives; dapu holds Table 4's ablations.",
    )
