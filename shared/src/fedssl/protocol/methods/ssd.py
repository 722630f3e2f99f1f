"""Config of SSD."""

from typing import ClassVar, Literal

from pydantic import Field

from fedssl.protocol.methods.add_ons import AnyAddOn, DSRConfig, PDConfig
from fedssl.protocol.methods.base import MethodInfo
from fedssl.protocol.methods.fedalignuniform import FedAlignUniformConfig
from fedssl.protocol.methods.reducers import AnyReducer, MeanConfig


class SSDConfig(FedAlignUniformConfig):
    """FedAlignUniform with soft separation (DSR) and projector distillation (PD)."""

    info: ClassVar[MethodInfo] = MethodInfo(
        title="SSD",
        paper="Fang et al. 2025, Soft Separation and Distillation: Toward Global Uniformity in Federated Unsupervised "
        "Learning",
        equations="Eq. 3, 4, 6, 7, 9 and 10",
        leaves_the_client="weights of encoder and projector",
        stays_on_the_client="nothing between rounds; its dimensions are the run's",
    )

    name: Literal["ssd"] = "ssd"  # type: ignore[assignment]
    add_ons: tuple[AnyAddOn, ...] = Field(
        default=(DSRConfig(), PDConfig()),
        description="DSR and PD; leave one out for Table 3, set pd's variant to mse for Table 5, or name hsd in place "
        "of dsr for hard separation. PD needs model.projector.out_dim to be the representation's width.",
    )
    reducer: AnyReducer = Field(
        default=MeanConfig(weighting="batches"), description="SSD's code weights by batches of an epoch."
    )
