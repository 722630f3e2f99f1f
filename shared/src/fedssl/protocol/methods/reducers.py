"""Configs of the reducers: how the coordinator combines the clients' weights."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from fedssl.protocol.methods.distillation import DistillationConfig
from fedssl.protocol.methods.parts import Host, PartConfig
from fedssl.protocol.model import ModelConfig


class MeanConfig(PartConfig):
    """Weighted mean of everything, BatchNorm statistics included."""

    name: Literal["mean"] = "mean"
    weighting: Literal["examples", "batches", "uniform"] = Field(
        default="examples",
        description="By images (FedX, EasyFL), by batches of an epoch (SSD, FedU2, Orchestra) or equally (FLESD).",
    )


class EUAConfig(PartConfig):
    """FedU2's efficient unified aggregation: a step along the direction on which the clients agree most."""

    why_not_summed: ClassVar[str | None] = "method.reducer eua compares each update with every other one"

    name: Literal["eua"] = "eua"
    server_learning_rate: float = Field(
        default=8.0,
        gt=0,
        le=1000,
        description="eta_s. It multiplies a step of length 2 at most, whatever the model: FedU2's code uses 8 with a "
        "ResNet-18; a model with fewer weights needs less.",
    )


class LDAWAConfig(PartConfig):
    """L-DAWA: the mean of the weights, each tensor scaled by its cosine to the global one that was sent."""

    name: Literal["ldawa"] = "ldawa"
    num_plain_rounds: int = Field(
        default=3, ge=0, le=100_000, description="Number of first rounds that are plain means, as in L-DAWA's code."
    )
    batch_norm: Literal["plain", "scaled"] = Field(
        default="plain",
        description="BatchNorm's statistics: plain means, or scaled too, as L-DAWA's code does with every tensor.",
    )


class NoReducerConfig(PartConfig):
    """Nothing is combined: the global model stays what it was before the first round."""

    name: Literal["none"] = "none"

    def check(self, host: Host, model: ModelConfig) -> None:
        if host.merge.name != "local":
            raise ValueError(
                "method.reducer none combines nothing, so no client may need the global model: set "
                "method.merge to local"
            )


AnyReducer = Annotated[
    DistillationConfig | EUAConfig | LDAWAConfig | MeanConfig | NoReducerConfig, Field(discriminator="name")
]
