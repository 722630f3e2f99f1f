"""A run whose coordinator learns only the sum of its clients' updates."""

from pydantic import Field, model_validator

from fedssl.protocol.base import StrictModel

NOT_PROMISED = (
    "Not promised: active security (protection from participants that break the protocol), anonymity, and protection "
    "of what the sum itself discloses. No cryptographer outside this project has reviewed the protocol."
)
"""The limits of secure aggregation, which are shown with each run that has it."""


class SecureAggregationConfig(StrictModel):
    """Secure aggregation: masks hide each update, and only their sum is disclosed.

    A lost client does not stop a round. A round that has no sum closes as skipped.
    """

    min_cohort: int = Field(
        default=5,
        ge=3,
        le=10_000,
        description="The smallest number of updates in a sum. With two, each of the two clients would know the "
        "other's.",
    )
    collusion: int = Field(
        default=1,
        ge=0,
        le=9_998,
        description="How many clients may give the coordinator everything that they know without disclosing the "
        "update of another one.",
    )
    phase_seconds: float = Field(
        default=60,
        ge=1,
        le=3600,
        exclude_if=lambda it: it == 60,
        description="How long a phase of the protocol waits for the messages of all its clients. After that it "
        "continues without the missing ones if there are enough others. The masked vectors have the time of the round.",
    )

    @model_validator(mode="after")
    def _sum_hides_two(self) -> "SecureAggregationConfig":
        if self.min_cohort < self.collusion + 2:
            raise ValueError(
                f"secure_aggregation.min_cohort is {self.min_cohort}: with collusion = {self.collusion}, a sum needs "
                f"{self.collusion + 2} updates or more, so that those of two honest clients are in it"
            )
        return self
