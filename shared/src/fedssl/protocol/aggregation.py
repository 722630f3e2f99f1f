"""The arithmetic in which the coordinator adds up updates."""

from typing import Literal

from pydantic import Field

from fedssl.protocol.base import StrictModel


class AggregationConfig(StrictModel):
    """How the coordinator computes its weighted means."""

    arithmetic: Literal["float", "fixed"] = Field(
        default="float",
        description="`float`: running means in float64, in the order of the clients' names. `fixed`: each client's "
        "difference from the broadcast, times its weight, is rounded once to an integer on a public scale: any order "
        "and any tree of partial sums gives the same bits. If a value does not fit, nothing is clipped: the round is "
        "skipped, and its reason names the tensor. Only for methods whose coordinator computes weighted means.",
    )
