"""What a run does against updates that would move the global model too far at once."""

from typing import Literal

from pydantic import Field

from fedssl.protocol.base import StrictModel


class RobustnessConfig(StrictModel):
    """Bounds how far one client's update may lie from the weights that it received. Off by default.

    It limits what one client can do in one round, and reports which one tried. It cannot judge an update otherwise.
    """

    max_update_norm: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="Largest L2 norm of update minus broadcast, over all floating-point weights that both hold. Null: "
        "no limit.",
    )
    action: Literal["clip", "reject"] = Field(
        default="clip",
        description="If the norm is larger, `clip` scales the difference down to it, and `reject` "
        "leaves the update out.",
    )
