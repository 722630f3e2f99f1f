"""Configs of the reducers: how the coordinator combines the clients' weights."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from fedssl.protocol.methods.distillation import DistillationConfig
from fedssl.protocol.methods.parts import Host, PartConfig
from fedssl.protocol.model import ModelConfig
from fedssl.protocol.training import CohortConfig


class MeanConfig(PartConfig):
    """The weighted mean of everything, including BatchNorm's statistics."""

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


class RobustReducerConfig(PartConfig):
    """A reducer whose result a minority of dishonest clients cannot move arbitrarily far."""

    why_not_summed: ClassVar[str | None] = "a robust reducer compares each update with every other one"

    meaning: ClassVar[str]
    """The setting from which `num_needed` follows, for messages."""

    @property
    def num_needed(self) -> int:
        """The number of updates without which the reducer is not defined or gives no protection."""
        raise NotImplementedError

    def check(self, host: Host, model: ModelConfig) -> None:
        parts = (*host.add_ons, host.merge)
        averaged = [(part.averaged_apart, part.name) for part in parts]
        for what, owner in [*averaged, (host.averaged_apart, host.name)]:
            if what is not None:
                raise ValueError(
                    f"method.reducer {self.name} would not protect the run: the coordinator averages the {what} "
                    f"of {owner} by itself; leave {owner} out, or use another reducer"
                )

    def check_cohort(self, cohort: CohortConfig) -> None:
        if (cohort.min_updates or 0) < self.num_needed:
            raise ValueError(
                f"method.reducer {self.name} with {self.meaning} needs {self.num_needed} updates in every round: set "
                f"cohort.min_updates to {self.num_needed} or more"
            )


class MedianConfig(RobustReducerConfig):
    """The median of each coordinate (Yin et al. 2018). Clients count equally, however many images they have."""

    name: Literal["median"] = "median"
    meaning: ClassVar[str] = "one dishonest client"

    @property
    def num_needed(self) -> int:
        return 3


class TrimmedMeanConfig(RobustReducerConfig):
    """The mean of each coordinate without its lowest and highest values (Yin et al. 2018). Clients count equally."""

    name: Literal["trimmed_mean"] = "trimmed_mean"
    meaning: ClassVar[str] = "this num_trimmed"
    num_trimmed: int = Field(
        default=1,
        ge=1,
        le=10_000,
        description="How many values are removed at each end: the number of clients that may be dishonest.",
    )

    @property
    def num_needed(self) -> int:
        return 2 * self.num_trimmed + 1


class MultiKrumConfig(RobustReducerConfig):
    """The mean of the updates that lie closest to their neighbours (Blanchard et al. 2017). Clients count equally."""

    name: Literal["multi_krum"] = "multi_krum"
    meaning: ClassVar[str] = "this num_byzantine and num_selected"
    num_byzantine: int = Field(
        default=1, ge=1, le=10_000, description="f, the number of clients that may be dishonest: 2 f + 2 < K."
    )
    num_selected: int | None = Field(
        default=None, ge=1, le=100_000, description="Number of updates that are averaged; 1 is Krum. Null: K - f."
    )

    @property
    def num_needed(self) -> int:
        return max(2 * self.num_byzantine + 3, self.num_selected or 0)


class GeometricMedianConfig(RobustReducerConfig):
    """The point with the smallest sum of distances to the updates, by a smoothed Weiszfeld iteration (RFA, Pillutla et
    al. 2022). Clients count by their images, as in the mean."""

    name: Literal["geometric_median"] = "geometric_median"
    meaning: ClassVar[str] = "one dishonest client"
    num_iterations: int = Field(
        default=32,
        ge=1,
        le=1000,
        description="Largest number of steps; each reads all updates twice, and it ends early when it stands "
        "still. RFA takes 3 to 5, which suits updates within robustness.max_update_norm.",
    )
    smoothing: float = Field(
        default=1e-6,
        gt=0,
        le=1e6,
        description="nu: nearer updates than this count as equally near.",
    )

    @property
    def num_needed(self) -> int:
        return 3


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
    DistillationConfig
    | EUAConfig
    | GeometricMedianConfig
    | LDAWAConfig
    | MeanConfig
    | MedianConfig
    | MultiKrumConfig
    | NoReducerConfig
    | TrimmedMeanConfig,
    Field(discriminator="name"),
]
