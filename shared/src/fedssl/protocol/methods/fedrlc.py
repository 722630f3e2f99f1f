"""FedRLC: FedBYOL guided by cluster centers.

Miao & Koyuncu 2024, Clustering-Guided Federated Learning of Representations. L = L_CKL + L_INS (Eq. 9): L_INS is
FedBYOL's objective (sigma is `target_momentum`), L_CKL is the add-on `crossed_kl`, and the download (Eq. 10 to 12) is
the merge rule `centers`. Network and centers are averaged with the weights n_k.

There is no public code. The paper does not state the optimiser; EasyFL's is taken: momentum 0.9 and weight decay 5e-4.
"""

from typing import ClassVar, Literal

from pydantic import Field

from fedssl.protocol.methods.add_ons import AnyAddOn, CrossedKLConfig
from fedssl.protocol.methods.base import MethodInfo
from fedssl.protocol.methods.fedbyol import BYOLConfig
from fedssl.protocol.methods.merges import AnyMerge, CenterMergeConfig
from fedssl.protocol.model import ModelConfig


class FedRLCConfig(BYOLConfig):
    """FedBYOL guided by cluster centers, which are trained, mixed and averaged like the network."""

    info: ClassVar[MethodInfo] = MethodInfo(
        title="FedRLC",
        paper="Miao & Koyuncu 2024, Clustering-Guided Federated Learning of Representations",
        equations="FedRLC Eq. 4 to 12",
        leaves_the_client="weights of online encoder, projector and predictor; cluster centers",
        stays_on_the_client="the target network, online network and centers of its last round, its first divergence",
    )

    name: Literal["fedrlc"] = "fedrlc"
    add_ons: tuple[AnyAddOn, ...] = Field(
        default=(CrossedKLConfig(),),
        description="Loss terms and corrections on top of the objective, each at most once; crossed_kl is one of them.",
    )
    merge: AnyMerge = Field(
        default=CenterMergeConfig(), description="What a client does with the global model that it receives."
    )

    def check(self, model: ModelConfig) -> None:
        if all(add_on.name != "crossed_kl" for add_on in self.add_ons):
            raise ValueError("fedrlc without crossed_kl is fedema: add crossed_kl to method.add_ons, or use fedema")
        super().check(model)
