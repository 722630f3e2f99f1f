"""Configs of the reducers: how the coordinator combines the clients' weights."""

from typing import Annotated, Literal

from pydantic import Field

from fedssl.protocol.methods.parts import PartConfig


class MeanConfig(PartConfig):
    """Weighted mean of everything, BatchNorm statistics included."""

    name: Literal["mean"] = "mean"
    weighting: Literal["examples", "batches", "uniform"] = Field(
        default="examples",
        description="By images (FedX, EasyFL), by batches of an epoch (SSD, FedU2, Orchestra) or all alike (FLESD).",
    )


AnyReducer = Annotated[MeanConfig, Field(discriminator="name")]
