"""What a run does against updates that would move the global model too far at once."""

from typing import Literal

from pydantic import Field

from fedssl.protocol.base import StrictModel


class RobustnessConfig(StrictModel):
    """Bounds how far one client's update may lie from the weights that it received. Off by default.

    It limits what one client can do in one round, and says who tried; it does not tell a bad update from a good one.
    """

    max_update_norm: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="Largest L2 norm of update minus broadcast, over all floating-point weights that both hold. None: "
        "not looked at.",
    )
    action: Literal["clip", "reject"] = Field(
        default="clip",
        description="With a larger one: `clip` shortens the difference to the norm, `reject` leaves the update out.",
    )
