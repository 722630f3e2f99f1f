"""FedDecorr, as in SSD's tables: FedAlignUniform with the add-on `decorrelation` on the embeddings.

Shi et al. 2023; equations, variants and deviations are in the module `add_ons.decorrelation`. FedDecorr itself is
supervised, with the term on the representation: the method `supervised` with this add-on on "h". What SSD's row ran is
not documented; the same loss and optimiser as its other rows, with the method's component added, fit its numbers.
"""

from typing import ClassVar, Literal

from pydantic import Field

from fedssl.protocol.methods.add_ons import AnyAddOn, DecorrelationConfig
from fedssl.protocol.methods.base import MethodInfo
from fedssl.protocol.methods.fedalignuniform import FedAlignUniformConfig
from fedssl.protocol.methods.reducers import AnyReducer, MeanConfig


class FedDecorrConfig(FedAlignUniformConfig):
    """FedAlignUniform with decorrelated embeddings, as in SSD's tables."""

    info: ClassVar[MethodInfo] = MethodInfo(
        title="FedDecorr",
        paper="Shi et al. 2023, Towards Understanding and Mitigating Dimensional Collapse in Heterogeneous Federated "
        "Learning; on alignment and uniformity as in SSD (Fang et al. 2025)",
        equations="FedDecorr Eq. 6, SSD Eq. 3 and 4",
        leaves_the_client="weights of encoder and projector",
        stays_on_the_client="nothing between rounds",
    )

    name: Literal["feddecorr"] = "feddecorr"  # type: ignore[assignment]
    add_ons: tuple[AnyAddOn, ...] = Field(
        default=(DecorrelationConfig(),),
        description="Decorrelation of the embeddings. FedDecorr's own experiments are supervised with it on h.",
    )
    reducer: AnyReducer = Field(
        default=MeanConfig(weighting="batches"), description="By batches of an epoch, as in the rest of SSD's tables."
    )
