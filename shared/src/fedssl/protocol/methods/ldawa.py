"""L-DAWA, as in SSD's tables: FedAlignUniform with the reducer `ldawa`.

Rehman et al. 2023. For every tensor l of the model

    theta_g^l = 1/K sum_k min(1, cos(theta_k^l, theta_prev^l)) theta_k^l

with theta_prev the global model that was sent. There are no weights by images and no renormalisation, so disagreement
shrinks a tensor. The first three rounds (`num_plain_rounds`) are plain means with equal weights.

Deviations: BatchNorm's statistics are not directions and are averaged plainly (`batch_norm` "plain"); L-DAWA's code
scales them too ("scaled"). FedU2's port, which SSD's row may have run, takes one cosine for a whole network.
"""

from typing import ClassVar, Literal

from pydantic import Field

from fedssl.protocol.methods.base import MethodInfo
from fedssl.protocol.methods.fedalignuniform import FedAlignUniformConfig
from fedssl.protocol.methods.reducers import AnyReducer, LDAWAConfig


class LDAWAMethodConfig(FedAlignUniformConfig):
    """FedAlignUniform with layer-wise divergence-aware aggregation, as in SSD's tables."""

    info: ClassVar[MethodInfo] = MethodInfo(
        title="L-DAWA",
        paper="Rehman et al. 2023, L-DAWA: Layer-wise Divergence Aware Weight Aggregation in Federated Self-Supervised "
        "Visual Representation Learning; on alignment and uniformity as in SSD (Fang et al. 2025)",
        equations="L-DAWA's aggregation as its code has it, SSD Eq. 3 and 4",
        leaves_the_client="weights of encoder and projector",
        stays_on_the_client="nothing between rounds",
    )

    name: Literal["ldawa"] = "ldawa"  # type: ignore[assignment]
    reducer: AnyReducer = Field(
        default=LDAWAConfig(), description="L-DAWA. L-DAWA's own experiments are fedsimclr with it."
    )
