"""Config of FedProtoCL."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from fedssl.protocol.methods.base import MethodInfo
from fedssl.protocol.methods.fedmoco import MomentumContrastConfig


class FedProtoCLConfig(MomentumContrastConfig):
    """FedAvg of ProtoCL: momentum contrast, and contrast with the prototypes of local clusters."""

    info: ClassVar[MethodInfo] = MethodInfo(
        title="FedProtoCL",
        paper="Li et al. 2021, Prototypical Contrastive Learning of Unsupervised Representations; "
        "federated as in FedX (Han et al. 2022)",
        equations="ProtoCL Eq. 11 and 12",
        leaves_the_client="weights of encoder and projector",
        stays_on_the_client="the queue of keys; prototypes, computed before every epoch",
    )

    name: Literal["fedprotocl"] = "fedprotocl"
    temperature: float = Field(
        default=0.1,
        gt=0,
        le=100,
        description="Temperature of InfoNCE, and mean of the prototypes' concentrations. FedX's tables use 0.1, "
        "ProtoCL 0.2.",
    )
    images_per_cluster: tuple[Annotated[int, Field(ge=1, le=1_000_000)], ...] = Field(
        default=(100, 50, 25),
        min_length=1,
        max_length=16,
        description="One clustering per entry: by default n/100, n/50 and n/25 clusters of a client's n images, and at "
        "least 2. ProtoCL has 25000, 50000 and 100000 clusters of ImageNet's 1.3 million.",
    )
    num_kmeans_iterations: int = Field(
        default=20, ge=1, le=1000, description="Iterations per clustering (ProtoCL: 20)."
    )
    warmup_share: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="Share of the rounds, rounded down, that begin the run without prototypes (ProtoCL: 20 epochs of "
        "200).",
    )

    def num_warmup_rounds(self, num_rounds: int) -> int:
        """Return how many of the run's rounds have no prototypes."""
        return int(self.warmup_share * num_rounds)

    def check_continuation(self, num_rounds: int, total: int) -> None:
        super().check_continuation(num_rounds, total)
        before, after = self.num_warmup_rounds(num_rounds), self.num_warmup_rounds(total)
        if before != after:
            raise ValueError(
                f"method.warmup_share is {self.warmup_share}: the first {after} of {total} rounds train without "
                f"prototypes, and only {before} of {num_rounds} did"
            )

    @property
    def contrast_temperature(self) -> float:
        """The temperature."""
        return self.temperature
