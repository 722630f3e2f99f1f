"""FedU2, as in SSD's tables: FedAlignUniform with the add-on `fur` and the reducer `eua`.

Liao et al. 2024. FUR is in the module `add_ons.flexible_uniform`. EUA, the reducer: with G_k = theta_g - theta_k over
all parameters as one vector, Ghat_k = 2 G_k / ||G_k|| and w the weights of the shortest convex combination of the
Ghat_k,

    theta_g <- theta_g - eta_s sum_k w_k Ghat_k

with eta_s `server_learning_rate` (8). BatchNorm's statistics are means weighted by batches.

The length of a step is eta_s times at most 2, whatever the model and the clients' learning rate: 8 belongs to
FedU2's ResNet-18 at learning rate 0.048. A small model needs much less, about the length of a client's drift over 2.

Deviations: released FedU2 trains SimCLR at temperature 0.07 (`fedsimclr` with these two parts), adds a rotation task,
and evens out the clients' numbers of steps; SSD's row stands for the two components that the paper describes. The
min-norm point is exact. Others could not reproduce FedU2's published numbers from its code.
"""

from typing import ClassVar, Literal

from pydantic import Field

from fedssl.protocol.methods.add_ons import AnyAddOn, FURConfig
from fedssl.protocol.methods.base import MethodInfo
from fedssl.protocol.methods.fedalignuniform import FedAlignUniformConfig
from fedssl.protocol.methods.reducers import AnyReducer, EUAConfig


class FedU2Config(FedAlignUniformConfig):
    """FedAlignUniform with FedU2's regulariser on the clients and its aggregation on the coordinator."""

    info: ClassVar[MethodInfo] = MethodInfo(
        title="FedU2",
        paper="Liao et al. 2024, Rethinking the Representation in Federated Unsupervised Learning with Non-IID Data; "
        "on alignment and uniformity as in SSD (Fang et al. 2025)",
        equations="FedU2's FUR and EUA as its code has them, SSD Eq. 3 and 4",
        leaves_the_client="weights of encoder and projector",
        stays_on_the_client="nothing between rounds",
    )

    name: Literal["fedu2"] = "fedu2"  # type: ignore[assignment]
    add_ons: tuple[AnyAddOn, ...] = Field(
        default=(FURConfig(),),
        description="FUR; put it onto fedsimclr at temperature 0.07 for FedU2's own experiments.",
    )
    reducer: AnyReducer = Field(default=EUAConfig(), description="EUA; its server_learning_rate must suit the model.")
