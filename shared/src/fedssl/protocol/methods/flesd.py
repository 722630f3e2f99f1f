"""Config of FLESD."""

from typing import ClassVar, Literal

from pydantic import Field

from fedssl.protocol.methods.base import MethodInfo
from fedssl.protocol.methods.composed import ComposedConfig
from fedssl.protocol.methods.distillation import DistillationConfig
from fedssl.protocol.methods.reducers import AnyReducer


class FLESDConfig(ComposedConfig):
    """Clients train by themselves and send similarities of public images; the coordinator distils them."""

    info: ClassVar[MethodInfo] = MethodInfo(
        title="FLESD",
        paper="Shi et al. 2021, Towards Communication-Efficient and Privacy-Preserving Federated Representation "
        "Learning",
        equations="FLESD Eq. 3 to 10",
        leaves_the_client="similarities of public images (packing `representations`: their embeddings); no weights",
        stays_on_the_client="nothing between rounds; a client with an encoder of its own keeps its network",
        version=2,
    )

    name: Literal["flesd"] = "flesd"
    temperature: float = Field(
        default=0.4, gt=0, le=100, description="tau of the local contrastive loss (FLESD, CIFAR: 0.4)."
    )
    views: Literal["joint", "separate"] = Field(
        default="joint",
        exclude_if=lambda it: it == "joint",
        description="How the two views of an image pass the networks: as one batch with common BatchNorm statistics, "
        "or one after the other (FLESD's code).",
    )
    reducer: AnyReducer = Field(
        default=DistillationConfig(),
        description="How the coordinator combines what clients send. mean with weighting uniform is FLESD's "
        "FedAvg row.",
    )
