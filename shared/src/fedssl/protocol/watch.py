"""Watching a run for collapse and drift, from numbers about each client that hold no image."""

from typing import Literal

from pydantic import Field

from fedssl.protocol.base import StrictModel


class WatchConfig(StrictModel):
    """After its training each client measures its own encoder; what crosses a threshold warns, or pauses the run.

    It changes no weight. Collapsed representations are no longer told apart; drift is a client going its own way.
    """

    num_images: int = Field(
        default=256, ge=0, le=100_000, description="Of the client's own images, the first so many; 0: do not watch."
    )
    min_effective_rank: float | None = Field(
        default=2.0, gt=0, description="Of the representations h, centred; 1 is a single line. None: not watched."
    )
    min_feature_std: float | None = Field(
        default=0.05,
        gt=0,
        le=1,
        description="Of unit representations times the square root of their width: 1 is spread evenly, 0 collapsed.",
    )
    min_embedding_std: float | None = Field(
        default=0.1, gt=0, le=1, description="The same of the projector's z, which can collapse while h does not."
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
