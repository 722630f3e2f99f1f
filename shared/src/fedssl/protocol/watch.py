"""How a run is watched for collapse and drift, by numbers about each client that reveal no image."""

from typing import Literal

from pydantic import Field

from fedssl.protocol.base import StrictModel


class WatchConfig(StrictModel):
    """Each client measures its encoder after training; a value beyond a threshold warns, or pauses the run.

    It changes no weight. Collapsed representations are all alike; drift means that a client moves away from the others.
    """

    num_images: int = Field(
        default=256,
        ge=0,
        le=100_000,
        description="Measure on this many of the client's images, the first ones. 0 turns it off.",
    )
    min_effective_rank: float | None = Field(
        default=2.0,
        gt=0,
        description="Smallest effective rank of the centred representations h; 1 is a line. Null: no threshold.",
    )
    min_feature_std: float | None = Field(
        default=0.05,
        gt=0,
        le=1,
        description="Smallest deviation of unit representations times the square root of their "
        "width: 1 is evenly spread, 0 collapsed.",
    )
    min_embedding_std: float | None = Field(
        default=0.1, gt=0, le=1, description="The same for the projector's z, which can collapse while h does not."
    )
    max_divergence: float | None = Field(
        default=None,
        gt=0,
        description="Distance of the client's encoder from the one it received, relative to the latter's length.",
    )
    first_round: int = Field(
        default=2,
        ge=1,
        description="Earlier rounds do not warn: the outputs of a hardly trained network differ little.",
    )
    action: Literal["warn", "pause"] = Field(
        default="warn", description="`warn` writes an event; `pause` also pauses the run when the round is closed."
    )
