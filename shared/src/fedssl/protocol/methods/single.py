"""Single-client training: every client by itself, the lower baseline of FedU (and of FLESD, as Min-Local).

FedU (Zhuang et al. 2021) trains BYOL for 500 epochs at each client and reports the clients' mean; FLESD reports the
minimum over clients of its own objective after 200 epochs. The merge rule `local` keeps a client's weights from round
to round, the reducer `none` combines nothing, and the update holds no tensor. The two go onto any other method by
config. All clients start from the run's initial weights.

The trained encoders are in the clients' states (`Result.client_states` in a simulation: `encoder.*`); the run's own
model stays what it was before the first round. R rounds of E epochs are R * E epochs of training. The optimiser's
momentum starts from zero in each round; one round of all epochs avoids that. A client that is not sampled in a round
does not train in it.
"""

from typing import ClassVar, Literal

from pydantic import Field

from fedssl.protocol.methods.base import MethodInfo
from fedssl.protocol.methods.fedbyol import FedBYOLConfig
from fedssl.protocol.methods.merges import AnyMerge, LocalConfig
from fedssl.protocol.methods.reducers import AnyReducer, NoReducerConfig


class SingleConfig(FedBYOLConfig):
    """BYOL on each client by itself: nothing is sent, nothing averaged."""

    info: ClassVar[MethodInfo] = MethodInfo(
        title="Single-client training",
        paper="The baseline of FedU (Zhuang et al. 2021, Section 4.1: Single Client Training) and of FLESD (Shi et al. "
        "2021: Min-Local)",
        equations="BYOL Eq. 2, symmetrised",
        leaves_the_client="nothing: the update holds no tensor. Loss and number of images are reported as always",
        stays_on_the_client="all of its networks",
    )

    name: Literal["single"] = "single"  # type: ignore[assignment]
    merge: AnyMerge = Field(
        default=LocalConfig(),
        description="Each client keeps its own weights. Together with the reducer, it goes onto any other method too.",
    )
    reducer: AnyReducer = Field(default=NoReducerConfig(), description="Combine nothing.")
